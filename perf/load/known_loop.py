"""A closed loop of known answers over all ways in: every reply is judged."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from perf.load.client_threads import ClientThreads
from perf.load.known import KnownAnswer, Reply, Verdict, judged
from perf.load.ways import WAYS, Endpoints

_AFTER_FAILURE_S = 0.2
_MOST_KEPT = 200_000


@dataclass(frozen=True)
class Attempt:
    """A request that was not answered right; moments are seconds on `time.perf_counter`."""

    verdict: Verdict
    way: str
    policy: str
    began_s: float
    ended_s: float
    error: str


@dataclass
class Judged:
    """Verdicts so far.

    Attributes:
        verdicts: number of replies by verdict.
        by_way: (way, verdict) -> number.
        tokens: that came.
        longest_s: of the replies that were right.
        others: those that were not right, the first ones of many.
        moments: when each reply that was right came; for rates over time.
    """

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    by_way: Counter[tuple[str, Verdict]] = field(default_factory=Counter)
    tokens: int = 0
    longest_s: float = 0.0
    others: list[Attempt] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return self.verdicts.total()


class KnownLoop(ClientThreads):
    """Keeps `in_flight` known requests running from `start` to `stop`, each client on connections of its own.

    The order of requests and ways follows from the seed. A client whose request was not answered right waits 0.2 s
    before its next one, as clients do that find a server away.
    """

    def __init__(
        self, to: Endpoints, answers: Sequence[KnownAnswer], in_flight: int, *, seed: int, patience_s: float = 60.0
    ) -> None:
        super().__init__(in_flight, patience_s)
        self.judged = Judged()
        self._to, self._answers, self._seed = to, answers, seed
        self._ways = [name for name in WAYS if to.openai or not name.startswith("/v1")]

    def stop(self) -> int:
        """See `ClientThreads.stop`; clients that never come back are judged as hung."""
        hung = super().stop()
        self.judged.verdicts[Verdict.HUNG] += hung
        return hung

    def __enter__(self) -> KnownLoop:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _client(self) -> None:
        while not self._stopping.is_set():
            draw = random.Random(f"{self._seed}/{next(self._numbers)}")
            known, name = draw.choice(self._answers), draw.choice(self._ways)
            way, stream = WAYS[name]
            began_s = time.perf_counter()
            reply = way(self._to, known, self._patience_s, stream)
            verdict = self._note(name, known, reply, began_s)
            if verdict is not Verdict.RIGHT:
                self._stopping.wait(_AFTER_FAILURE_S)

    def _note(self, way: str, known: KnownAnswer, reply: Reply, began_s: float) -> Verdict:
        verdict, ended_s, judged_so_far = judged(reply, known), time.perf_counter(), self.judged
        with self._lock:
            judged_so_far.verdicts[verdict] += 1
            judged_so_far.by_way[way, verdict] += 1
            judged_so_far.tokens += len(reply.tokens)
            if verdict is Verdict.RIGHT:
                judged_so_far.longest_s = max(judged_so_far.longest_s, ended_s - began_s)
                judged_so_far.moments.append(ended_s)
            elif len(judged_so_far.others) < _MOST_KEPT:
                policy = str(known.fields.get("policy", ""))
                error = reply.error or f"{len(reply.tokens)} tokens, reason {reply.finish_reason!r}"
                judged_so_far.others.append(Attempt(verdict, way, policy, began_s, ended_s, error))
        return verdict
