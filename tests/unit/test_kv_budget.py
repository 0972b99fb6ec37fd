"""The common number of KV tokens, by hand and as a property; the table."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.support.published_models import write_stubs
from tokenrouter.errors import ConfigError
from tools.build_repository.arguments import with_arguments
from tools.build_repository.kv_budget import Budget, BudgetModel, compute, deployment_budget
from tools.build_repository.spec import GIB, KvBudgetSpec, load_spec

ROOT = Path(__file__).parents[2]
A100 = KvBudgetSpec(gpu_memory_gib=80, share=0.9, reserve_gib=4)
# 72 GiB, and a model's reserve of 4 GiB.
ROOM, RESERVE = 77_309_411_328, 4_294_967_296

SMALL = BudgetModel("small", (0,), 1_192_099_840, 114_688, 32)  # Qwen3-0.6B: 596,049,920 weights of 2 bytes
MEDIUM = BudgetModel("medium", (1,), 16_381_470_720, 147_456, 32)  # Qwen3-8B
LARGE = BudgetModel("large", (2,), 65_524_246_528, 262_144, 32)  # Qwen3-32B


def halves(model: BudgetModel, *gpus: int) -> BudgetModel:
    """The same with tensor parallelism."""
    n = len(gpus)
    return BudgetModel(model.name, gpus, model.weight_bytes // n, model.kv_bytes_per_token // n, 32)


def test_two_models_that_share_a_gpu_get_the_same_number() -> None:
    # GPU 0: 77,309,411,328 - 1,192,099,840 - 32,762,123,264 - 2 * 4,294,967,296 = 34,765,253,632 bytes are free
    # for 114,688 + 131,072 bytes per token: 141,460 tokens, 4,420 blocks of 32. GPU 1 would allow 307,101.
    free = ROOM - 1_192_099_840 - 65_524_246_528 // 2 - 2 * RESERVE
    assert free // (114_688 + 131_072) == 141_460
    budget = compute([SMALL, halves(LARGE, 0, 1)], A100)
    assert budget.tokens == {"small": 141_440, "large": 141_440}
    assert budget.load_after == {"small": ("large",), "large": ()}


def test_models_on_gpus_of_their_own_get_what_these_hold() -> None:
    budget = compute([SMALL, MEDIUM, LARGE], A100)
    assert budget.tokens == {
        "small": (ROOM - 1_192_099_840 - RESERVE) // 114_688 // 32 * 32,  # 626,240
        "medium": (ROOM - 16_381_470_720 - RESERVE) // 147_456 // 32 * 32,  # 384,064
        "large": 28_544,  # 77,309,411,328 - 65,524,246,528 - 4,294,967,296 = 7,490,197,504, / 262,144 = 28,572
    }
    assert budget.tokens["small"] == 626_240
    assert budget.load_after == {"small": (), "medium": (), "large": ()}


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        # Llama-2: 7B and the pad and defer rows, 2 * (6,738,415,616 + 2 * 2 * 4096) = 13,476,864,000 bytes;
        # 70B on 4 GPUs, 137,953,296,384 / 4 = 34,488,324,096. Free on GPU 0: 77,309,411,328 - 13,476,864,000
        # - 34,488,324,096 - 8,589,934,592 = 20,754,288,640, for 524,288 + 327,680 / 4 per token: 34,236.
        ("collm/Llama-2-7b_Llama-2-70b.yaml", 34_236 // 32 * 32),
        # Qwen2: 1.5B 3,087,428,608 bytes; 72B on 4 GPUs, 145,412,407,296 / 4 = 36,353,101,824. Free on GPU 0:
        # 77,309,411,328 - 3,087,428,608 - 36,353,101,824 - 8,589,934,592 = 29,278,946,304, for 28,672 + 81,920:
        # 264,747.
        ("citer/Qwen2-1.5B_Qwen2-72B.yaml", 264_747 // 32 * 32),
        ("r2r/Qwen3-0.6B_Qwen3-32B.yaml", 141_440),
        # Qwen3-8B on two GPUs: 77,309,411,328 - 1,192,099,840 - 8,190,735,360 - 8,589,934,592 = 59,336,641,536, for
        # 114,688 + 147,456 / 2 = 188,416 bytes per token: 314,923.
        ("r2r/Qwen3-0.6B_Qwen3-8B.yaml", 314_923 // 32 * 32),
    ],
)
def test_published_deployments_by_hand(tmp_path: Path, config: str, tokens: int) -> None:
    budget = deployment_budget(with_arguments(load_spec(ROOT / "configs" / config, write_stubs(tmp_path))))
    assert budget is not None
    assert budget.tokens == {"small": tokens, "large": tokens}


def used(budget: Budget, gpu: int, *, more: int = 0) -> int:
    """Bytes on a GPU, with `more` tokens for every model whose number was computed."""
    total = 0
    for model in budget.models:
        if gpu in model.gpus:
            tokens = budget.tokens[model.name] + (more if model.fixed_tokens is None else 0)
            total += model.weight_bytes + budget.memory.reserve + tokens * model.kv_bytes_per_token
    return total


@st.composite
def deployments(draw: st.DrawFn) -> list[BudgetModel]:
    count = draw(st.integers(1, 4))
    return [
        BudgetModel(
            name=f"m{i}",
            gpus=tuple(draw(st.sets(st.integers(0, 3), min_size=1, max_size=3))),
            weight_bytes=draw(st.integers(0, 12 * GIB)),
            kv_bytes_per_token=draw(st.integers(1000, 1_000_000)),
            tokens_per_block=draw(st.sampled_from([16, 32])),
            fixed_tokens=draw(st.sampled_from([None, None, 1024])),
        )
        for i in range(count)
    ]


@given(deployments())
def test_everything_fits_and_one_block_more_would_not(models: list[BudgetModel]) -> None:
    memory = KvBudgetSpec(gpu_memory_gib=64, share=0.9, reserve_gib=1)
    budget = compute(models, memory)
    gpus = {gpu for model in models for gpu in model.gpus}
    assert all(used(budget, gpu) <= memory.budget(gpu) for gpu in gpus)
    for model in models:
        if model.fixed_tokens is not None:
            assert budget.tokens[model.name] == model.fixed_tokens
            continue
        assert budget.tokens[model.name] % model.tokens_per_block == 0
        for other in models:
            if other.fixed_tokens is None and set(other.gpus) & set(model.gpus):
                assert budget.tokens[other.name] == budget.tokens[model.name]
        reach = connected(model, models)
        assert any(used(budget, gpu, more=32) > memory.budget(gpu) for gpu in reach), "more would fit"


def connected(model: BudgetModel, models: list[BudgetModel]) -> set[int]:
    """All GPUs that the model's number depends on."""
    reach = set(model.gpus)
    while grown := {gpu for other in models if reach & set(other.gpus) for gpu in other.gpus} - reach:
        reach |= grown
    return reach


@given(deployments())
def test_the_largest_loads_first_and_nobody_waits_in_a_circle(models: list[BudgetModel]) -> None:
    memory = KvBudgetSpec(gpu_memory_gib=64, share=0.9, reserve_gib=1)
    after = compute(models, memory).load_after
    weights = {model.name: model.weight_bytes for model in models}
    gpus = {model.name: set(model.gpus) for model in models}
    for name, others in after.items():
        assert all(weights[other] >= weights[name] and gpus[other] & gpus[name] for other in others)
        assert list(others) == sorted(others, key=lambda other: (-weights[other], other))
    for one in gpus:
        for other in gpus:
            if one != other and gpus[one] & gpus[other]:
                assert (one in after[other]) != (other in after[one])


def test_models_beyond_the_memory_are_refused_with_the_gpu_and_their_needs() -> None:
    whole = BudgetModel("large", (0,), LARGE.weight_bytes, LARGE.kv_bytes_per_token, 32)
    big = BudgetModel("other", (0,), 10 * GIB, 1000, 32)
    with pytest.raises(
        ConfigError, match=r"GPU 0: .* 72.0 GiB .*in GiB, large 65.0, other 14.0.*raise kv_budget.share"
    ):
        compute([whole, big], A100)
    tight = KvBudgetSpec(gpu_memory_gib=80, share=(65_524_246_528 + RESERVE + 1_000_000) / (80 * GIB), reserve_gib=4)
    with pytest.raises(ConfigError, match="GPU 0"):  # the weights fit, not one block of KV
        compute([whole], tight)


def test_gpus_may_differ_in_memory() -> None:
    both = KvBudgetSpec(gpu_memory_gib={0: 80, 1: 40}, share=0.9, reserve_gib=4)
    by_gpu = compute([SMALL, BudgetModel("medium", (1,), MEDIUM.weight_bytes, MEDIUM.kv_bytes_per_token, 32)], both)
    assert by_gpu.tokens["medium"] == (int(36 * GIB) - 16_381_470_720 - RESERVE) // 147_456 // 32 * 32
    with pytest.raises(ConfigError, match="gpu_memory_gib has no entry for GPU 2"):
        compute([LARGE], both)


def test_the_command_prints_models_and_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import typer

    from tools.kv_budget import main

    app = typer.Typer()
    app.command()(main)
    monkeypatch.setenv("COLUMNS", "150")
    config = str(ROOT / "configs" / "r2r" / "Qwen3-0.6B_Qwen3-32B.yaml")
    shown = CliRunner().invoke(app, ["--config", config, "--checkpoints", str(write_stubs(tmp_path))])
    assert shown.exit_code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.output.splitlines()]
    assert ["small", "0", "1.11", "4.00", "114688", "141440", "15.11"] in rows
    assert ["large", "0,1", "30.51", "4.00", "131072", "141440", "17.27"] in rows
    assert ["0", "72.00", "72.00", "small, large"] in rows
    failed = CliRunner().invoke(app, ["--config", config, "--checkpoints", str(tmp_path / "nothing")])
    assert failed.exit_code == 2
