"""Triton's entry point of a model of the standard-serving baseline; copied into its version folder."""

from perf.baselines.standard.serve import TritonPythonModel

__all__ = ["TritonPythonModel"]
