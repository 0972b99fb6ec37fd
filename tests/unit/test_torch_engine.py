from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.torch_models import (
    CONTEXT,
    KINDS,
    VOCAB,
    decode,
    extend,
    greedy,
    load,
    load_reference,
    random_tokens,
    save_kind,
)
from tokenrouter.engines.base import EngineRow
from tokenrouter.engines.torch.engine import TorchEngine
from tokenrouter.errors import EngineFailed

BLOCK_SIZES = [1, 7, 16]
REPOSITORY = Path(__file__).parents[2] / "model_repository"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_kind(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return load_reference(folder)


@pytest.fixture(params=BLOCK_SIZES)
def engine(request: pytest.FixtureRequest, folder: Path) -> TorchEngine:
    return load(folder, block_tokens=request.param)


@pytest.fixture(scope="module")
def engines(folder: Path) -> dict[int, TorchEngine]:
    """One engine for each block size, for many short cases: loading takes longer than most of them."""
    return {size: load(folder, block_tokens=size) for size in BLOCK_SIZES}


@torch.inference_mode()
def fresh(reference: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Last-position logits [V] of transformers, computed from nothing."""
    ids = torch.tensor([list(tokens)])
    logits: torch.Tensor = reference(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, -1]
    return logits


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


# Equality with transformers


@pytest.mark.parametrize("length", [1, 2, 16, 33])
def test_greedy_equals_generate_alone(engine: TorchEngine, reference: Any, length: int) -> None:
    prompt = random_tokens(length)
    handle = engine.open(kv_tokens=length + 40, prompt_tokens=length)
    assert decode(engine, handle, prompt, 40) == greedy(reference, prompt, 40)


def test_greedy_equals_generate_when_requests_join_and_leave_the_batch(engine: TorchEngine, reference: Any) -> None:
    prompts = [random_tokens(n, seed=1) for n in (3, 40, 1, 17, 90, 8, 16, 5)]
    counts = [30, 5, 25, 40, 20, 1, 16, 33]
    handles = [engine.open(kv_tokens=len(p) + n, prompt_tokens=len(p)) for p, n in zip(prompts, counts, strict=True)]
    outputs: list[list[int]] = [[] for _ in prompts]
    for step in range(60):
        # Request i arrives at step 2 i, so extends and decodes of all lengths share steps.
        active = [i for i, out in enumerate(outputs) if step >= 2 * i and len(out) < counts[i]]
        if not active:
            continue
        rows = [EngineRow(handles[i], outputs[i][-1:] or prompts[i]) for i in reversed(active)]
        for i, token in zip(reversed(active), engine.step(rows).logits.argmax(-1).tolist(), strict=True):
            outputs[i].append(token)
    assert outputs == [greedy(reference, p, n) for p, n in zip(prompts, counts, strict=True)]


def test_extends_of_every_size_in_one_batch_equal_a_fresh_prefill(engine: TorchEngine, reference: Any) -> None:
    histories = [random_tokens(11 + k, seed=k) for k in range(1, 41)]
    handles = [engine.open(kv_tokens=100, prompt_tokens=11) for _ in histories]
    engine.step([EngineRow(h, tokens[:11]) for h, tokens in zip(handles, histories, strict=True)])
    new = [tokens[11:] for tokens in histories]
    for _ in range(4):
        logits = engine.step([EngineRow(h, tokens) for h, tokens in zip(handles, new, strict=True)]).logits
        for tokens, row in zip(histories, logits, strict=True):
            want = fresh(reference, tokens)
            assert_close(row, want)
            assert int(row.argmax()) == int(want.argmax())
        new = [[int(row.argmax())] for row in logits]
        histories = [tokens + one for tokens, one in zip(histories, new, strict=True)]


@pytest.mark.parametrize("k", range(1, 41))
@pytest.mark.parametrize("block_tokens", BLOCK_SIZES)
def test_a_hand_off_after_every_k_tokens(
    engines: dict[int, TorchEngine], reference: Any, k: int, block_tokens: int
) -> None:
    engine = engines[block_tokens]
    history = random_tokens(5, seed=k)
    handle = engine.open(kv_tokens=CONTEXT, prompt_tokens=5)
    unseen = list(history)
    while len(history) + 2 * k <= 5 + max(40, 2 * k):
        written = decode(engine, handle, unseen, k)
        assert written == greedy(reference, history, k)
        # The newest token is sampled but not in the cache yet, so it travels with what the other source writes.
        unseen = [written[-1], *random_tokens(k, seed=len(history))]
        history += written + unseen[1:]
    assert_close(extend(engine, handle, unseen), fresh(reference, history))
    engine.close(handle)


def test_nothing_new_means_the_last_token_again(engine: TorchEngine, reference: Any) -> None:
    tokens = random_tokens(29)
    handle = engine.open(kv_tokens=40, prompt_tokens=29)
    first = extend(engine, handle, tokens).clone()
    for _ in range(3):
        engine.truncate(handle, len(tokens) - 1)
        assert_close(extend(engine, handle, tokens[-1:]), first)
    assert_close(first, fresh(reference, tokens))


@pytest.mark.parametrize("blocks_before", [0, 1, 2])
def test_a_suffix_of_exactly_one_block(engine: TorchEngine, reference: Any, blocks_before: int) -> None:
    size = engine.info.block_tokens
    tokens = random_tokens(size * (blocks_before + 1))
    handle = engine.open(kv_tokens=len(tokens), prompt_tokens=len(tokens))
    if blocks_before:
        extend(engine, handle, tokens[: size * blocks_before])
    assert engine.blocks_used == blocks_before
    assert_close(extend(engine, handle, tokens[-size:]), fresh(reference, tokens))
    assert engine.blocks_used == engine.blocks_leased == blocks_before + 1


@pytest.mark.parametrize("chunk", [1, 3, 16, 50])
def test_chunked_prefill_equals_unchunked(engine: TorchEngine, reference: Any, chunk: int) -> None:
    tokens = random_tokens(101)
    chunked, whole, other = (engine.open(kv_tokens=120, prompt_tokens=101) for _ in range(3))
    at_once = extend(engine, whole, tokens).clone()
    extend(engine, other, [1])
    for start in range(0, 101, chunk):
        # A request that decodes meanwhile shares each step, and the row order alternates.
        rows = [
            EngineRow(chunked, tokens[start : start + chunk], emit=int(start + chunk >= 101)),
            EngineRow(other, [2]),
        ]
        result = engine.step(rows if start % 2 else rows[::-1]) if start < 100 else engine.step(rows[:1])
    row = result.logits[0 if len(result.logits) == 1 or (start % 2) else 1]
    assert_close(row, at_once)
    assert_close(row, fresh(reference, tokens))


@pytest.mark.parametrize("keep", [0, 1, 7, 16, 29])
def test_truncate_then_another_continuation(engine: TorchEngine, reference: Any, keep: int) -> None:
    tokens = random_tokens(30)
    handle = engine.open(kv_tokens=60, prompt_tokens=30)
    extend(engine, handle, tokens)
    engine.truncate(handle, 99)
    engine.truncate(handle, keep)
    assert engine.blocks_used == -(-keep // engine.info.block_tokens)
    continuation = random_tokens(20, seed=5)
    assert_close(extend(engine, handle, continuation), fresh(reference, tokens[:keep] + continuation))


def test_hidden_state_is_what_the_lm_head_is_fed(engine: TorchEngine, reference: Any) -> None:
    tokens = random_tokens(20)
    with torch.inference_mode():
        ids = torch.tensor([tokens])
        want = reference(ids, attention_mask=torch.ones_like(ids), output_hidden_states=True).hidden_states[-1][0, -1]
    handle = engine.open(kv_tokens=20, prompt_tokens=20)
    result = engine.step([EngineRow(handle, tokens)])
    assert result.hidden is not None
    assert result.hidden.dtype == result.logits.dtype == torch.float32
    assert_close(result.hidden[0], want)
    assert_close(reference.lm_head(result.hidden.clone())[0], result.logits[0])


def test_only_emitting_positions_come_back_in_the_order_of_the_batch(engine: TorchEngine, reference: Any) -> None:
    prompts = [random_tokens(n, seed=3) for n in (50, 1, 20, 1, 2, 130)]
    handles = [engine.open(kv_tokens=140, prompt_tokens=len(p)) for p in prompts]
    emit = [3, 0, 1, 1, 0, 130]
    result = engine.step([EngineRow(h, p, e) for h, p, e in zip(handles, prompts, emit, strict=True)])
    wanted = [p[: len(p) - e + i] for p, e in zip(prompts, emit, strict=True) for i in range(1, e + 1)]
    assert result.logits.shape == (135, VOCAB)
    assert result.hidden is not None
    assert result.hidden.shape == (135, engine.info.hidden_size)
    for row, prompt in zip(result.logits, wanted, strict=True):
        assert_close(row, fresh(reference, prompt))


def test_a_step_without_an_emitting_row_gives_no_rows(engine: TorchEngine) -> None:
    handle = engine.open(kv_tokens=10, prompt_tokens=10)
    assert engine.step([EngineRow(handle, [1, 2], emit=0)]).logits.shape == (0, VOCAB)


def test_two_engines_in_one_process_keep_apart(folder: Path, reference: Any) -> None:
    one, two = load(folder, block_tokens=4), load(folder, block_tokens=16)
    prompt = random_tokens(12)
    a, b = one.open(kv_tokens=30, prompt_tokens=12), two.open(kv_tokens=30, prompt_tokens=12)
    extend(one, a, prompt)
    extend(two, b, random_tokens(12, seed=9))
    assert_close(extend(one, a, [5]), fresh(reference, [*prompt, 5]))


# Resources and misuse


def test_an_exhausted_pool_refuses_and_loses_nothing(folder: Path, reference: Any) -> None:
    engine = load(folder, block_tokens=4, max_tokens=40)
    prompt = random_tokens(10)
    first = engine.open(kv_tokens=20, prompt_tokens=10)
    extend(engine, first, prompt)
    with pytest.raises(EngineFailed, match="needs 6 KV blocks; 5 of 10 are free"):
        engine.open(kv_tokens=21, prompt_tokens=1)
    with pytest.raises(EngineFailed, match=f"1 to {CONTEXT}"):
        engine.open(kv_tokens=CONTEXT + 1, prompt_tokens=1)
    assert (engine.blocks_leased, engine.blocks_used) == (5, 3)
    second = engine.open(kv_tokens=20, prompt_tokens=1)
    assert engine.blocks_leased == engine.info.kv_blocks == 10
    extend(engine, second, random_tokens(20))
    assert_close(extend(engine, first, [3]), fresh(reference, [*prompt, 3]))
    for handle in (first, second, first):
        engine.close(handle)
    assert (engine.blocks_leased, engine.blocks_used) == (0, 0)


def test_a_refused_step_changes_nothing(engine: TorchEngine, reference: Any) -> None:
    prompt = random_tokens(10)
    handle, other = (engine.open(kv_tokens=12, prompt_tokens=10) for _ in range(2))
    closed = engine.open(kv_tokens=5, prompt_tokens=1)
    engine.close(closed)
    extend(engine, handle, prompt)
    refused: list[tuple[list[EngineRow], str]] = [
        ([], "0 sequences"),
        ([EngineRow(other, [1])] * 65, "65 sequences"),
        ([EngineRow(other, [1] * 3000)], "3000 tokens"),
        ([EngineRow(other, [])], "at least one"),
        ([EngineRow(other, [1], emit=2)], "2 positions of a row of 1"),
        ([EngineRow(other, [1]), EngineRow(other, [2])], "twice"),
        ([EngineRow(other, [1]), EngineRow(closed, [2])], "closed"),
        ([EngineRow(other, [1]), EngineRow(handle, [1, 2, 3])], "opened for 12"),
        ([EngineRow(other, [1]), EngineRow(handle, [VOCAB])], f"outside 0 to {VOCAB - 1}"),
        ([EngineRow(other, [-1])], "outside 0"),
    ]
    used = engine.blocks_used
    for rows, message in refused:
        with pytest.raises(EngineFailed, match=message):
            engine.step(rows)
        assert engine.blocks_used == used
    with pytest.raises(EngineFailed, match="closed"):
        engine.truncate(closed, 0)
    assert_close(extend(engine, handle, [4]), fresh(reference, [*prompt, 4]))


def test_a_failing_forward_pass_can_be_repeated(engine: TorchEngine, reference: Any) -> None:
    prompt = random_tokens(10)
    handle = engine.open(kv_tokens=12, prompt_tokens=10)
    extend(engine, handle, prompt)

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    hook = engine._decoder.register_forward_hook(fail)
    with pytest.raises(EngineFailed, match="out of memory"):
        extend(engine, handle, [4])
    hook.remove()
    assert_close(extend(engine, handle, [4]), fresh(reference, [*prompt, 4]))


def test_values_that_are_not_finite_do_not_reach_the_next_owner_of_a_block(folder: Path, reference: Any) -> None:
    engine = load(folder, block_tokens=16, max_tokens=64)
    embedding = engine._model.get_input_embeddings()  # type: ignore[operator]
    before = embedding.weight[13].clone()
    embedding.weight[13] = float("nan")
    bad, good = engine.open(kv_tokens=32, prompt_tokens=1), engine.open(kv_tokens=32, prompt_tokens=1)
    result = engine.step([EngineRow(bad, [13] * 30), EngineRow(good, [1, 2])])
    embedding.weight[13] = before
    assert not result.logits[0].isfinite().any()
    assert_close(result.logits[1], fresh(reference, [1, 2]))
    blocks = bad.lease.block_ids
    engine.close(bad)
    successor = engine.open(kv_tokens=32, prompt_tokens=1)
    assert successor.lease.block_ids == blocks
    # A longer sequence in its group makes the step read, and mask, what lies behind the successor's own tokens.
    result = engine.step([EngineRow(successor, [3, 4]), EngineRow(good, [5, 6])])
    assert_close(result.logits[0], fresh(reference, [3, 4]))
    assert_close(result.logits[1], fresh(reference, [1, 2, 5, 6]))


def test_a_sequence_recovers_when_its_values_that_are_not_finite_are_truncated(folder: Path, reference: Any) -> None:
    engine = load(folder)
    embedding = engine._model.get_input_embeddings()  # type: ignore[operator]
    before = embedding.weight[13].clone()
    handle = engine.open(kv_tokens=32, prompt_tokens=1)
    extend(engine, handle, [1, 2])
    embedding.weight[13] = float("nan")
    extend(engine, handle, [13] * 20)
    embedding.weight[13] = before
    engine.truncate(handle, 2)
    longer = engine.open(kv_tokens=32, prompt_tokens=1)
    extend(engine, longer, [7] * 15)
    result = engine.step([EngineRow(handle, [3]), EngineRow(longer, [8])])
    assert_close(result.logits[0], fresh(reference, [1, 2, 3]))
    assert_close(result.logits[1], fresh(reference, [7] * 15 + [8]))


@pytest.mark.parametrize("block_tokens", [1, 5])
def test_random_traffic_keeps_every_sequence_right(folder: Path, reference: Any, block_tokens: int) -> None:
    engine, rng = load(folder, block_tokens=block_tokens, max_tokens=200), random.Random(4)
    live: dict[Any, list[int]] = {}
    for _ in range(60):
        if rng.random() < 0.5:
            wanted = rng.randrange(1, 80)
            try:
                live[engine.open(kv_tokens=wanted, prompt_tokens=1)] = []
            except EngineFailed:
                assert engine.blocks_leased * block_tokens + wanted > 200
        for handle in rng.sample(list(live), k=len(live) // 2):
            if rng.random() < 0.2:
                keep = rng.randrange(40)
                engine.truncate(handle, keep)
                live[handle] = live[handle][:keep]
            elif rng.random() < 0.2:
                engine.close(handle)
                del live[handle]
        rows = []
        for handle, tokens in live.items():
            room = handle.kv_tokens - len(tokens)
            if room and rng.random() < 0.7:
                new = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 1, rng.randint(1, room)]))]
                live[handle] = tokens + new
                rows.append(EngineRow(handle, new))
        if rows:
            for row, logits in zip(rows, engine.step(rows).logits, strict=True):
                assert_close(logits, fresh(reference, live[row.handle]))
        assert engine.blocks_used == sum(-(-len(tokens) // block_tokens) for tokens in live.values())
        assert engine.blocks_leased == sum(-(-handle.kv_tokens // block_tokens) for handle in live)


def test_shutdown_frees_weights_and_cache(folder: Path) -> None:
    engine = load(folder)
    engine.shutdown()
    engine.shutdown()
    assert not hasattr(engine, "_model")
    assert not hasattr(engine, "_cache")


# The demo models


@pytest.mark.parametrize("name", ["small", "large"])
def test_demo_model_equals_generate(name: str) -> None:
    folder = REPOSITORY / name / "1"
    engine, reference = load(folder), load_reference(folder)
    reference.generation_config.eos_token_id = None  # the engine leaves the end to the sampler
    prompts = [random_tokens(n, seed=2, vocab=engine.info.vocab_size) for n in (1, 9, 30, 64)]
    handles = [engine.open(kv_tokens=len(p) + 30, prompt_tokens=len(p)) for p in prompts]
    outputs: list[list[int]] = [[] for _ in prompts]
    for _ in range(30):
        rows = [EngineRow(h, out[-1:] or p) for h, out, p in zip(handles, outputs, prompts, strict=True)]
        for out, token in zip(outputs, engine.step(rows).logits.argmax(-1).tolist(), strict=True):
            out.append(token)
    assert outputs == [greedy(reference, p, 30) for p in prompts]
