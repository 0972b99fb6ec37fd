"""Disaggregated serving; named only, the double does not serve it."""

from tensorrt_llm._table import Fields


class DisaggregatedParams(Fields, path="tensorrt_llm.llmapi.DisaggregatedParams", error=TypeError):
    """Parameters of disaggregated serving."""
