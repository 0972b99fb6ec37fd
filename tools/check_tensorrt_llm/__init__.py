"""Compares an installed TensorRT-LLM with what the adapter relies on."""
