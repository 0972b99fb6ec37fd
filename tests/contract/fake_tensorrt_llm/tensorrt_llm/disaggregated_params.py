"""Disaggregated serving; named only, the double does not serve it."""

from tensorrt_llm._table import keyword_dataclass

DisaggregatedParams = keyword_dataclass("tensorrt_llm.llmapi.DisaggregatedParams", module=__name__)
