"""Messages of the token channel. One msgpack frame each; array-like, so field order is the wire format.

Orchestrator to subserver: `Hello`, `Open`, `Resume`, `Close`, `InFlight`. Subserver to orchestrator: `ModelInfo`,
`Report`. Requests are named by an integer that the orchestrator hands out (a client's own id is never a key), and each
stay of a request at a model carries a visit number, so that messages of an old visit can be recognised and dropped.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, TypeAlias

import msgspec

PROTOCOL_VERSION = 1


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

    max_tokens: int
    end_ids: tuple[int, ...] = ()
    seed: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: tuple[tuple[int, ...], ...] = ()
    log_probs: bool = False
    vocab_size: int = 0


class PolicySpec(msgspec.Struct, frozen=True, array_like=True):
    """Which policy routes a request: a registered name or ``package.module:Class``, and its parameters as JSON text."""

    name: str
    params: str = "{}"


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """First message of an orchestrator.

    Attributes:
        version: of the protocol.
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
    """

    request: int
    visit: int
    in_flight: int
    tokens: list[int]
    prompt_tokens: int
    kv_tokens: int
    sampling: Sampling
    policy: PolicySpec
    state: dict[str, Any] | None = None
    source: str = ""
    left_ns: int = 0


class Resume(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A request comes back to a model that kept its KV: only the tokens from position `start` on are sent."""

    request: int
    visit: int
    in_flight: int
    start: int
    tokens: list[int]
    state: dict[str, Any] | None = None
    source: str = ""
    left_ns: int = 0


class Close(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A request is over (finished, failed or cancelled): free its KV."""

    request: int
    in_flight: int


class InFlight(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The number of requests in flight changed; sent to models that no other message tells."""

    in_flight: int


class ModelInfo(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """First message of a subserver: facts about its engine and the KV quota of this peer, in blocks."""

    version: int
    model: str
    engine: str
    emulated: bool
    vocab_size: int
    max_context: int
    block_tokens: int
    kv_blocks: int


class Outcome(IntEnum):
    """What became of a request in a step."""

    STAY = 0
    LEAVE = 1
    STOP = 2
    LENGTH = 3
    FAILED = 4
    LOST = 5


class ReportRow(msgspec.Struct, frozen=True, array_like=True):
    """One request's share of a step.

    Attributes:
        request: the orchestrator's number of the request.
        visit: the stay this row belongs to.
        outcome: see `Outcome`; LENGTH and STOP end the response, LOST asks for an `Open` with the whole history.
        tokens: committed in this step; a token that the policy discarded is not among them.
        target: the next model if outcome is LEAVE.
        state: what the policy sends along on LEAVE.
        log_probs: of `tokens`, if asked for.
        error: slug and text if outcome is FAILED.
    """

    request: int
    visit: int
    outcome: Outcome
    tokens: list[int]
    target: str = ""
    state: dict[str, Any] | None = None
    log_probs: list[float] | None = None
    error: tuple[str, str] | None = None


class Report(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """Everything one step of a subserver has to tell one orchestrator. `at_ns` is the end of the step."""

    at_ns: int
    rows: list[ReportRow]


ToSubserver: TypeAlias = Hello | Open | Resume | Close | InFlight
ToOrchestrator: TypeAlias = ModelInfo | Report
Message: TypeAlias = ToSubserver | ToOrchestrator


_encoder = msgspec.msgpack.Encoder()
_for_subserver: msgspec.msgpack.Decoder[ToSubserver] = msgspec.msgpack.Decoder(ToSubserver)
_for_orchestrator: msgspec.msgpack.Decoder[ToOrchestrator] = msgspec.msgpack.Decoder(ToOrchestrator)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_for_subserver(payload: bytes | memoryview) -> ToSubserver:
    """What an orchestrator sent. Raises `msgspec.DecodeError` on anything else."""
    return _for_subserver.decode(payload)


def decode_for_orchestrator(payload: bytes | memoryview) -> ToOrchestrator:
    """What a subserver sent. Raises `msgspec.DecodeError` on anything else."""
    return _for_orchestrator.decode(payload)


def copy_state(state: dict[str, Any]) -> dict[str, Any]:
    """A policy's state as it arrives at the other side; raises whatever encoding it raises."""
    return msgspec.msgpack.decode(_encoder.encode(state), type=dict[str, Any]) if state else {}
