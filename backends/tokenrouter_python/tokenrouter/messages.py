"""Messages of the token channel. One msgpack frame each; array-like, so field order is the wire format.

Orchestrator to subserver: `Hello`, `Open`, `Resume`, `Guesses`, `Settled`, `Close`, `InFlight`. Subserver to
orchestrator: `ModelInfo`, `Report`. Requests are named by an integer that the orchestrator hands out (a client's own id
is never a key), and each stay of a request at a model carries a visit number, so that messages of an old visit can be
recognised and dropped.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from tokenrouter.errors import ProtocolError

M = TypeVar("M")
# What a peer sends is checked where it is decoded, so that nothing behind has to doubt it.
Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How the tokens of one request are chosen; the same on every model.

    Attributes:
        max_tokens: most tokens of the response, EOS included.
        end_ids: token ids that end the response (they are committed).
        seed: 64-bit unsigned.
        temperature: 0 means greedy (the raw argmax).
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose mass reaches this; 1 keeps all.
        min_tokens: end_ids are banned before this many tokens are committed.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or response.
        presence_penalty: subtracted once from the logits of tokens seen in the response.
        frequency_penalty: subtracted per occurrence in the response.
        bad_words: token sequences whose last token is banned where the others precede it.
        log_probs: whether the natural log-probability of each token under the raw model is reported.
        vocab_size: ids from here on are never sampled, since not every model knows them; 0 = no limit.
    """

    max_tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    end_ids: tuple[TokenId, ...] = ()
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0
    temperature: float = 0.0
    top_k: Natural = 0
    top_p: float = 1.0
    min_tokens: Natural = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: tuple[tuple[TokenId, ...], ...] = ()
    log_probs: bool = False
    vocab_size: Natural = 0

    def __post_init__(self) -> None:
        """Refuses numbers for which sampling has no meaning; NaN fails every comparison."""
        if not (0.0 <= self.temperature < math.inf and 0.0 < self.top_p <= 1.0 and self.repetition_penalty > 0.0):
            raise ValueError("temperature, top_p or repetition_penalty is out of range")
        if not math.isfinite(self.repetition_penalty + self.presence_penalty + self.frequency_penalty):
            raise ValueError("a penalty is not finite")


class PolicySpec(msgspec.Struct, frozen=True, array_like=True):
    """Which policy routes a request: a registered name or ``package.module:Class``, and its parameters as JSON text."""

    name: str
    params: str = "{}"


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """First message of an orchestrator.

    Attributes:
        version: of the protocol.
        oldest: the oldest version that the orchestrator takes.
        peer: name of the entry model.
        share: KV quota it draws from, ``routed`` or ``direct``.
        models: names of the deployment's models, small first.
        policy: the deployment's policy.
    """

    version: int
    peer: str
    share: str
    models: tuple[str, ...]
    policy: PolicySpec
    oldest: Natural = 0


class Measure(msgspec.Struct, frozen=True, array_like=True):
    """What a policy looked at: the request leaves if ``value relation threshold``.

    A draw `u` is beside the bound below which it has to lie for the model that was drawn.

    Attributes:
        relation: ``>=``, ``>``, ``<`` or ``<=``.
    """

    name: str
    value: float
    relation: str
    threshold: float


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """Why a request went where it went after a position, for those that ask.

    Attributes:
        position: index in the response.
        token: that was sampled there; -1 before the first one.
        model: that sampled it; "" before the first one.
        target: who goes on.
        kept: whether the token was committed.
        why: ``policy``, ``visit limit``, or ``entry`` before the first token.
        measures: what the policy looked at; none if it does not say.
    """

    position: int
    token: int
    model: str
    target: str
    kept: bool
    why: str
    measures: tuple[Measure, ...] = ()


class Guess(msgspec.Struct, frozen=True, array_like=True):
    """A token that the small model sampled at a position where its policy left, or behind one, until it is confirmed.

    Attributes:
        token: its id.
        left: whether the policy left here, so that the large model writes this position.
        log_prob: of the token under the small model, if asked for.
        decision: why, if asked for.
    """

    token: TokenId
    left: bool
    log_prob: float | None = None
    decision: Decision | None = None


class Open(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A request arrives at a model for the first time, or again after the model lost it.

    Attributes:
        request: the orchestrator's number of the request.
        visit: number of this stay; grows with every hand-off of the request.
        in_flight: requests now in flight at the orchestrator.
        tokens: prompt and everything committed so far.
        prompt_tokens: how many of them are the prompt.
        kv_tokens: the most tokens this request can ever hold here (already reserved in the orchestrator's ledger).
        state: what the policy sends along.
        source: model that handed the request over, or "".
        left_ns: when it left there (CLOCK_MONOTONIC, ns), or 0.
        depth: most guesses that this model may hold of the request when its policy leaves; 0 = it waits then.
        guesses: to check, from the position behind `tokens` on; the first one is where the small model left.
        explain: whether decisions are reported.
    """

    request: Natural
    visit: Natural
    in_flight: Natural
    tokens: list[TokenId]
    prompt_tokens: Natural
    kv_tokens: Natural
    sampling: Sampling
    policy: PolicySpec
    state: dict[str, Any] | None = None
    source: str = ""
    left_ns: Natural = 0
    depth: Natural = 0
    guesses: list[Guess] = []
    explain: bool = False

    def __post_init__(self) -> None:
        """Refuses what could not be served within its own lease, where it would fail others of its step."""
        if not 1 <= self.prompt_tokens <= len(self.tokens):
            raise ValueError(f"prompt_tokens is {self.prompt_tokens}, with {len(self.tokens)} tokens")
        if self.kv_tokens < max(len(self.tokens), self.prompt_tokens + self.sampling.max_tokens):
            raise ValueError(f"kv_tokens is {self.kv_tokens}: too few for prompt and max_tokens")


class Resume(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A request comes back to a model that kept its KV: only the tokens from position `start` on are sent.

    What the model holds from there on is replaced, guesses included.
    """

    request: Natural
    visit: Natural
    in_flight: Natural
    start: Natural
    tokens: list[TokenId]
    state: dict[str, Any] | None = None
    source: str = ""
    left_ns: Natural = 0
    depth: Natural = 0
    guesses: list[Guess] = []


class Guesses(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Further guesses about a request, from position `start` of the response on; for the large model's visit.

    Positions that it has written meanwhile are there too: if it wrote something else, the guesses are none.
    """

    request: Natural
    visit: Natural
    in_flight: Natural
    start: Natural
    guesses: list[Guess]


class Fate(IntEnum):
    """What becomes of the guesses that a small model still holds."""

    CHECKED = 0
    """The large model writes, and they stay guesses."""
    CONFIRMED = 1
    """The small model writes again; up to where it left next they are its tokens."""
    ROLLED_BACK = 2
    """The large model wrote something else; it goes on without them."""


class Settled(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Guesses of a small model were checked.

    Attributes:
        visit: the small model's, in which it went ahead.
        length: tokens of the response that stand; those at earlier positions are settled.
        wrote: how many of the settled ones count as written by the small model.
        left: at how many of them it handed over once more, beyond the hand-off that it reported.
        fate: of what the small model holds from `length` on.
    """

    request: Natural
    visit: Natural
    in_flight: Natural
    length: Natural
    wrote: Natural
    left: Natural
    fate: Fate


class Close(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A request is over (finished, failed or cancelled): free its KV."""

    request: Natural
    in_flight: Natural


class InFlight(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The number of requests in flight changed; sent to models that no other message tells."""

    in_flight: Natural


class ModelInfo(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """First message of a subserver: facts about its engine and the KV quota of this peer, in blocks.

    `speculates`: whether it can go ahead of another model and check guesses, which takes an engine that we step.
    `oldest`: the oldest version that the subserver takes.
    """

    version: int
    model: str
    engine: str
    emulated: bool
    vocab_size: Natural
    max_context: Natural
    block_tokens: Annotated[int, msgspec.Meta(ge=1)]
    kv_blocks: Natural
    speculates: bool = False
    oldest: Natural = 0


class Outcome(IntEnum):
    """What became of a request in a step."""

    STAY = 0
    LEAVE = 1
    STOP = 2
    LENGTH = 3
    FAILED = 4
    LOST = 5
    AHEAD = 6
    """Not the request's model at the moment: it goes ahead and has guesses to tell."""


class ReportRow(msgspec.Struct, frozen=True, array_like=True):
    """One request's share of a step.

    Attributes:
        request: the orchestrator's number of the request.
        visit: the stay this row belongs to.
        outcome: see `Outcome`; LENGTH and STOP end the response, LOST asks for an `Open` with the whole history.
        tokens: committed in this step; a token that the policy discarded is not among them.
        target: the next model if outcome is LEAVE.
        state: what the policy sends along on LEAVE; on STAY, what it remembers of the request, or None.
        log_probs: of `tokens`, if asked for.
        error: slug and text if outcome is FAILED.
        guesses: what was sampled and not committed: with LEAVE the token that the policy discards, if it may be
            compared with what the target writes; with AHEAD those behind it.
        returned: of each of `tokens`, whether the policy handed back to the small model behind it, where guesses were
            checked. What the small model wrote in between is not among `tokens`: it is what it guessed.
        decisions: of each of `tokens`, and of one that was discarded behind them, if asked for.
    """

    request: Natural
    visit: Natural
    outcome: Outcome
    tokens: list[TokenId]
    target: str = ""
    state: dict[str, Any] | None = None
    log_probs: list[float] | None = None
    error: tuple[str, str] | None = None
    guesses: list[Guess] | None = None
    returned: list[bool] | None = None
    decisions: list[Decision] | None = None


class Report(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """Everything one step of a subserver has to tell one orchestrator. `at_ns` is the end of the step."""

    at_ns: Natural
    rows: list[ReportRow]


ToSubserver: TypeAlias = Hello | Open | Resume | Guesses | Settled | Close | InFlight
ToOrchestrator: TypeAlias = ModelInfo | Report
Message: TypeAlias = ToSubserver | ToOrchestrator


_encoder = msgspec.msgpack.Encoder()
_for_subserver: msgspec.msgpack.Decoder[ToSubserver] = msgspec.msgpack.Decoder(ToSubserver)
_for_orchestrator: msgspec.msgpack.Decoder[ToOrchestrator] = msgspec.msgpack.Decoder(ToOrchestrator)


def encode(message: Message) -> bytes:
    """The message's payload.

    Raises:
        ProtocolError: a policy's state, or an error's text, is nothing that can travel.
    """
    try:
        return _encoder.encode(message)
    except Exception as exc:
        raise ProtocolError(f"{type(message).__name__} cannot be encoded: {type(exc).__name__}: {exc}") from exc


def decode_for_subserver(payload: bytes | memoryview) -> ToSubserver:
    """What an orchestrator sent. Raises ProtocolError on anything else."""
    return _decoded(_for_subserver, payload)


def decode_for_orchestrator(payload: bytes | memoryview) -> ToOrchestrator:
    """What a subserver sent. Raises ProtocolError on anything else."""
    return _decoded(_for_orchestrator, payload)


def _decoded(decoder: msgspec.msgpack.Decoder[M], payload: bytes | memoryview) -> M:
    try:
        return decoder.decode(payload)
    # Deep nesting is a RecursionError, and no DecodeError.
    except (msgspec.DecodeError, RecursionError, ValueError) as exc:
        raise ProtocolError(f"no message: {type(exc).__name__}: {exc}") from exc


def copy_state(state: dict[str, Any]) -> dict[str, Any]:
    """A policy's state as it arrives at the other side; raises whatever encoding it raises."""
    return msgspec.msgpack.decode(_encoder.encode(state), type=dict[str, Any]) if state else {}
