"""One request at one model: the subserver's view of it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from tokenrouter.messages import Fate, Guess, Outcome, PolicySpec, Sampling
from tokenrouter.policies.base import Policy


class ModelSequence:
    """Token history, KV position and visit of one request at one model.

    `tokens` is prompt and committed tokens as far as this model was told; `kv_length` of them are in the engine's KV.
    Where this model is ahead of the one that writes, its guesses stand at the end of `tokens`, one of `lefts` each.
    Where it checks another one's, they are in `guesses`, for the positions behind `tokens`; those that a step has run
    count in `kv_length` until they are settled.

    Satisfies `policies.base.Row` and `sampling.SampledRow`. Hashed by identity.

    Attributes:
        peer, request: whose it is; orchestrators number their requests independently.
        handle: of the engine's lease of KV.
        lease: tokens that it has room for.
        visit: number of the stay that goes on or was the last.
        visit_limit: most tokens of this visit; None = no limit known beforehand.
        then: the model after that limit.
        resident: whether a visit goes on, or this model is ahead.
        leader: the model that may go ahead, if the policy speculates; "" if not.
        depth: most guesses that it may hold, in this visit; 0 = it waits where its policy leaves.
        ahead: whether it went on from a guess of its own, and another model writes.
        lefts: of each of its guesses, whether its policy left there.
        stalled: it cannot guess the next token, and waits until it writes again.
        guesses: of the leader, to check here.
        explain: whether its decisions are reported.
        remembers: whether its state is reported where it stays.
        following: whether its guesses are as good as committed up to now, so that further ones count.
    """

    __slots__ = (
        "_counted",
        "_counts",
        "ahead",
        "banned",
        "depth",
        "explain",
        "following",
        "guesses",
        "handle",
        "kv_length",
        "leader",
        "lease",
        "lefts",
        "model",
        "peer",
        "policy",
        "prompt_tokens",
        "remembers",
        "request",
        "resident",
        "sampling",
        "seed",
        "source",
        "spec",
        "stalled",
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
        self.leader = ""
        self.depth = 0
        self.explain = False
        self.remembers = False
        self.ahead = False
        self.lefts: deque[bool] = deque()
        self.stalled = False
        self.guesses: deque[Guess] = deque()
        self.following = False
        self._counts: Counter[int] = Counter()
        self._counted = 0

    @property
    def position(self) -> int:
        """Index in the response of the next token."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def unseen(self) -> int:
        """Tokens that the next step has to run."""
        return len(self.tokens) + len(self.guesses) - self.kv_length

    @property
    def at_limit(self) -> bool:
        """Whether the next token is the last one of a visit whose limit was known beforehand."""
        return self.visit_limit is not None and self.visit_tokens + 1 >= self.visit_limit

    @property
    def ready(self) -> bool:
        """Whether a resident can take part in a step: one that is ahead only as far as it may guess."""
        if not self.ahead:
            return self.end() is None
        return len(self.lefts) < self.depth and not self.stalled and self.end() is None

    def end(self) -> Outcome | None:
        """How the response ends with the token that was committed last, or None if it goes on."""
        if self.tokens[-1] in self.sampling.end_ids:
            return Outcome.STOP
        return Outcome.LENGTH if self.position >= self.sampling.max_tokens else None

    def splice(self, start: int, tokens: Sequence[int]) -> None:
        """Replaces everything from position `start` on, guesses included."""
        self.lefts.clear()
        self.guesses.clear()
        self.following = self.stalled = self.ahead = False
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

    # --- ahead of the model that writes ---------------------------------------------------------------------------

    def guess(self, token: int, left: bool) -> None:
        """A guess is made."""
        self.ahead = True
        self.tokens.append(token)
        self.lefts.append(left)

    def settle(self, length: int, fate: Fate) -> int:
        """Guesses before position `length` of the response stand; what becomes of the others says `fate`.

        Returns how many of the others are tokens of this model's now.
        """
        for _ in range(min(len(self.lefts), length + len(self.lefts) - self.position)):
            self.lefts.popleft()
        if fate == Fate.ROLLED_BACK:
            self.splice(self.prompt_tokens + length, [])
        before = len(self.lefts)
        if fate == Fate.CONFIRMED:
            while self.lefts and not self.lefts[0]:
                self.lefts.popleft()
            self.ahead = bool(self.lefts)
            self.stalled = self.stalled and self.ahead
        return before - len(self.lefts)

    # --- checking the guesses of another model --------------------------------------------------------------------

    def follow(self, start: int, guesses: Sequence[Guess]) -> None:
        """Takes in guesses from position `start` of the response on, unless this model wrote something else there."""
        written = self.tokens[self.prompt_tokens + start :]
        if self.following and all(token == guess.token for token, guess in zip(written, guesses, strict=False)):
            self.guesses.extend(guesses[len(written) :])
        else:
            self.unfollow()

    def take_leaders(self) -> Outcome | None:
        """Guesses up to where the leader left next are committed tokens; how the response ends with them, if so."""
        while self.guesses and not self.guesses[0].left:
            self.tokens.append(self.guesses.popleft().token)
            if outcome := self.end():
                return outcome
        return None

    def unfollow(self) -> None:
        """The guesses are none, nor are those that may still come."""
        self.guesses.clear()
        self.following = False
        self.reuse()

    def reuse(self) -> None:
        """Limits what of the KV is used to committed tokens but the last, which gives the next logits."""
        self.kv_length = min(self.kv_length, len(self.tokens) - 1)

    def response_counts(self) -> Counter[int]:
        """Occurrences of token ids in the response."""
        first = max(self._counted, self.prompt_tokens)
        self._counts.update(self.tokens[first:])
        self._counted = len(self.tokens)
        return self._counts

    def seen(self) -> set[int]:
        """Token ids in prompt and response."""
        return set(self.tokens)
