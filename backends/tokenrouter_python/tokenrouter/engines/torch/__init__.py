"""The torch engine: forward passes on a CPU or a CUDA device, with a paged KV cache."""
