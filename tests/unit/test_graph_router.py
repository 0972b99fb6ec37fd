"""The router inside a model: which token it is shown, and what it leaves in the logits."""

from __future__ import annotations

import pytest
import torch

from tokenrouter.engines.tensorrt_llm.graph_router import MARK, GraphRouter, RouterSettings
from tokenrouter.errors import PolicyFailed
from tokenrouter.messages import PolicySpec

MARKED = 9


def router(policy: str = "Odd") -> GraphRouter:
    spec = PolicySpec(f"tests.contract.policies:{policy}")
    settings = RouterSettings("small", ("small", "large"), "", None, spec, MARKED, vocab_size=6, banned=(3, MARKED))
    return GraphRouter(settings, embedding=None, device="cpu")


def test_it_sees_the_likeliest_token_that_may_be_sampled() -> None:
    logits = torch.zeros(3, 10)
    logits[0, [1, 3, 7]] = torch.tensor([1.0, 2.0, 3.0])  # 7 is unknown to the other model, 3 is banned
    logits[1, [2, 3, 7]] = torch.tensor([1.0, 2.0, 3.0])
    logits[2, 5] = 1.0
    before = logits.clone()
    marked = router()(logits, torch.zeros(3, 4))
    assert marked[:, MARKED].tolist() == [torch.tensor(MARK).item(), float("-inf"), torch.tensor(MARK).item()]
    assert torch.equal(marked[:, :MARKED], before[:, :MARKED]), "other policies read the same logits"


def test_single_requests_are_not_to_be_seen() -> None:
    with pytest.raises(PolicyFailed, match="single requests"):
        router("Reads")(torch.zeros(1, 10), torch.zeros(1, 4))
