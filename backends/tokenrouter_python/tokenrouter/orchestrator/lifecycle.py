"""The life of a request as a table: what each event makes of it.

A request waits in the queue, then visits models in turn until its response ends. It is stranded while the model that
writes next is not connected. `Orchestrator` changes the state of a request only through `after`, so what is not in the
table cannot happen to a request silently: it is a bug of ours and raises.

An event is either what a model reports about the request in a step (`messages.Outcome`) or an `Event` from elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final, TypeAlias

from tokenrouter.errors import InternalError
from tokenrouter.messages import Outcome


class State(str, Enum):
    """Where a request is."""

    WAITING = "waiting"
    """In the queue; it holds nothing."""
    VISITING = "visiting"
    """A connected model writes; KV is reserved on every model that it may visit."""
    STRANDED = "stranded"
    """As visiting, but the model is not connected; what the others hold of it stays."""
    OVER = "over"
    """Its final update is out; it holds nothing."""


class Event(Enum):
    """What happens to a request, apart from what a model reports."""

    STARTED = "started"
    """It is the next in the queue, and every model it may visit has room."""
    REFUSED = "refused"
    """It can never run: too long for a model that connected late."""
    CONNECTED = "connected"
    """The model that it is bound for is back."""
    DISCONNECTED = "disconnected"
    """The model that it is at, or is sent to, is not connected."""
    GAVE_UP = "gave_up"
    """A model that it needs was away for the whole connect time-out."""
    TIMED_OUT = "timed_out"
    """It waited longer than the queue allows, or is past its own deadline."""
    BROKE = "broke"
    """Something raised that is no answer to anybody: a bug. It alone ends."""
    CANCELLED = "cancelled"
    """The client went away."""
    STOPPED = "stopped"
    """The server stops, and its grace period is over."""


AnyEvent: TypeAlias = Outcome | Event

LIFECYCLE: Final[Mapping[State, Mapping[AnyEvent, State]]] = {
    State.WAITING: {
        Event.STARTED: State.VISITING,
        Event.REFUSED: State.OVER,
        Event.GAVE_UP: State.OVER,
        Event.TIMED_OUT: State.OVER,
        Event.CANCELLED: State.OVER,
        Event.BROKE: State.OVER,
        Event.STOPPED: State.OVER,
    },
    State.VISITING: {
        Outcome.STAY: State.VISITING,
        Outcome.AHEAD: State.VISITING,
        # A hand-off to a model that is away is two events: LEAVE, then DISCONNECTED.
        Outcome.LEAVE: State.VISITING,
        Outcome.LOST: State.VISITING,
        Outcome.STOP: State.OVER,
        Outcome.LENGTH: State.OVER,
        Outcome.FAILED: State.OVER,
        Event.DISCONNECTED: State.STRANDED,
        Event.TIMED_OUT: State.OVER,
        Event.CANCELLED: State.OVER,
        Event.BROKE: State.OVER,
        Event.STOPPED: State.OVER,
    },
    # Another report about a stranded request is of an old visit, and dropped before it becomes an event.
    State.STRANDED: {
        Outcome.AHEAD: State.STRANDED,
        Event.CONNECTED: State.VISITING,
        Event.GAVE_UP: State.OVER,
        Event.TIMED_OUT: State.OVER,
        Event.CANCELLED: State.OVER,
        Event.BROKE: State.OVER,
        Event.STOPPED: State.OVER,
    },
    State.OVER: {},
}

# How a response ended, as clients are told; every other end is an error.
FINISH_REASONS: Final[Mapping[AnyEvent, str]] = {
    Outcome.STOP: "stop",
    Outcome.LENGTH: "length",
    Event.TIMED_OUT: "timeout",
}


def after(state: State, event: AnyEvent) -> State:
    """The state that an event leads to.

    Raises:
        InternalError: this event cannot happen in this state.
    """
    try:
        return LIFECYCLE[state][event]
    except KeyError:
        known = ", ".join(event.name for event in LIFECYCLE[state]) or "nothing"
        raise InternalError(
            f"bug: {event.name} happened to a request that is {state.value} (possible: {known})"
        ) from None
