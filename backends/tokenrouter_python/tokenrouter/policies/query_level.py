"""Query-level routing (RouteLLM, arXiv 2406.18665): one decision per request, on the prompt.

w = estimated win rate of the large model; **w >= threshold** gives it the whole response (RouteLLM's README says
"greater than", its code >=). With n models, n - 1 rising thresholds: the model is the number of them that w reaches.
Only the last message's content counts, no system prompt and no history. Source: lm-sys/RouteLLM,
routellm/routers/routers.py, controller.py. Its `mf` and `sw_ranking` need a remote embedding service and its
`causal_llm` a third LLM: not offered.

Routers: `length` (w = 1 from `min_tokens` on, else 0), `regex` (w = 1 if a pattern matches), `classifier` (our small
text classifier), `bert` (RouteLLM's 3-class format), `random` (w uniform).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from tokenrouter.errors import ConfigError, InvalidRequest
from tokenrouter.messages import Measure
from tokenrouter.policies.base import EntryRequest, Policy, PolicyParams
from tokenrouter.policies.checkpoints import cached, default_checkpoint, listed, resolve
from tokenrouter.policies.one_token import check_unit
from tokenrouter.rng import Stream, draw

if TYPE_CHECKING:
    from tokenrouter.policies.checkpoints.win_rate import WinRate


class QueryLevel(Policy):
    """Any number of models, small first; nobody ever leaves."""

    name = "query_level"

    class Params(PolicyParams):
        """Knobs of `QueryLevel`.

        `checkpoint`: a text file of patterns, one a line (`regex`), a ``.safetensors`` file (`classifier`, by default
        the deployment's own), or a Hugging Face folder (`bert`). Patterns come from a file, because a client's own
        could stall the server. `threshold`: in [0, 1], n - 1 rising ones for n models; by default the file's, else
        k / n. `message_start` and `message_end`: what encloses the last message in the prompt; the whole prompt counts
        if the first is not found.
        """

        router: Literal["length", "regex", "classifier", "bert", "random"] = "length"
        threshold: float | tuple[float, ...] | None = None
        checkpoint: str = ""
        min_tokens: int = 256
        message_start: str = "<|im_start|>user\n"
        message_end: str = "<|im_end|>"

    def check(self) -> None:
        """Refuses thresholds that do not fit the models, and a missing or superfluous checkpoint."""
        self._loaded: WinRate | None = None
        if len(self.models) < 2:
            raise ConfigError(f"policy 'query_level' chooses between models; this deployment has only {self.models[0]}")
        if self.params.threshold is not None:
            self._thresholds(self.params.threshold)
        self._checkpoint = self.params.checkpoint
        if self.params.router == "classifier":
            self._checkpoint = self._checkpoint or default_checkpoint(self.context, self.name)
        if (self.params.router in ("regex", "classifier", "bert")) != bool(self._checkpoint):
            needs = "has no use for a" if self._checkpoint else "needs a"
            raise InvalidRequest(f"policy_params.router {self.params.router!r} {needs} checkpoint")
        if self.params.checkpoint:
            listed(self.context, self._checkpoint)

    def _thresholds(self, given: float | Sequence[float]) -> tuple[float, ...]:
        values = (given,) if isinstance(given, (int, float)) else tuple(given)
        for value in values:
            check_unit("threshold", value)
        if len(values) != len(self.models) - 1 or list(values) != sorted(values):
            raise InvalidRequest(
                f"policy_params.threshold is {list(values)}; {len(self.models)} models need {len(self.models) - 1} "
                "thresholds in rising order"
            )
        return values

    def prepare(self, model: str) -> None:
        """Loads the router in the orchestrator."""
        if not model:
            self._router()

    def _router(self) -> WinRate | None:
        """What is read from the checkpoint, or None if the router needs none."""
        if self._checkpoint and self._loaded is None:
            from tokenrouter.policies.checkpoints import win_rate

            path = resolve(self.context, self._checkpoint, shipped=not self.params.checkpoint)
            self._loaded = cached(win_rate.LOADERS[self.params.router], path, "cpu")
        return self._loaded

    def entry(self, request: EntryRequest) -> str:
        """The writer of the whole response."""
        win_rate, thresholds = self._decisive(request)
        return self.models[sum(win_rate >= threshold for threshold in thresholds)]

    def explain_entry(self, request: EntryRequest) -> Sequence[Measure]:
        """The win rate beside each threshold; those that it reaches are counted."""
        win_rate, thresholds = self._decisive(request)
        return [Measure("win_rate", win_rate, ">=", threshold) for threshold in thresholds]

    def _decisive(self, request: EntryRequest) -> tuple[float, tuple[float, ...]]:
        """The win rate, and the thresholds."""
        router = self._router()
        given = self.params.threshold
        if given is None and router is not None and len(self.models) == 2:
            given = router.threshold
        if given is None:
            given = tuple(k / len(self.models) for k in range(1, len(self.models)))
        return self._win_rate(request, router), self._thresholds(given)

    def _win_rate(self, request: EntryRequest, router: WinRate | None) -> float:
        if router is not None:
            return router(self.last_message(request.prompt))
        if self.params.router == "random":
            return draw(request.seed, 0, Stream.ENTRY)
        return float(len(request.tokens) >= self.params.min_tokens)

    def last_message(self, prompt: str) -> str:
        """The content of the last message, or the whole prompt if no message is marked."""
        _, found, rest = prompt.rpartition(self.params.message_start) if self.params.message_start else ("", "", "")
        if not found:
            return prompt
        return rest.partition(self.params.message_end)[0] if self.params.message_end else rest


def threshold_for_share(win_rates: Sequence[float], share: float) -> float:
    """The threshold that sends a share of prompts like these to the large model: the quantile at 1 - share.

    Args:
        win_rates: w of sample prompts.
        share: wanted share of the large model, in [0, 1].

    Raises:
        InvalidRequest: no samples, or a share outside [0, 1].
    """
    check_unit("share", share)
    if not len(win_rates):
        raise InvalidRequest("no win rates given; route some sample prompts first")
    return float(np.quantile(np.asarray(win_rates, dtype=np.float64), 1.0 - share))
