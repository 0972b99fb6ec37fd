"""Baseline *standard serving*: one server per LLM, every call returns one token, an external dispatcher routes.

What a team builds that has LLM servers and wants token-level routing without changing them, made as good as it can be:

* each LLM is a Triton model with in-flight batching and a paged prefix cache (a radix tree over token ids, eviction by
  last use), on the same engines as TokenRouter's; KV stays between calls, so a call runs only the tokens it adds;
* the dispatcher is one asyncio process with one gRPC stream per model; it keeps the requests' history and policy state
  and makes a call per token, also when a request stays where it is;
* to favour the baseline, the policy runs inside the model server, on the step's own logits and hidden states, and a
  reply says where to go; so no logits travel. The dispatcher sends and receives token ids and makes no text.

No time is added anywhere: what grows with the context is what sending, receiving and looking up the ids take.
"""

from perf.baselines.standard.dispatcher import CallFailed
from perf.baselines.standard.result import Response, Run
from perf.baselines.standard.serving import StandardServing

__all__ = ["CallFailed", "Response", "Run", "StandardServing"]
