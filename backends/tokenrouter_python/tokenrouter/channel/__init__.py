"""The token channel: frames between an orchestrator and the subservers."""
