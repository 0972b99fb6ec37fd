"""From a policy's name and parameters to an instance."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from tokenrouter.errors import InvalidRequest, PolicyFailed, RouterError, contained
from tokenrouter.messages import PolicySpec
from tokenrouter.policies.base import Policy, PolicyContext, PolicyParams

BUILTIN: Mapping[str, str] = MappingProxyType(
    {
        "citer": "tokenrouter.policies.citer:Citer",
        "collm": "tokenrouter.policies.collm:CoLLM",
        "glimprouter": "tokenrouter.policies.glimprouter:GlimpRouter",
        "markov": "tokenrouter.policies.markov:Markov",
        "me": "tokenrouter.policies.me:ME",
        "query_level": "tokenrouter.policies.query_level:QueryLevel",
        "r2r": "tokenrouter.policies.r2r:R2R",
        "random": "tokenrouter.policies.random:Random",
        "rstitch": "tokenrouter.policies.rstitch:RStitch",
        "scripted": "tokenrouter.policies.scripted:Scripted",
        "single": "tokenrouter.policies.single:Single",
    }
)


def policy_class(name: str) -> type[Policy]:
    """The class behind a registered name or ``package.module:Class``.

    Raises:
        InvalidRequest: unknown name, module or class, or the class is no `Policy`.
    """
    path = BUILTIN.get(name, name)
    module_name, colon, class_name = path.partition(":")
    if not colon:
        raise InvalidRequest(f"policy is {name!r}; known: {', '.join(BUILTIN)}, or your own as package.module:Class")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as exc:
        raise InvalidRequest(f"policy {name!r} cannot be imported: {exc}") from exc
    except BaseException as exc:  # whatever its module does
        error = contained(exc)
        raise InvalidRequest(f"policy {name!r} cannot be imported: {type(error).__name__}: {error}") from exc
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise InvalidRequest(f"policy {name!r} is not a subclass of tokenrouter.policies.Policy")
    return found


def parse_params(cls: type[Policy], params: str) -> PolicyParams:
    """JSON text as the policy's `Params`.

    Raises:
        InvalidRequest: no JSON, no object, unknown key or wrong type; the message names the key and the known ones.
    """
    try:
        return msgspec.json.decode(params or "{}", type=cls.Params)
    except msgspec.ValidationError as exc:
        known = ", ".join(map(_described, msgspec.structs.fields(cls.Params))) or "none"
        raise InvalidRequest(f"policy_params of {cls.name!r}: {exc}; known parameters: {known}") from exc
    except msgspec.DecodeError as exc:
        raise InvalidRequest(f"policy_params is not valid JSON: {exc}; send an object such as {{}}") from exc


def _described(field: msgspec.structs.FieldInfo) -> str:
    """A parameter's name, with its values if there are few."""
    kind = msgspec.inspect.type_info(field.type)
    if not isinstance(kind, msgspec.inspect.LiteralType):
        return field.name
    return f"{field.name} ({', '.join(map(str, kind.values))})"


def load_policy(spec: PolicySpec, context: PolicyContext) -> Policy:
    """A policy instance for a specification.

    Raises:
        InvalidRequest: see `policy_class` and `parse_params`.
        PolicyFailed: its `visited` raises or names unknown models.
    """
    cls = policy_class(spec.name)
    params = parse_params(cls, spec.params)
    try:
        policy = cls(params, context)
    except RouterError:
        raise
    except BaseException as exc:
        error = contained(exc)
        raise InvalidRequest(f"policy {spec.name!r} cannot be built: {type(error).__name__}: {error}") from exc
    _check_visited(policy, spec.name)
    return policy


def _check_visited(policy: Policy, name: str) -> None:
    """`visited` is constant, so it is checked once, before admission builds on it."""
    try:
        visited = tuple(policy.visited())
    except RouterError:
        raise
    except BaseException as exc:
        error = contained(exc)
        raise PolicyFailed(f"policy {name!r}, visited: {type(error).__name__}: {error}") from exc
    if not visited or not set(visited) <= set(policy.models):
        raise PolicyFailed(f"policy {name!r}, visited: {visited} is not among the models {policy.models}")
