"""What a subserver needs from an engine: `Engine` is stepped by the subserver, `LoopEngine` owns its loop.

Both own model weights and a paged KV cache, and lease blocks of it to sequences that they know by handle. A stepped
engine knows nothing else: what gets sampled and who writes next is decided above it. An engine that owns its loop is
handed whole visits instead, runs sampler and policy itself, and tells what became of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

import msgspec

from tokenrouter.messages import Outcome, PolicySpec

if TYPE_CHECKING:
    from torch import Tensor

    from tokenrouter.subserver.sequence import ModelSequence


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about a loaded engine that the scheduler and the orchestrator rely on.

    Attributes:
        name: engine type, for example ``torch``.
        vocab_size: width V of a logits row.
        hidden_size: width H of a hidden state row; 0 if the engine gives none.
        max_context: longest sequence in tokens, prompt included.
        block_tokens: tokens per KV block.
        kv_blocks: number of KV blocks in the pool.
        max_batch: most sequences in one step.
        max_num_tokens: most new tokens in one step over all sequences (caps prefill).
        emulated: true if the tokens do not come from a real model; shown in every output.
        computes_here: whether a step computes in the thread that called it, instead of waiting for a device.
    """

    name: str
    vocab_size: int
    hidden_size: int
    max_context: int
    block_tokens: int
    kv_blocks: int
    max_batch: int
    max_num_tokens: int
    emulated: bool = False
    computes_here: bool = False


class EngineRow(msgspec.Struct, frozen=True):
    """One sequence's share of a step.

    Attributes:
        handle: what `Engine.open` returned.
        tokens: new token ids, at least one; they extend the sequence from its current KV length.
        emit: at how many trailing positions logits are wanted; 0 for all but the last chunk of a prefill, more than 1
            where guesses are checked. At most as many as tokens.
    """

    handle: Any
    tokens: Sequence[int]
    emit: int = 1


@dataclass(frozen=True, slots=True)
class StepResult:
    """What `EngineRow.emit` asked for: the rows in the order of the batch, the positions of each in their own order.

    Attributes:
        logits: [E, V] float32, raw next-token logits of each emitting position. Valid until the next step.
        hidden: [E, H] float32, the vector fed to the LM head (after the final norm), or None.
    """

    logits: Tensor
    hidden: Tensor | None


class PolicyExtras(TypedDict, total=False):
    """The fields of `policies.base.PolicyContext` that an engine fills in."""

    input_embedding: Callable[[str], Tensor]
    device: str


class KvEngine(Protocol):
    """What both kinds have in common. Not thread-safe: one decoding loop owns it."""

    @property
    def info(self) -> EngineInfo:
        """Facts about the engine; constant after construction."""
        ...

    @property
    def blocks_leased(self) -> int:
        """KV blocks leased to open sequences (reserved for their worst case)."""
        ...

    @property
    def blocks_used(self) -> int:
        """KV blocks that hold at least one token."""
        ...

    def open(self, *, kv_tokens: int, prompt_tokens: int) -> Any:
        """Leases KV for a sequence and returns its handle.

        Args:
            kv_tokens: the most tokens this sequence can ever hold (prompt + max_tokens).
            prompt_tokens: length of the prompt; only the emulated engine uses it, to find response positions.

        Raises:
            EngineFailed: the pool has not enough free blocks, or kv_tokens exceeds max_context.
        """
        ...

    def close(self, handle: Any) -> None:
        """Gives the lease back. Closing twice is harmless."""
        ...

    def extras(self, model: str) -> PolicyExtras:
        """What this engine offers to policies that run beside it.

        Args:
            model: the name under which the engine is deployed.
        """
        ...

    def shutdown(self) -> None:
        """Frees everything; the engine is not used afterwards."""
        ...


def nothing() -> None:
    """Default of `Engine.step`."""


class Engine(KvEngine, Protocol):
    """A stepped engine."""

    def step(self, rows: Sequence[EngineRow], meanwhile: Callable[[], None] = nothing) -> StepResult:
        """Runs one forward pass over extends and decodes mixed in one batch and keeps their KV.

        At most `info.max_batch` rows and `info.max_num_tokens` new tokens. A handle occurs at most once.

        Args:
            rows: who takes part.
            meanwhile: some 0.1 ms of work that may wait until here. To be called once, as soon as the pass goes on
                without this thread; first, if it never does.
        """
        ...

    def truncate(self, handle: Any, length: int) -> None:
        """Forgets the KV of all tokens from position `length` on; the lease stays. No-op if shorter already."""
        ...


@dataclass(frozen=True, slots=True)
class VisitNews:
    """What an engine that owns its loop has to tell about a visit; the last one has another outcome than STAY.

    Attributes:
        ticket: what the visit was submitted under.
        outcome: STAY while it goes on; LENGTH if the visit's last allowed token was written; LEAVE, STOP and FAILED as
            in `messages.Outcome`.
        tokens: committed since the last news, ids.
        target: the next model if the policy sent the request away.
        cached_tokens: how many tokens of the submission were found in the KV cache, once that is known.
        error: why it failed.
    """

    ticket: int
    outcome: Outcome
    tokens: tuple[int, ...] = ()
    target: str = ""
    cached_tokens: int | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class EngineStep:
    """One step of an engine that owns its loop, as the engine tells of it.

    Attributes:
        batch: requests in it.
        extended_tokens: new tokens beyond one per request.
        seconds: how long it took.
    """

    batch: int
    extended_tokens: int
    seconds: float


class LoopEngine(KvEngine, Protocol):
    """An engine that owns its loop: visits go in, tokens and hand-offs come out, at times of its own."""

    def admit(self, sequence: ModelSequence) -> None:
        """Refuses what this engine can never serve.

        Raises:
            RouterError: says why, and what to do instead.
        """
        ...

    def submit(self, visits: Sequence[tuple[int, ModelSequence]]) -> None:
        """Hands visits over, to run together as far as possible; takes copies of what it needs, never blocks.

        Args:
            visits: ticket and sequence of each. The visit runs until the policy sends the request away, its limit
                (`ModelSequence.visit_limit`) is reached, or the response ends. A ticket is used once.
        """
        ...

    def cancel(self, ticket: int) -> None:
        """Ends a visit as soon as possible; news of it may still come. Unknown tickets are ignored."""
        ...

    def collect(self) -> list[VisitNews]:
        """News since the last call, in order of events."""
        ...

    def steps(self) -> list[EngineStep]:
        """Steps that became known since the last call, of those whose time is known; some time after they were run."""
        ...

    @property
    def has_news(self) -> bool:
        """Whether `collect` or `steps` has something."""
        ...

    def listen(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from any thread, whenever there is news."""
        ...


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an engine's model stands: what an engine has to know if the router runs inside it.

    Attributes:
        model: name of the model.
        repository: folder of the deployment, or None.
        vocab_size: ids from here on are not known to every model of the deployment; 0 = no limit.
        policies: models and policy of each entry model that routes to this model.
    """

    model: str = ""
    repository: str | None = None
    vocab_size: int = 0
    policies: tuple[tuple[tuple[str, ...], PolicySpec], ...] = ()


def blocks_needed(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)
