"""TensorRT-LLM (LLM API, PyTorch backend) as the engine. Nothing of it is imported before a model loads."""
