"""Benchmarks and studies; nothing here is needed to serve."""
