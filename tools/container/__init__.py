"""What the container images are made with; see the Dockerfile and docs/deploy.md."""
