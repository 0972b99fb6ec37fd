"""TokenRouter: token-level LLM routing as a production backend for NVIDIA Triton Inference Server."""

__version__ = "0.1.0"
