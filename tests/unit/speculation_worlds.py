"""Two models that agree now and then, what they are asked under which policy, and what has to come out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from perf.emulated.signals import ROUTED_BY_FILE, router_file
from tests.support.repositories import VOCAB_SIZE
from tests.unit.cluster import Cluster
from tests.unit.emulated_requests import request, spec, writers
from tokenrouter.engines.emulated.signals import SignalsConfig
from tokenrouter.messages import PolicySpec
from tokenrouter.policies.checkpoints import save_router
from tokenrouter.request import GenerationRequest
from tokenrouter.response import Result
from tokenrouter.speculation import Speculation

MODELS = ("small", "large")
PROMPTS = ([10, 20, 30, 40], [7, 11, 13], [99, 98, 97, 96, 95], [50])
# The emulated engine repeats the prompt: tokens of it that end a response, must not come, or end it as text.
TOKEN, BAD, STOP = 40, ((20, 30), (11,)), ("?",)


@cache
def checkpoint(policy: str, folder: str) -> str:
    """A router that decides as the emulated hidden states say."""
    path = Path(folder) / f"{policy}.safetensors"
    save_router(router_file(policy, vocab_size=VOCAB_SIZE), path)
    return str(path)


@dataclass(frozen=True)
class World:
    """Two models: how often they agree, how often the policy leaves each; and how far the small one goes ahead."""

    agreement: float
    leave: float
    back: float
    depth: int

    def cluster(self, *, ahead: bool, **fields: Any) -> Cluster:
        return Cluster(
            engine={"repeat": True, "max_seq_len": 512, "max_batch_size": 3, "max_num_tokens": 7},
            per_model={
                "small": {"signals": SignalsConfig(self.leave)},
                "large": {"signals": SignalsConfig(1.0 - self.back, 1, self.agreement)},
            },
            speculation=Speculation(self.depth) if ahead else None,
            **fields,
        )

    def policy(self, name: str, folder: str) -> PolicySpec:
        """A policy with these rates."""
        stay = {"small": {"small": 1.0 - self.leave, "large": self.leave}}
        back = {"large": {"small": self.back, "large": 1.0 - self.back}}
        params: dict[str, Any] = {
            "random": {"p": self.leave},
            "markov": {"routing": stay | back, "commit": {"large": {"small": 1}}},
            "scripted": {"writers": [0, 1, 1, 0, 0, 1], "trigger": "first"},
        }.get(name, {})
        return spec(name, **({"checkpoint": checkpoint(name, folder)} if name in ROUTED_BY_FILE else params))


def shares(*values: float) -> st.SearchStrategy[float]:
    return st.sampled_from(values)


WORLDS = st.builds(
    World,
    agreement=shares(0.0, 0.4, 0.7, 0.95, 1.0),
    leave=shares(0.05, 0.35, 0.9, 1.0),
    back=shares(1.0, 0.6, 0.1),
    depth=st.sampled_from([1, 2, 8, 32]),
)
POLICIES = st.sampled_from(["rstitch", "random", "markov", "scripted", *ROUTED_BY_FILE])
SAMPLING = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**64 - 1),
        "max_tokens": st.integers(1, 24),
        "log_probs": st.booleans(),
        "end_ids": st.sampled_from([(), (TOKEN,)]),
        "min_tokens": st.sampled_from([0, 0, 6]),
    },
    optional={
        "temperature": shares(0.3, 1.0, 2.0),
        "top_k": st.just(20),
        "top_p": shares(0.5, 0.9),
        "repetition_penalty": shares(1.3, 0.8),
        "presence_penalty": shares(0.7),
        "frequency_penalty": shares(2.0),
        "bad_words": st.just(BAD),
        "stop_words": st.just(STOP),
    },
)


def asked(policy: PolicySpec, sampling: dict[str, Any], *, stream: bool = False) -> list[GenerationRequest]:
    fields = {**sampling, "min_tokens": min(sampling["min_tokens"], sampling["max_tokens"])}
    return [request(prompt, policy=policy, stream=stream, **fields) for prompt in PROMPTS]


def told(result: Result) -> tuple[Any, ...]:
    """What has to be equal to the bit."""
    return (
        *(result.tokens, result.text, writers(result), result.tokens_by_model, result.finish_reason),
        *(result.handoffs, result.discards, result.agreed, len(result.log_probs)),
    )
