"""Clients of load tests: prompts, streamed calls over gRPC and HTTP, and what their users would feel."""
