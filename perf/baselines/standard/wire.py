"""What a call carries beside the token ids, and what it returns: msgpack in one UINT8 tensor each way.

A standard server forgets a request between calls, so everything that a policy keeps per request travels with each call:
where the request came from, how long it has stayed, and the policy's own state.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenrouter.messages import PolicySpec, Sampling

IDS = "input_ids"
"""INT32 [1, n]: prompt and response so far."""
CALL = "call"
"""UINT8 [1, m]: a `Call`."""
REPLY = "reply"
"""UINT8 [1, m]: a `Reply`."""

TOKEN_BYTES = 4


class Call(msgspec.Struct, frozen=True, array_like=True):
    """One token is wanted.

    Attributes:
        prompt_tokens: how many of the ids are the prompt; the rest is the response, so the position is known.
        sampling: how the token is chosen, seed included.
        policy: what routes.
        source: model that the request came from, or "".
        visit_tokens: tokens committed since it came.
        plan: limit of the visit (0: none) and the model after it, as the visit's first reply said; None at its start.
        state: the policy's own data.
    """

    prompt_tokens: int
    sampling: Sampling
    policy: PolicySpec
    source: str = ""
    visit_tokens: int = 0
    plan: tuple[int, str] | None = None
    state: dict[str, Any] = {}


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """One token, and where the request goes.

    Attributes:
        token: what was sampled.
        keep: whether it is committed; a policy discards it at some hand-offs.
        target: the model of the next call.
        plan: see `Call.plan`.
        state: see `Call.state`.
        ran: tokens of this call that the forward pass ran; the others were in the prefix cache.
    """

    token: int
    keep: bool
    target: str
    plan: tuple[int, str]
    state: dict[str, Any]
    ran: int
