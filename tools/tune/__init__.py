"""Thresholds of a model repository, tuned under load; see `tools.tune.__main__`."""
