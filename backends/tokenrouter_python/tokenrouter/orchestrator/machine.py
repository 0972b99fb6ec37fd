"""The orchestrator: admits requests, owns their token history, relays hand-offs, and turns tokens into text.

A state machine without I/O or clock. The shell calls `submit`, `cancel`, `receive`, `disconnected` and `tick` with the
time; messages to subservers collect in `outbox`, and `take_updates` gives the news for clients. Send the outbox first:
hand-offs are urgent, and tokens become text only when updates are taken. It is the only owner of a request's token
history and knows per model how many of those tokens that model has, so a model that lost a request (restart, eviction)
is sent the whole history again and nothing is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from tokenizers import Tokenizer

from tokenrouter.engines.base import blocks_needed
from tokenrouter.entry_queue import EntryQueue, EntryQueuePolicy, Waiting
from tokenrouter.errors import (
    ConfigError,
    EngineFailed,
    InvalidRequest,
    ModelUnavailable,
    PolicyFailed,
    PromptTooLong,
    ProtocolError,
    RequestCancelled,
    RouterError,
)
from tokenrouter.messages import (
    PROTOCOL_VERSION,
    Close,
    InFlight,
    ModelInfo,
    Open,
    Outcome,
    Report,
    ReportRow,
    Resume,
    ToOrchestrator,
    ToSubserver,
)
from tokenrouter.policies import PolicyCache
from tokenrouter.policies.base import EntryRequest, Policy
from tokenrouter.request import GenerationRequest
from tokenrouter.response import Result, Run, Update
from tokenrouter.statistics import OrchestratorStatistics
from tokenrouter.text import StopWords, TextStream

log = logging.getLogger(__name__)

_OUTCOME_REASON = {Outcome.STOP: "stop", Outcome.LENGTH: "length"}


@dataclass(frozen=True)
class OrchestratorSettings:
    """Settings of one orchestrator.

    Attributes:
        models: names of the deployment's models, small first.
        max_inflight: most requests that run at once; the others wait.
        connect_timeout_ns: how long a request waits for a model that is not connected.
        queue: the queue in front.
    """

    models: tuple[str, ...]
    max_inflight: int = 64
    connect_timeout_ns: int = 30_000_000_000
    queue: EntryQueuePolicy = field(default_factory=EntryQueuePolicy)


@dataclass(slots=True)
class _Model:
    """A subserver as the orchestrator sees it. `told` is the last in-flight count sent to it."""

    info: ModelInfo | None = None
    reserved_blocks: int = 0
    told: int = 0
    lost_ns: int = 0


@dataclass(slots=True)
class _Active:
    """A running request. `known[m]`: tokens of the history that model m has; absent if m does not hold the request."""

    key: int
    request: GenerationRequest
    policy: Policy
    tokens: list[int]
    text: TextStream
    stop: StopWords
    reserved: dict[str, int]
    arrived_ns: int
    started_ns: int
    at: str = ""
    visit: int = 0
    known: dict[str, int] = field(default_factory=dict)
    state: dict[str, Any] | None = None
    stranded_ns: int | None = None
    fruitless: int = 0
    parts: list[str] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    handoffs: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0

    @property
    def position(self) -> int:
        return len(self.tokens) - len(self.request.tokens)

    @property
    def deadline_ns(self) -> int | None:
        timeout_ns = self.request.timeout_ns
        return None if timeout_ns is None else self.arrived_ns + timeout_ns


class Orchestrator:
    """State machine of the entry model.

    Args:
        settings: see `OrchestratorSettings`.
        tokenizer: the deployment's tokenizer.
        policies: the policies of this process.
    """

    def __init__(
        self,
        settings: OrchestratorSettings,
        *,
        tokenizer: Tokenizer,
        policies: PolicyCache,
    ) -> None:
        self.settings = settings
        self.statistics = OrchestratorStatistics()
        self.outbox: list[tuple[str, ToSubserver]] = []
        self._updates: list[Update] = []
        self._unwritten: list[tuple[_Active, Update]] = []
        self._tokenizer = tokenizer
        self._policies = policies
        self._models = {name: _Model() for name in settings.models}
        self._queue: EntryQueue[tuple[int, GenerationRequest, Policy]] = EntryQueue(settings.queue)
        self._waiting: dict[int, Waiting[tuple[int, GenerationRequest, Policy]]] = {}
        self._active: dict[int, _Active] = {}
        self._alarms: list[int] = []
        self._next_key = 1

    # --- what the shell asks --------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Running requests."""
        return len(self._active)

    @property
    def queued(self) -> int:
        """Waiting requests."""
        return len(self._queue)

    @property
    def missing_models(self) -> tuple[str, ...]:
        """Models that are not connected."""
        return tuple(name for name, model in self._models.items() if model.info is None)

    def reserved_blocks(self, model: str) -> int:
        """KV blocks reserved on a model for running requests."""
        return self._models[model].reserved_blocks

    def keys(self) -> Iterable[int]:
        """All requests that are not over."""
        return [*self._active, *self._waiting]

    def next_deadline_ns(self) -> int | None:
        """When `tick` has something to do, or None until something else happens."""
        return self._alarms[0] if self._alarms else None

    def _alarm(self, at_ns: int | None) -> None:
        """Asks for a `tick` at this time; one that turns out to be needless does no harm."""
        if at_ns is not None:
            heappush(self._alarms, at_ns)

    def take_updates(self) -> list[Update]:
        """What clients have to be told since the last call, in order."""
        self._write()
        updates, self._updates = self._updates, []
        return updates

    # --- clients --------------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, *, now_ns: int, arrived_ns: int | None = None) -> int:
        """A request arrives; it starts at once if it can. Returns its key.

        Raises:
            RouterError: the request is refused; nothing was kept.
        """
        policy = self._policies.get(request.policy)
        self._check_fits(request, policy)
        key, self._next_key = self._next_key, self._next_key + 1
        item = (key, request, policy)
        # One that comes while a turn works is taken in by that turn, whose clock was read before; no wait is negative.
        arrived_ns = now_ns if arrived_ns is None else min(arrived_ns, now_ns)
        if self._queue.head() is not None or not self._can_start(request, policy):
            self._waiting[key] = waiting = self._queue.push(item, now_ns=arrived_ns, timeout_ns=request.timeout_ns)
            self._alarm(waiting.give_up_ns)
            self._alarm(arrived_ns + self.settings.connect_timeout_ns if self._unconnected(policy) else None)
        else:
            self._start(item, arrived_ns, now_ns)
        # Beside `give_up_ns`, because a request that was delayed or has started still has its own limit.
        self._alarm(None if request.timeout_ns is None else arrived_ns + request.timeout_ns)
        self.statistics.accepted += 1
        self._flush()
        return key

    def cancel(self, key: int, *, now_ns: int) -> None:
        """The client went away. Unknown keys (already over) are ignored."""
        error = RequestCancelled("the client cancelled the request or disconnected")
        if key in self._active:
            self._end(self._active[key], now_ns, error=error)
        elif key in self._waiting:
            self._refuse(self._waiting[key], error)
        self._advance(now_ns)

    def tick(self, *, now_ns: int) -> None:
        """Applies every deadline that has passed."""
        while self._alarms and self._alarms[0] <= now_ns:
            heappop(self._alarms)
        for waiting, expired in self._queue.expired(now_ns=now_ns):
            self._refuse(waiting, expired, removed=True)
        for request in list(self._active.values()):
            if request.deadline_ns is not None and now_ns >= request.deadline_ns:
                self._finish(request, "timeout", now_ns)
            elif request.stranded_ns is not None and now_ns >= request.stranded_ns + self.settings.connect_timeout_ns:
                self._end(request, now_ns, error=self._unavailable((request.at,)))
        for waiting in list(self._queue):
            if late := self._given_up(waiting, now_ns):
                self._refuse(waiting, self._unavailable(late))
        self._advance(now_ns)

    def _refuse(
        self, waiting: Waiting[tuple[int, GenerationRequest, Policy]], error: RouterError, *, removed: bool = False
    ) -> None:
        if not removed:
            self._queue.remove(waiting)
        key = waiting.item[0]
        self._waiting.pop(key, None)
        self.statistics.failed[error.slug] = self.statistics.failed.get(error.slug, 0) + 1
        self._updates.append(Update(key, error=error))

    # --- admission ------------------------------------------------------------------------------------------------

    def _check_fits(self, request: GenerationRequest, policy: Policy) -> None:
        """Refuses what can never run, with the limit and the model."""
        prompt, limit = len(request.tokens), request.sampling.max_tokens
        total = prompt + limit
        wanted = f"prompt ({prompt} tokens) + max_tokens ({limit}) = {total} tokens"
        for name in policy.visited():
            info = self._models[name].info
            if info is None:
                continue
            if total > info.max_context:
                raise PromptTooLong(
                    f"{wanted}; model {name!r} has a context of {info.max_context} tokens: "
                    "shorten the prompt or lower max_tokens"
                )
            if blocks_needed(total, info.block_tokens) > info.kv_blocks:
                raise PromptTooLong(
                    f"{wanted}; the KV pool of model {name!r} holds {info.kv_blocks * info.block_tokens} tokens "
                    f"({info.kv_blocks} blocks of {info.block_tokens}): shorten the prompt or lower max_tokens"
                )

    def _unconnected(self, policy: Policy) -> tuple[str, ...]:
        return tuple(name for name in policy.visited() if self._models[name].info is None)

    def _given_up(self, waiting: Waiting[tuple[int, GenerationRequest, Policy]], now_ns: int) -> tuple[str, ...]:
        """Models that this request has awaited for the whole connect time-out."""
        limit_ns = now_ns - self.settings.connect_timeout_ns
        missing = self._unconnected(waiting.item[2])
        return tuple(name for name in missing if max(waiting.arrived_ns, self._models[name].lost_ns) <= limit_ns)

    def _unavailable(self, models: tuple[str, ...]) -> ModelUnavailable:
        limit = self.settings.connect_timeout_ns * 1e-9
        return ModelUnavailable(
            f"model {', '.join(map(repr, models))} is not connected (waited {limit:g} s); is it loaded in this server?"
        )

    def _blocks(self, request: GenerationRequest, policy: Policy) -> dict[str, int]:
        total = len(request.tokens) + request.sampling.max_tokens
        infos = {name: self._models[name].info for name in policy.visited()}
        return {name: blocks_needed(total, info.block_tokens) for name, info in infos.items() if info is not None}

    def _can_start(self, request: GenerationRequest, policy: Policy) -> bool:
        if len(self._active) >= self.settings.max_inflight or self._unconnected(policy):
            return False
        return all(
            self._models[name].reserved_blocks + blocks <= self._kv_blocks(name)
            for name, blocks in self._blocks(request, policy).items()
        )

    def _kv_blocks(self, name: str) -> int:
        info = self._models[name].info
        return 0 if info is None else info.kv_blocks

    def _advance(self, now_ns: int) -> None:
        """Starts whoever can start, in order, and tells all models the number in flight."""
        while (head := self._queue.head()) is not None:
            try:
                # Again: a model that was away at the arrival may have come with less room, and the head would wait for
                # ever with all others behind it.
                self._check_fits(head.item[1], head.item[2])
            except RouterError as exc:
                self._refuse(head, exc)
                continue
            if not self._can_start(head.item[1], head.item[2]):
                break
            self._queue.pop()
            self._waiting.pop(head.item[0])
            self._start(head.item, head.arrived_ns, now_ns)
        self._flush()

    def _start(self, item: tuple[int, GenerationRequest, Policy], arrived_ns: int, now_ns: int) -> None:
        key, request, policy = item
        reserved = self._blocks(request, policy)
        for name, blocks in reserved.items():
            self._models[name].reserved_blocks += blocks
        active = _Active(
            key=key,
            request=request,
            policy=policy,
            tokens=list(request.tokens),
            text=TextStream(self._tokenizer, request.tokens),
            stop=StopWords(request.stop_words),
            reserved=reserved,
            arrived_ns=arrived_ns,
            started_ns=now_ns,
        )
        self._active[key] = active
        self.statistics.queue_wait.observe((now_ns - arrived_ns) * 1e-9)
        try:
            entry = self._entry(active)
        except RouterError as exc:
            self._end(active, now_ns, error=exc)
            return
        self._dispatch(active, entry, source="", left_ns=0, now_ns=now_ns)

    def _entry(self, active: _Active) -> str:
        request = active.request
        try:
            entry = active.policy.entry(EntryRequest(request.prompt, request.tokens, request.sampling.seed))
        except RouterError:
            raise
        except Exception as exc:
            raise PolicyFailed(f"policy {request.policy.name!r}, entry: {type(exc).__name__}: {exc}") from exc
        if entry not in active.policy.visited():
            raise PolicyFailed(f"policy {request.policy.name!r}, entry: {entry!r} is not among the models it visits")
        return entry

    # --- subservers -----------------------------------------------------------------------------------------------

    def connected(self, model: str, info: ModelInfo, *, now_ns: int) -> None:
        """A subserver said who it is; requests stranded there go on.

        Raises:
            ProtocolError: it speaks another version.
            ConfigError: it is not the model that was expected.
        """
        if info.version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"model {model!r} speaks version {info.version} of the protocol, not {PROTOCOL_VERSION}"
            )
        if info.model != model:
            raise ConfigError(f"expected model {model!r} on the channel, but {info.model!r} answered")
        self._models[model].info = info
        self._models[model].told = 0
        for request in list(self._active.values()):
            if request.at == model and request.stranded_ns is not None:
                self._recover(request, now_ns)
        self._advance(now_ns)

    def disconnected(self, model: str, *, now_ns: int) -> None:
        """A subserver is gone and with it all KV; its residents wait for its return, up to the limit."""
        self._models[model].info = None
        self._models[model].lost_ns = now_ns
        self._alarm(now_ns + self.settings.connect_timeout_ns)
        for request in self._active.values():
            request.known.pop(model, None)
            if request.at == model and request.stranded_ns is None:
                request.visit += 1
                request.stranded_ns = now_ns

    def _recover(self, request: _Active, now_ns: int) -> None:
        request.stranded_ns = None
        self.statistics.recovered += 1
        self._dispatch(request, request.at, source="", left_ns=0, now_ns=now_ns)

    def receive(self, model: str, message: ToOrchestrator, *, now_ns: int) -> None:
        """One message of a connected subserver.

        Raises:
            ProtocolError, ConfigError: the peer broke the protocol; close its connection.
        """
        if isinstance(message, ModelInfo):
            self.connected(model, message, now_ns=now_ns)
            return
        if not isinstance(message, Report):
            raise ProtocolError(f"{type(message).__name__} is not for an orchestrator")
        for row in message.rows:
            request = self._active.get(row.request)
            if request is None or request.visit != row.visit or request.at != model:
                self.statistics.stale_messages += 1
            else:
                self._apply(request, row, message, now_ns)
        self._advance(now_ns)

    def _apply(self, request: _Active, row: ReportRow, report: Report, now_ns: int) -> None:
        outcome = row.outcome
        if outcome is Outcome.LOST:
            request.known.pop(request.at, None)
            self._recover(request, now_ns)
            return
        if outcome is Outcome.FAILED:
            self._end(request, now_ns, error=_remote_error(row.error, request.at))
            return
        update = Update(request.key)
        stopped = self._commit(request, row, update, now_ns)
        reason = "stop" if stopped else _OUTCOME_REASON.get(outcome)
        if reason is not None:
            self._finish(request, reason, now_ns, update)
            return
        if request.request.stream and update.tokens:
            self._updates.append(update)
        if outcome is Outcome.LEAVE:
            self._relay(request, row, report.at_ns, now_ns)

    def _commit(self, request: _Active, row: ReportRow, update: Update, now_ns: int) -> bool:
        """Appends the row's tokens and fills in the update. Returns whether a stop word ended the response."""
        request.known[request.at] = len(request.tokens)
        if not row.tokens:
            return False
        start = request.position
        request.tokens.extend(row.tokens)
        update.tokens = row.tokens
        stopped = False
        if request.stop:
            stopped = self._write_until_stop(request, update)
        else:
            self._unwritten.append((request, update))
        request.known[request.at] = len(request.tokens)
        request.fruitless = 0
        self._record(request, len(update.tokens), now_ns)
        update.log_probs = (row.log_probs or [])[: len(update.tokens)]
        update.runs = [Run(request.at, start, request.position)]
        request.log_probs.extend(update.log_probs)
        return stopped

    def _write(self) -> None:
        """Turns committed tokens into text: late, because a hand-off need not wait for it."""
        for request, update in self._unwritten:
            update.text = "".join([request.text.push(token) for token in update.tokens])
            request.parts.append(update.text)
        self._unwritten.clear()

    def _write_until_stop(self, request: _Active, update: Update) -> bool:
        """Writes this update at once and cuts it behind a stop word; tokens behind that are taken back."""
        texts: list[str] = []
        stopped = False
        tokens, update.tokens = update.tokens, []
        done = request.position - len(tokens)
        for token in tokens:
            update.tokens.append(token)
            text = request.text.push(token)
            # Always asked, because a stop word may begin before min_tokens and end after.
            cut = request.stop.cut(text)
            stopped = cut is not None and done + len(update.tokens) > request.request.sampling.min_tokens
            texts.append(text[:cut] if stopped else text)
            if stopped:
                break
        del request.tokens[len(request.tokens) - len(tokens) + len(update.tokens) :]
        update.text = "".join(texts)
        request.parts.append(update.text)
        return stopped

    def _record(self, request: _Active, count: int, now_ns: int) -> None:
        end = request.position
        if request.runs and request.runs[-1].model == request.at:
            request.runs[-1].end = end
        else:
            request.runs.append(Run(request.at, end - count, end))
        by_model = self.statistics.tokens_by_model
        by_model[request.at] = by_model.get(request.at, 0) + count
        if request.first_token_ns:
            self.statistics.inter_token.observe((now_ns - request.last_token_ns) * 1e-9)
        else:
            request.first_token_ns = now_ns
            self.statistics.time_to_first_token.observe((now_ns - request.arrived_ns) * 1e-9)
        request.last_token_ns = now_ns

    def _relay(self, request: _Active, row: ReportRow, left_ns: int, now_ns: int) -> None:
        """A hand-off: the target is sent what it has not seen."""
        if row.target not in request.reserved:
            error = PolicyFailed(
                f"policy {request.request.policy.name!r} sent the request to {row.target!r}, "
                f"which is not among the models it visits: {', '.join(request.reserved)}"
            )
            self._end(request, now_ns, error=error)
            return
        request.fruitless += 1
        if request.fruitless > len(self.settings.models):
            error = PolicyFailed(
                f"policy {request.request.policy.name!r}: {request.fruitless} hand-offs in a row at position "
                f"{request.position} and no model kept a token; one of them has to"
            )
            self._end(request, now_ns, error=error)
            return
        request.handoffs += 1
        self.statistics.handoffs += 1
        request.state = row.state
        self._dispatch(request, row.target, source=request.at, left_ns=left_ns, now_ns=now_ns)

    def _dispatch(self, request: _Active, target: str, *, source: str, left_ns: int, now_ns: int) -> None:
        """Sends the request to a model: Resume if the model holds it, Open if not."""
        request.at = target
        request.visit += 1
        if self._models[target].info is None:
            request.stranded_ns = now_ns
            self._alarm(now_ns + self.settings.connect_timeout_ns)
            return
        known = request.known.get(target)
        message: ToSubserver
        if known is None:
            message = Open(
                request=request.key,
                visit=request.visit,
                in_flight=self.in_flight,
                tokens=request.tokens,
                prompt_tokens=len(request.request.tokens),
                kv_tokens=len(request.request.tokens) + request.request.sampling.max_tokens,
                sampling=request.request.sampling,
                policy=request.request.policy,
                state=request.state,
                source=source,
                left_ns=left_ns,
            )
        else:
            message = Resume(
                request=request.key,
                visit=request.visit,
                in_flight=self.in_flight,
                start=known,
                tokens=request.tokens[known:],
                state=request.state,
                source=source,
                left_ns=left_ns,
            )
        request.known[target] = len(request.tokens)
        self._send(target, message)

    # --- the end --------------------------------------------------------------------------------------------------

    def _finish(self, request: _Active, reason: str, now_ns: int, update: Update | None = None) -> None:
        self._write()
        update = update or Update(request.key)
        rest = request.text.flush()
        request.parts.append(rest)
        text = "".join(request.parts)
        tokens = request.tokens[len(request.request.tokens) :]
        tokens_by_model = dict.fromkeys(request.reserved, 0)
        for run in request.runs:
            tokens_by_model[run.model] += run.end - run.start
        result = Result(
            text=text,
            tokens=tokens,
            log_probs=request.log_probs,
            finish_reason=reason,
            runs=request.runs,
            tokens_by_model=tokens_by_model,
            handoffs=request.handoffs,
            kv_blocks=request.reserved,
            seed=request.request.sampling.seed,
            policy=request.request.policy.name,
            emulated=any(info.emulated for name in request.reserved if (info := self._models[name].info)),
            arrived_ns=request.arrived_ns,
            started_ns=request.started_ns,
            first_token_ns=request.first_token_ns,
            last_token_ns=request.last_token_ns,
        )
        self.statistics.finished[reason] = self.statistics.finished.get(reason, 0) + 1
        self._release(request)
        if request.request.stream:
            update.text += rest
        else:
            update.text, update.tokens = text, tokens
            update.log_probs, update.runs = request.log_probs, request.runs
        update.result = result
        self._updates.append(update)

    def _end(self, request: _Active, now_ns: int, *, error: RouterError) -> None:
        self.statistics.failed[error.slug] = self.statistics.failed.get(error.slug, 0) + 1
        self._release(request)
        self._updates.append(Update(request.key, error=error))

    def _release(self, request: _Active) -> None:
        """Frees KV on every model."""
        del self._active[request.key]
        for name, blocks in request.reserved.items():
            self._models[name].reserved_blocks -= blocks
        for name in request.known:
            self._send(name, Close(request.key, self.in_flight))

    def _send(self, model: str, message: ToSubserver) -> None:
        self._models[model].told = self.in_flight
        self.outbox.append((model, message))

    def _flush(self) -> None:
        for name, model in self._models.items():
            if model.info is not None and model.told != self.in_flight:
                self._send(name, InFlight(self.in_flight))


def _remote_error(error: tuple[str, str] | None, model: str) -> RouterError:
    slug, text = error or ("engine_failed", "no reason given")
    known: dict[str, type[RouterError]] = {
        cls.slug: cls for cls in (PolicyFailed, InvalidRequest, ConfigError, EngineFailed)
    }
    return known.get(slug, EngineFailed)(f"model {model!r}: {text}")
