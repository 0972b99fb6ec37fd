"""A router that reads hidden states, as a part of the model: for engines whose hidden states do not leave the worker.

It runs for the last position of every request of a step at once, without a host synchronisation, so that CUDA graphs
capture it. Where a request would leave, the column of a reserved id gets a large value; `engines.visits` sees to the
rest. In there nothing is known of single requests: one policy, with the deployment's own parameters, decides for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
from torch import Tensor

from tokenrouter.engines.base import EngineInfo, Placement, PolicyExtras
from tokenrouter.errors import ConfigError, InvalidRequest, PolicyFailed
from tokenrouter.messages import PolicySpec
from tokenrouter.policies import calls, load_policy
from tokenrouter.policies.base import Policy, PolicyContext, RouteBatch, Row
from tokenrouter.sampling import is_argmax
from tokenrouter.subserver.sequence import ModelSequence
from tokenrouter.weights import read_embedding

MARK = 1e30
"""What is written where a request would leave; -inf elsewhere."""

_FORGETFUL = (
    "policy {policy!r} with these policy_params remembers a request's earlier positions, and {model!r} runs on "
    "TensorRT-LLM, whose worker can return tokens only; choose a strategy or a router that decides by one position, or "
    "engine: torch for that model"
)


class RouterSettings(msgspec.Struct, frozen=True):
    """What the router in a model's graph needs.

    Attributes:
        checkpoint: folder of the model.
        directory: of the deployment, for paths in policy parameters.
        mark: column of the id that stands for the other model.
        vocab_size: ids from here on are never sampled.
        banned: further ids that are never sampled.
    """

    model: str
    models: tuple[str, ...]
    checkpoint: str
    directory: str | None
    policy: PolicySpec
    mark: int
    vocab_size: int
    banned: tuple[int, ...]


@dataclass(frozen=True)
class InsideRouter:
    """The router inside a model, as those see it who are outside: its settings, and the policy that they stand for."""

    settings: RouterSettings
    policy: Policy


class GraphRouter:
    """Marks the rows whose requests leave.

    Args:
        settings: see `RouterSettings`.
        embedding: the model's input embedding [V, H], or None: it is read from the checkpoint if the policy asks.
        device: of logits and hidden states.
    """

    def __init__(self, settings: RouterSettings, *, embedding: Tensor | None, device: str) -> None:
        self._settings = settings
        self._embedding = embedding
        self._device = device
        context = PolicyContext(settings.models, settings.directory, input_embedding=self._table, device=device)
        self._policy = load_policy(settings.policy, context)
        self._policy.prepare(settings.model)
        banned = [token for token in settings.banned if token < settings.vocab_size]
        self._banned = torch.tensor(banned, dtype=torch.long, device=device)

    def __call__(self, logits: Tensor, hidden: Tensor) -> Tensor:
        """Logits [B, V] float32 of last positions with the mark's column written, in place; `hidden` is [B, H]."""
        allowed = logits[:, : self._settings.vocab_size]
        if len(self._banned):
            allowed = allowed.index_fill(1, self._banned, float("-inf"))
        batch = RouteBatch(self._settings.model, _NoRows(), allowed.argmax(-1), logits, hidden)
        leaves = self._policy.route(batch)
        if not isinstance(leaves, Tensor) or leaves.dtype != torch.bool:
            raise PolicyFailed(f"policy {self._policy.name!r}: route has to return a bool tensor inside the model")
        logits[:, self._settings.mark] = torch.where(leaves, MARK, float("-inf"))
        return logits

    def _table(self, model: str) -> Tensor:
        if self._embedding is None:
            table = input_embedding(self._settings.model, Path(self._settings.checkpoint), model)
            self._embedding = table.to(self._device)
        return self._embedding


class _NoRows(Sequence[Row]):
    """A policy inside the model sees no requests; nothing of them may decide."""

    def __getitem__(self, index: Any) -> NoReturn:
        raise PolicyFailed("this policy looks at single requests, which are not known inside the model's graph")

    def __len__(self) -> int:
        return self[0]  # raises


def input_embedding(here: str, checkpoint: Path, model: str) -> Tensor:
    """The extra of that name, for the model `here`: its table [V, H] from its checkpoint, on the CPU."""
    if model != here:
        raise ConfigError(f"the input embedding of {model!r} is not in the process of {here!r}")
    return read_embedding(checkpoint)


def probe(settings: RouterSettings, *, width: int, hidden_size: int) -> None:
    """Runs the router once on the CPU, so that what is wrong shows before the model loads.

    Raises:
        ConfigError: the policy cannot run inside a model.
    """
    try:
        router = GraphRouter(settings, embedding=None, device="cpu")
        router(torch.zeros(1, width), torch.zeros(1, hidden_size))
    except Exception as exc:
        raise ConfigError(
            f"policy {settings.policy.name!r} cannot run in the graph of {settings.model!r} (TensorRT-LLM): {exc}"
        ) from exc


def router_of(
    placement: Placement, info: EngineInfo, extras: PolicyExtras, checkpoint: Path, handoff_ids: Sequence[int]
) -> InsideRouter | None:
    """The router that a deployment's policy needs inside this model, or None; it is tried out on the CPU.

    Raises:
        ConfigError: two policies need one, or the policy cannot run there or remembers.
    """
    found: dict[Any, InsideRouter] = {}
    model = placement.model
    for models, spec in placement.policies:
        context = PolicyContext(models, placement.repository, hidden_size=info.hidden_size, **extras)
        policy = load_policy(spec, context)
        if model not in policy.visited():
            continue
        if not policy.needs_hidden(model):
            # One that also reads hidden states is refused by `probe`, since it looks at requests.
            if policy.remembers(model):
                raise ConfigError(_FORGETFUL.format(policy=spec.name, model=model))
            continue
        if len(models) != 2 or len(handoff_ids) < 2:
            raise ConfigError(
                f"policy {spec.name!r} runs inside {model!r}, which takes two models and two reserved ids; there are "
                f"{len(models)} and {len(handoff_ids)}: name ids that are never meant as handoff_ids in model.yaml"
            )
        settings = RouterSettings(
            model=model,
            models=models,
            checkpoint=str(checkpoint),
            directory=placement.repository,
            policy=spec,
            mark=handoff_ids[models.index(policy.other(model))],
            vocab_size=placement.vocab_size or info.vocab_size,
            banned=tuple({*calls.mask(policy, model, info.vocab_size), *handoff_ids[:2]}),
        )
        probe(settings, width=info.vocab_size, hidden_size=info.hidden_size)
        found[models, spec] = InsideRouter(settings, policy)
    if len(found) > 1:
        names = ", ".join(spec.name for _, spec in found)
        raise ConfigError(f"model {model!r} can hold one router, but these policies need one each: {names}")
    return next(iter(found.values()), None)


def admit(sequence: ModelSequence, router: InsideRouter | None, *, argmax: bool) -> None:
    """Refuses a request whose policy remembers, or needs hidden states without the router in the graph for it.

    Args:
        sequence: the request.
        router: the one inside the model, or None.
        argmax: the router may be given the likeliest token where it reads the sampled one.

    Raises:
        InvalidRequest: says what to do instead.
    """
    policy, model = sequence.policy, sequence.model
    if not policy.needs_hidden(model):
        if policy.remembers(model):
            raise InvalidRequest(_FORGETFUL.format(policy=policy.name, model=model))
        return
    own = None if router is None else router.policy
    same = own is not None and (type(own), own.params, own.models) == (type(policy), policy.params, policy.models)
    if not same:
        raise InvalidRequest(
            f"policy {policy.name!r} needs hidden states, which stay inside model {model!r} with its engine: only the "
            "deployment's own policy with its own parameters can read them there; leave policy and policy_params out"
        )
    if policy.needs_token(model) and not argmax and not is_argmax(sequence.sampling):
        raise InvalidRequest(
            f"policy {policy.name!r} reads the token just sampled, and inside {model!r} only the likeliest one is "
            "known: send temperature 0 without penalties, bad_words and min_tokens, or set router_token: argmax in "
            "that model's model.yaml to let the router see the likeliest token instead"
        )
