"""Known answers: requests whose tokens an offline run of the same deployment gave, and how a reply is judged.

With a seed the tokens of a response depend on nothing else, so a server that serves, fails over, or is attacked gives
these tokens or says that it does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from tokenrouter.offline import TokenRouter
from tokenrouter.request import RequestFields

_HALF = {"small": 0.5, "large": 0.5}
POLICIES: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("", {}),
    ("rstitch", {}),
    ("r2r", {}),
    ("citer", {}),
    ("collm", {}),
    ("query_level", {}),
    ("glimprouter", {}),
    ("random", {"p": 0.3}),
    ("me", {}),
    ("markov", {"routing": {"small": _HALF, "large": _HALF}, "commit": {"small": {"large": 1}, "large": {"small": 1}}}),
    ("scripted", {"writers": ["small", "large", "large"]}),
    ("single", {"model": "large"}),
)
"""Every policy of the demo deployment with parameters; "" is the deployment's own choice."""


@dataclass(frozen=True)
class KnownAnswer:
    """A request and its response.

    Attributes:
        prompt: text.
        fields: further fields of the entry model by name; `policy_params` is a mapping.
        tokens: ids of the whole response.
        finish_reason: ``stop`` or ``length``.
    """

    prompt: str
    fields: Mapping[str, Any]
    tokens: Sequence[int]
    finish_reason: str

    @property
    def tensors(self) -> dict[str, Any]:
        """The fields as the entry model's tensors hold them: parameters are JSON text."""
        params = self.fields.get("policy_params")
        return dict(self.fields) if params is None else {**self.fields, "policy_params": json.dumps(params)}


def known_answers(
    repository: Path,
    prompts: Sequence[str],
    *,
    max_tokens: int = 160,
    policies: Sequence[tuple[str, Mapping[str, Any]]] = POLICIES,
    entry: str = "tokenrouter",
) -> list[KnownAnswer]:
    """Answers for every prompt with every policy, greedy and sampled in turn, from the offline engine."""
    asked = [
        RequestFields(
            text_input=prompt,
            max_tokens=max_tokens,
            seed=number,
            temperature=2.0 * (number % 2),
            policy=policy or None,
            policy_params=params or None,
        )
        for number, prompt in enumerate(prompts)
        for policy, params in policies
    ]
    with TokenRouter.from_repository(repository, entry=entry) as router:
        results = router.generate(asked)
    names = ("max_tokens", "seed", "temperature", "policy", "policy_params")
    return [
        KnownAnswer(
            str(fields.text_input),
            {name: value for name in names if (value := getattr(fields, name)) is not None},
            result.tokens,
            result.finish_reason,
        )
        for fields, result in zip(asked, results, strict=True)
    ]


@dataclass
class Reply:
    """What a client got of one response.

    Attributes:
        tokens: ids that came.
        finish_reason: or "" if none came.
        error: what the server or the connection said instead, or "".
        timed_out: nothing came within the client's patience.
    """

    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    error: str = ""
    timed_out: bool = False


class Verdict(Enum):
    """What a reply is worth."""

    RIGHT = "right"
    WRONG = "wrong"
    FAILED = "failed_clearly"
    HUNG = "hung"


def judged(reply: Reply, known: KnownAnswer) -> Verdict:
    """Right: all tokens and the reason. Failed clearly: an error, and no token before it that is not the answer's.

    A reply that ends without an error and without a reason is wrong: a client would take it for a whole one.
    """
    if reply.tokens != list(known.tokens[: len(reply.tokens)]):
        return Verdict.WRONG
    if reply.timed_out:
        return Verdict.HUNG
    if reply.error:
        return Verdict.FAILED
    whole = len(reply.tokens) == len(known.tokens) and reply.finish_reason == known.finish_reason
    return Verdict.RIGHT if whole else Verdict.WRONG
