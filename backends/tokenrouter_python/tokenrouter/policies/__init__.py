"""Routing policies, found by name from configuration, or by ``package.module:Class``."""

from __future__ import annotations

from tokenrouter.policies.base import Policy, PolicyContext
from tokenrouter.policies.cache import PolicyCache
from tokenrouter.policies.loading import BUILTIN, load_policy, parse_params, policy_class

__all__ = ["BUILTIN", "Policy", "PolicyCache", "PolicyContext", "load_policy", "parse_params", "policy_class"]
