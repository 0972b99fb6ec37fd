"""One request from its arrival to its end: what was asked, which model is at it, what has been written."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenrouter.errors import PolicyFailed, RouterError, assert_never, contained
from tokenrouter.messages import Decision, Guess, Measure, Open, Outcome, Resume
from tokenrouter.orchestrator.lifecycle import AnyEvent, State, after
from tokenrouter.orchestrator.transcript import Transcript
from tokenrouter.policies.base import EntryRequest, Policy
from tokenrouter.request import GenerationRequest
from tokenrouter.response import Result, Update
from tokenrouter.speculation import Agreement
from tokenrouter.statistics import OrchestratorStatistics
from tokenrouter.timeline.trail import Follower


@dataclass(slots=True)
class Visits:
    """The way of a request through the models.

    Attributes:
        at: the model that writes, or is to write next.
        number: of the visit there; rows that name another one are of an old visit.
        latest: the highest number so far.
        depth: most guesses that the small model was told to hold, when it was visited last.
        discarded: token that the small model discarded when the request left it; None once it was compared.
        seen: by model that holds the request, how many tokens of the response it has seen. For the model that writes,
            how many when the visit began.
        carried: what the policy sent along with the last hand-off.
        handoffs: how many there were.
        fruitless: hand-offs in a row without a new token.
    """

    at: str = ""
    number: int = 0
    latest: int = 0
    depth: int = 0
    discarded: int | None = None
    seen: dict[str, int] = field(default_factory=dict)
    carried: dict[str, Any] | None = None
    handoffs: int = 0
    fruitless: int = 0


@dataclass(frozen=True, slots=True)
class Route:
    """How a request goes: what routes it, the model that writes first, and what was looked at for that, if asked."""

    policy: Policy
    first: str
    measures: tuple[Measure, ...] = ()


def find_route(request: GenerationRequest, policy: Policy) -> Route:
    """Asks the policy who writes first.

    Raises:
        RouterError: it does not know, or refuses.
    """
    name = request.policy.name
    try:
        asked = EntryRequest(request.prompt, request.tokens, request.sampling.seed)
        first = policy.entry(asked)
        known = first in policy.visited()
        measures = tuple(policy.explain_entry(asked)) if request.explain else ()
    except RouterError:
        raise
    except BaseException as exc:
        error = contained(exc)
        raise PolicyFailed(f"policy {name!r}, entry: {type(error).__name__}: {error}") from exc
    if not known:
        raise PolicyFailed(f"policy {name!r}, entry: {first!r} is not among the models it visits")
    return Route(policy, first, measures)


@dataclass(slots=True)
class Ahead:
    """A small model that went on from its own token when the request left it.

    Attributes:
        leader: the small model.
        visit: its number there; what it reports carries it.
        end: position of the response behind its last guess.
        guesses: at positions that are not written yet, from the first one on.
        entered: whether the large model has written nothing yet since the small one left.
        going: whether the small model is still there, so that more may come.
    """

    leader: str
    visit: int
    end: int
    guesses: deque[Guess] = field(default_factory=deque)
    entered: bool = True
    going: bool = True

    def leads(self, model: str, visit: int) -> bool:
        """Whether this model's report on this visit is about these guesses."""
        return self.leader == model and self.visit == visit and self.going

    def add(self, guesses: Sequence[Guess], written: Sequence[int]) -> bool:
        """Takes in further guesses; False if the large model wrote something else at one of their positions."""
        for guess in guesses:
            if self.end >= len(written):
                self.guesses.append(guess)
            elif written[self.end] != guess.token:
                return False
            self.end += 1
        return True


@dataclass(slots=True, eq=False)
class Generation:
    """A request that is being served.

    Attributes:
        key: names it on the token channel and towards the shell.
        request: what was asked.
        policy: what routes it.
        first: the model that writes first.
        arrived_ns: when it came.
        transcript: what has been written.
        models: those it may visit; KV is reserved on all of them before it starts.
        state: see `lifecycle`; changed by `happens` only.
        since_ns: waiting or stranded since then.
        visits: where it is.
        speculates: whether its small model may go ahead, as far as policy and client are concerned.
        ahead: the small model's guesses, while another model writes.
        discards, agreed: hand-offs at which a token was discarded, and those where the target wrote the same one.
        pins: replica by model, while it runs.
        reserved: KV blocks by model, while it runs.
        started_ns: when it left the queue.
        emulated: whether one of the models is not real.
        limit_ns: the deployment ends it then, with an error; None = no limit.
        follower: keeps its trail; None = nobody wants it.
        decisions: why it went where it went, if it asks.
    """

    key: int
    request: GenerationRequest
    policy: Policy
    arrived_ns: int
    transcript: Transcript
    first: str = ""
    models: tuple[str, ...] = field(init=False)
    state: State = State.WAITING
    since_ns: int = field(init=False)
    visits: Visits = field(default_factory=Visits)
    speculates: bool = False
    ahead: Ahead | None = None
    discards: int = 0
    agreed: int = 0
    pins: dict[str, str] = field(default_factory=dict)
    reserved: dict[str, int] = field(default_factory=dict)
    started_ns: int = 0
    emulated: bool = False
    limit_ns: int | None = None
    follower: Follower | None = None
    decisions: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.models = self.policy.visited()
        self.since_ns = self.arrived_ns

    @property
    def deadline_ns(self) -> int | None:
        """It ends then, waiting or running: at its own limit or the deployment's; None = no limit."""
        timeout_ns = self.request.timeout_ns
        if timeout_ns is None:
            return self.limit_ns
        own_ns = self.arrived_ns + timeout_ns
        return own_ns if self.limit_ns is None else min(own_ns, self.limit_ns)

    @property
    def kv_tokens(self) -> int:
        """The most tokens a model can ever hold of it."""
        return len(self.request.tokens) + self.request.sampling.max_tokens

    @property
    def awaits(self) -> tuple[str, ...]:
        """Models without which it cannot go on."""
        match self.state:
            case State.WAITING:
                return self.models
            case State.STRANDED:
                return (self.visits.at,)
            case State.VISITING | State.OVER:
                return ()
            case _:
                return assert_never(self.state)

    def happens(self, event: AnyEvent) -> None:
        """Changes the state.

        Raises:
            InternalError: see `lifecycle.after`.
        """
        self.state = after(self.state, event)

    def expects(self, model: str, visit: int) -> bool:
        """Whether this model's report on this visit is about the visit that goes on."""
        visits = self.visits
        return self.state is State.VISITING and visits.at == model and visits.number == visit

    def misrouted(self, target: str) -> PolicyFailed | None:
        """Why the policy must not send it there; None if it may."""
        if target not in self.models:
            return PolicyFailed(
                f"policy {self.request.policy.name!r} sent the request to {target!r}, which is not among the models it "
                f"visits: {', '.join(self.models)}"
            )
        if self.visits.fruitless > len(self.policy.models):
            return PolicyFailed(
                f"policy {self.request.policy.name!r}: {self.visits.fruitless} hand-offs in a row at position "
                f"{len(self.transcript.tokens)} and no model kept a token; one of them has to"
            )
        return None

    def visit(self, model: str, *, in_flight: int, source: str, left_ns: int) -> Open | Resume:
        """A visit begins: the message to the model, with everything that it has not seen."""
        visits, prompt, response = self.visits, self.request.tokens, self.transcript.tokens
        seen = visits.seen.get(model)
        visits.at = model
        visits.number = visits.latest = visits.latest + 1
        guesses = [] if self.ahead is None or model == self.ahead.leader else list(self.ahead.guesses)
        visits.seen[model] = len(response)
        if seen is None:
            return Open(
                request=self.key,
                visit=visits.number,
                in_flight=in_flight,
                tokens=prompt + response,
                prompt_tokens=len(prompt),
                kv_tokens=self.kv_tokens,
                sampling=self.request.sampling,
                policy=self.request.policy,
                state=visits.carried,
                source=source,
                left_ns=left_ns,
                depth=visits.depth,
                guesses=guesses,
                explain=self.request.explain,
            )
        return Resume(
            request=self.key,
            visit=visits.number,
            in_flight=in_flight,
            start=len(prompt) + seen,
            tokens=response[seen:],
            state=visits.carried,
            source=source,
            left_ns=left_ns,
            depth=visits.depth,
            guesses=guesses,
        )

    # --- what is written ------------------------------------------------------------------------------------------

    def commit(
        self,
        model: str,
        tokens: list[int],
        log_probs: list[float] | None,
        statistics: OrchestratorStatistics,
        *,
        now_ns: int,
        update: Update | None = None,
    ) -> Update:
        """Tokens of a model become part of the response; see `Transcript.commit`."""
        transcript = self.transcript
        if update is not None:
            pass
        elif transcript.tokens:
            statistics.inter_token.observe((now_ns - transcript.last_token_ns) * 1e-9)
        else:
            statistics.time_to_first_token.observe((now_ns - self.arrived_ns) * 1e-9)
        before = len(transcript.tokens)
        update = transcript.commit(tokens, log_probs, model=model, now_ns=now_ns, update=update)
        self.visits.fruitless = 0
        written = len(transcript.tokens) - before
        statistics.tokens[self.request.policy.name, model] += written
        if self.follower is not None:
            self.follower.wrote(model, written)
        return update

    def ended(self) -> Outcome | None:
        """How the response ends with what was committed last, or None if it goes on."""
        tokens, sampling = self.transcript.tokens, self.request.sampling
        if self.transcript.stopped or tokens[-1] in sampling.end_ids:
            return Outcome.STOP
        return Outcome.LENGTH if len(tokens) >= sampling.max_tokens else None

    def _explained(self) -> list[Decision]:
        """Decisions about what is in the response; a stop word may have cut it."""
        end = len(self.transcript.tokens)
        return [decision for decision in self.decisions if decision.position < end]

    def hand_off(self, statistics: OrchestratorStatistics) -> None:
        """The request changed the model."""
        self.visits.handoffs += 1
        statistics.handoffs += 1

    def compared(self, agreed: bool, agreement: Agreement) -> None:
        """The target of a hand-off wrote its first token: whether it is the discarded one."""
        self.discards += 1
        self.agreed += agreed
        agreement.observe(agreed)

    def result(self, reason: str) -> Result:
        """The finished response."""
        transcript = self.transcript
        decisions = self._explained() if self.request.explain else []
        return Result(
            text=transcript.text,
            tokens=transcript.tokens,
            log_probs=transcript.log_probs,
            finish_reason=reason,
            runs=transcript.runs,
            tokens_by_model=transcript.tokens_by_model(self.models),
            handoffs=self.visits.handoffs,
            discards=self.discards,
            agreed=self.agreed,
            decisions=decisions if self.request.explain else None,
            sampled=transcript.texts(decision.token for decision in decisions) if decisions else [],
            kv_blocks=self.reserved,
            seed=self.request.sampling.seed,
            policy=self.request.policy.name,
            emulated=self.emulated,
            arrived_ns=self.arrived_ns,
            started_ns=self.started_ns,
            first_token_ns=transcript.first_token_ns,
            last_token_ns=transcript.last_token_ns,
        )
