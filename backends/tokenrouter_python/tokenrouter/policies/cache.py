"""Loaded policies, bounded in bytes: clients choose parameters, and each choice is an instance."""

from __future__ import annotations

import logging
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import msgspec

from tokenrouter.errors import PolicyFailed, RouterError, contained
from tokenrouter.messages import PolicySpec
from tokenrouter.policies.base import Policy, PolicyContext
from tokenrouter.policies.loading import load_policy

MAX_BYTES = 256 << 20
_SKIPPED = (PolicyContext, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, logging.Logger)
_LEAVES = (str, bytes, int, float, type(None))


Loading: TypeAlias = Callable[[], Policy]
"""Gives a policy, or raises; may take long."""


def attempt(loading: Loading) -> Policy | Exception:
    """What comes of a loading."""
    try:
        return loading()
    except BaseException as exc:
        return contained(exc)


class PolicyCache:
    """The policy instances of one place of execution; equal specifications share one. Any thread may ask.

    Bounded by an estimate of what the instances hold: parameters, and weights, which count once for all that share
    them. Who was not asked for longest makes room; the newest always stays, and so do pinned ones.

    Args:
        context: of the place.
        most_bytes: the bound.
        prepared_for: the model that runs here, "" for the orchestrator: a new instance is prepared for it, so that
            whatever it reads is read here. None: it reads when it is used.
    """

    def __init__(self, context: PolicyContext, *, most_bytes: int = MAX_BYTES, prepared_for: str | None = None) -> None:
        self.context = context
        self._most_bytes = most_bytes
        self._prepared_for = prepared_for
        self._policies: OrderedDict[PolicySpec, Policy] = OrderedDict()
        self._held: dict[PolicySpec, dict[int, int]] = {}
        self._pinned: set[PolicySpec] = set()
        self._lock = threading.Lock()
        # One policy is loaded at a time, so that requests for the same weights do not read them side by side.
        self._loading = threading.Lock()

    @property
    def bytes_held(self) -> int:
        """Estimate of what all instances hold together."""
        return sum({part: size for held in self._held.values() for part, size in held.items()}.values())

    def found(self, spec: PolicySpec) -> Policy | None:
        """The instance if it is there already."""
        with self._lock:
            policy = self._policies.get(spec)
            if policy is not None:
                self._policies.move_to_end(spec)
            return policy

    def get(self, spec: PolicySpec) -> Policy:
        """The instance for a specification, loaded if it is not there.

        Raises:
            InvalidRequest, ConfigError, PolicyFailed: see `load_policy` and `Policy.prepare`.
        """
        if (policy := self.found(spec)) is not None:
            return policy
        with self._loading:
            if (policy := self.found(spec)) is not None:
                return policy
            policy = load_policy(spec, self.context)
            self._prepare(spec, policy)
            held = {**parts(policy), id(spec): sys.getsizeof(spec.params)}
            with self._lock:
                self._policies[spec] = policy
                self._held[spec] = held
                self._make_room(spec)
        return policy

    def _prepare(self, spec: PolicySpec, policy: Policy) -> None:
        if self._prepared_for is None:
            return
        try:
            policy.prepare(self._prepared_for)
        except RouterError:
            raise
        except BaseException as exc:
            error = contained(exc)
            raise PolicyFailed(f"policy {spec.name!r}, prepare: {type(error).__name__}: {error}") from exc

    def pin(self, spec: PolicySpec) -> Policy:
        """The instance, which stays from now on: that of the deployment. Raises as `get` does."""
        with self._lock:
            self._pinned.add(spec)
        return self.get(spec)

    def _make_room(self, newest: PolicySpec) -> None:
        for spec in list(self._policies):
            if self.bytes_held <= self._most_bytes:
                return
            if spec != newest and spec not in self._pinned:
                del self._policies[spec], self._held[spec]


def parts(policy: Policy) -> dict[int, int]:
    """What an instance holds, in bytes: tensors and arrays by their identity, all the rest by that of the instance.

    Its context belongs to the process and does not count.
    """
    found: dict[int, int] = {}
    seen: set[int] = set()
    rest = 0
    stack: list[Any] = [policy]
    while stack:
        part = stack.pop()
        if id(part) in seen or isinstance(part, _SKIPPED):
            continue
        seen.add(id(part))
        if isinstance(data := getattr(part, "nbytes", None), int):
            found[id(part)] = data
            continue
        rest += sys.getsizeof(part, 64)
        if not isinstance(part, _LEAVES):
            stack.extend(_inside(part))
    return {**found, id(policy): rest}


def _inside(part: Any) -> Iterable[Any]:
    if isinstance(part, Mapping):
        return [*part.keys(), *part.values()]
    if isinstance(part, (list, tuple, set, frozenset)):
        return part
    if isinstance(part, msgspec.Struct):
        return [getattr(part, name) for name in part.__struct_fields__]
    slots = [getattr(part, name, None) for name in getattr(type(part), "__slots__", ()) if isinstance(name, str)]
    return [*getattr(part, "__dict__", {}).values(), *slots]
