"""One request at one model: the subserver's view of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tokenrouter.messages import Outcome, PolicySpec, Sampling
from tokenrouter.policies.base import Policy


class ModelSequence:
    """Token history, KV position and visit of one request at one model.

    `tokens` is prompt and committed tokens as far as this model was told; `kv_length` of them are in the engine's KV.
    Satisfies `policies.base.Row` and `sampling.SampledRow`. Hashed by identity.

    Attributes:
        peer, request: whose it is; orchestrators number their requests independently.
        handle: of the engine's lease of KV.
        lease: tokens that it has room for.
        visit: number of the stay that goes on or was the last.
        visit_limit: most tokens of this visit; None = no limit known beforehand.
        then: the model after that limit.
        resident: whether a visit goes on.
    """

    __slots__ = (
        "_counted",
        "_counts",
        "banned",
        "handle",
        "kv_length",
        "lease",
        "model",
        "peer",
        "policy",
        "prompt_tokens",
        "request",
        "resident",
        "sampling",
        "seed",
        "source",
        "spec",
        "state",
        "then",
        "tokens",
        "visit",
        "visit_limit",
        "visit_tokens",
    )

    def __init__(
        self,
        *,
        model: str,
        tokens: Sequence[int],
        prompt_tokens: int,
        sampling: Sampling,
        policy: Policy,
        spec: PolicySpec | None = None,
        lease: int = 0,
        handle: Any = None,
        peer: int = 0,
        request: int = 0,
    ) -> None:
        self.peer = peer
        self.request = request
        self.model = model
        self.tokens = list(tokens)
        self.prompt_tokens = prompt_tokens
        self.sampling = sampling
        self.seed = sampling.seed
        self.policy = policy
        self.spec = spec
        self.lease = lease
        self.handle = handle
        self.banned: Sequence[int] = ()
        self.kv_length = 0
        self.resident = False
        self.visit = -1
        self.visit_tokens = 0
        self.visit_limit: int | None = None
        self.then = ""
        self.source = ""
        self.state: dict[str, Any] = {}
        self._counts: Counter[int] = Counter()
        self._counted = 0

    @property
    def position(self) -> int:
        """Index in the response of the next token."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def unseen(self) -> int:
        """Tokens that the next step has to run."""
        return len(self.tokens) - self.kv_length

    @property
    def at_limit(self) -> bool:
        """Whether the next token is the last one of a visit whose limit was known beforehand."""
        return self.visit_limit is not None and self.visit_tokens + 1 >= self.visit_limit

    def end(self) -> Outcome | None:
        """How the response ends with the token that was committed last, or None if it goes on."""
        if self.tokens[-1] in self.sampling.end_ids:
            return Outcome.STOP
        return Outcome.LENGTH if self.position >= self.sampling.max_tokens else None

    def splice(self, start: int, tokens: Sequence[int]) -> None:
        """Replaces everything from position `start` on."""
        if start < len(self.tokens):
            self._counts.clear()
            self._counted = 0
        self.tokens[start:] = tokens
        # The last token is always run again, so that a step has logits to give even if nothing is new.
        self.kv_length = min(self.kv_length, start, len(self.tokens) - 1)

    def arrive(self, *, visit: int, source: str, state: dict[str, Any] | None) -> None:
        self.visit = visit
        self.visit_tokens = 0
        self.source = source
        self.resident = True
        if state is not None:
            self.state = state

    def commit(self, token: int) -> None:
        self.tokens.append(token)
        self.visit_tokens += 1

    def response_counts(self) -> Counter[int]:
        """Occurrences of token ids in the response."""
        first = max(self._counted, self.prompt_tokens)
        self._counts.update(self.tokens[first:])
        self._counted = len(self.tokens)
        return self._counts

    def seen(self) -> set[int]:
        """Token ids in prompt and response."""
        return set(self.tokens)
