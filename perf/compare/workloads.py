"""Workloads and policies of the comparison with emulated engines, from `perf/reference/workloads.yaml`."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import msgspec

from perf.emulated.routing import routed
from tokenrouter.yaml_files import load_yaml
from tools.dtmc.errors import ProfileError
from tools.dtmc.profile import ModelProfile, Profile

REFERENCE = Path(__file__).resolve().parents[1] / "reference" / "workloads.yaml"

_SHORTEST_PROMPT = 4


class EmulatedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Milliseconds of a step, and of every token that a step takes in beyond one per request."""

    step_ms: float
    prefill_ms_per_token: float


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lengths in tokens, and whether taking in the prompt costs time."""

    prompt_tokens: int
    response_tokens: int
    prefill: bool = False

    def scaled(self, scale: int) -> Workload:
        """Prompt and response `scale` times shorter; prompts stay long enough to differ."""
        prompt = min(self.prompt_tokens, max(_SHORTEST_PROMPT, self.prompt_tokens // scale))
        return Workload(prompt, max(1, self.response_tokens // scale), self.prefill)


class Routing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a policy routes: two probabilities, or weights of any number of models."""

    leave: float = 0.0
    back: float = 1.0
    weights: dict[str, float] = {}


class Reference(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The whole file."""

    models: dict[str, EmulatedModel]
    workloads: dict[str, Workload]
    policies: dict[str, Routing]

    @cached_property
    def _profiles(self) -> dict[tuple[str, bool], Profile]:
        return {}

    def workload(self, name: str) -> Workload:
        """Raises ProfileError if the file has no such workload."""
        if name not in self.workloads:
            raise ProfileError(f"no workload {name!r}; {REFERENCE.name} has {', '.join(self.workloads)}")
        return self.workloads[name]

    def profile(self, policy: str, *, prefill: bool) -> Profile:
        """Step times and routing of a policy as the Markov model wants them; the same object for the same arguments.

        Raises:
            ProfileError: the file has no such policy, or its numbers make no sense.
        """
        if policy not in self.policies:
            raise ProfileError(f"no policy {policy!r}; {REFERENCE.name} has {', '.join(self.policies)}")
        key = (policy, prefill)
        if key not in self._profiles:
            self._profiles[key] = self._build(policy, prefill)
        return self._profiles[key]

    def _build(self, policy: str, prefill: bool) -> Profile:
        routing = self.policies[policy]
        models = {
            name: ModelProfile(
                step_ms=self.models[name].step_ms,
                extend_ms_per_token=self.models[name].prefill_ms_per_token if prefill else 0.0,
            )
            for name in routing.weights or ("small", "large")
        }
        row = routing.weights or {"small": 1.0 - routing.leave, "large": routing.leave}
        kept = dict.fromkeys(models, 1.0)
        plain = Profile(
            models=models,
            entry=next(iter(models)),
            routing=dict.fromkeys(models, row),
            commit=dict.fromkeys(models, kept),
        )
        rates = {} if routing.weights else {"leave_rate": routing.leave, "return_rate": routing.back}
        return routed(plain, policy, **rates)


def load_reference(path: Path = REFERENCE) -> Reference:
    """The file.

    Raises:
        ConfigError: the file cannot be read.
        ProfileError: names the field that is wrong.
    """
    try:
        return msgspec.convert(load_yaml(path), Reference)
    except msgspec.ValidationError as exc:
        raise ProfileError(f"{path}: {exc}") from exc
