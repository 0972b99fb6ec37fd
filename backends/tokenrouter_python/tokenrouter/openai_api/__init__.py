"""An OpenAI-compatible server in front of Triton's gRPC endpoint; start it with `python -m tokenrouter.openai_api`."""
