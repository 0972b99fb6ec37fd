"""Runs of NVIDIA's perf_analyzer and genai-perf: inputs, and a table of what they recorded."""
