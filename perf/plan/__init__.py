"""What `tools.plan` predicts, beside a server."""
