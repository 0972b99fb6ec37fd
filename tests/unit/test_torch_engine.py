from __future__ import annotations

import random
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenrouter.engines.base import Engine, EngineRow
from tokenrouter.engines.torch import loading
from tokenrouter.engines.torch.batch import Costs, plan_groups
from tokenrouter.engines.torch.config import KvCacheConfig, TorchEngineConfig
from tokenrouter.engines.torch.engine import TorchEngine
from tokenrouter.errors import ConfigError, EngineFailed

VOCAB = 97
CONTEXT = 192
BLOCK_SIZES = [1, 7, 16]
REPOSITORY = Path(__file__).parents[2] / "model_repository"
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,  # large enough that logits differ clearly and sequences do not settle on one token
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    yield
    torch.set_num_threads(before)


def save(folder: Path, config: Any) -> Path:
    torch.manual_seed(7)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = (
        transformers.Qwen3Config(**SIZES, head_dim=16)
        if request.param == "qwen3"
        else transformers.LlamaConfig(**SIZES)
    )
    return save(tmp_path_factory.mktemp(request.param), config)


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


def load_reference(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()


def load(folder: Path, *, block_tokens: int = 16, max_tokens: int = 6000, **settings: Any) -> TorchEngine:
    cache = KvCacheConfig(tokens_per_block=block_tokens, max_tokens=max_tokens)
    defaults: dict[str, Any] = {"device": "cpu", "threads": 1, "max_batch_size": 64, "max_num_tokens": 2048}
    return TorchEngine.from_folder(folder, TorchEngineConfig(**{**defaults, **settings}, kv_cache_config=cache))


def random_tokens(count: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    rng = random.Random(f"{seed}/{count}")
    return [rng.randrange(vocab) for _ in range(count)]


def greedy(reference: Any, prompt: Sequence[int], count: int) -> list[int]:
    """What `generate` writes. The mask is given, as generate would else hide tokens that equal the padding."""
    ids = torch.tensor([list(prompt)])
    out = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    new: list[int] = out[0, len(prompt) :].tolist()
    return new


@torch.inference_mode()
def fresh(reference: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Last-position logits [V] of transformers, computed from nothing."""
    ids = torch.tensor([list(tokens)])
    logits: torch.Tensor = reference(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, -1]
    return logits


def extend(engine: TorchEngine, handle: Any, tokens: Sequence[int]) -> torch.Tensor:
    return engine.step([EngineRow(handle, tokens)]).logits[0]


def decode(engine: TorchEngine, handle: Any, prompt: Sequence[int], count: int) -> list[int]:
    out: list[int] = []
    new = prompt
    while len(out) < count:
        out.append(int(extend(engine, handle, new).argmax()))
        new = out[-1:]
    return out


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


# Loading


def test_info_and_protocol(folder: Path) -> None:
    engine: Engine = load(folder, block_tokens=16, max_tokens=1000, max_seq_len=100, max_batch_size=3)
    info = engine.info
    assert (info.name, info.vocab_size, info.hidden_size, info.emulated) == ("torch", VOCAB, 48, False)
    assert (info.max_context, info.block_tokens, info.kv_blocks) == (100, 16, 62)
    assert (info.max_batch, info.max_num_tokens) == (3, 2048)


def test_defaults_hold_a_full_batch_at_full_length(folder: Path) -> None:
    engine = TorchEngine.from_folder(folder, TorchEngineConfig(device="cpu", threads=1))
    assert engine.info.max_context == CONTEXT
    assert engine.info.kv_blocks * engine.info.block_tokens == engine.info.max_batch * CONTEXT
    handles = [engine.open(kv_tokens=CONTEXT, prompt_tokens=1) for _ in range(engine.info.max_batch)]
    assert engine.blocks_leased == engine.info.kv_blocks
    assert len(handles) == engine.info.max_batch


def test_loading_sets_the_threads_of_the_process(folder: Path) -> None:
    load(folder, threads=2)
    assert torch.get_num_threads() == 2
    load(folder, threads=1)
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(("parameters", "threads"), [(10**9, 1), (100, 3)])
def test_a_small_model_gets_one_thread_and_a_larger_one_every_core(
    folder: Path, monkeypatch: pytest.MonkeyPatch, parameters: int, threads: int
) -> None:
    monkeypatch.setattr("tokenrouter.engines.torch.engine.SINGLE_THREAD_PARAMETERS", parameters)
    monkeypatch.setattr("tokenrouter.engines.torch.engine.default_threads", lambda sharing: 3)
    load(folder, threads=None)
    assert torch.get_num_threads() == threads
    torch.set_num_threads(1)


def test_loading_touches_no_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    load(folder)


def test_bfloat16_is_served(folder: Path) -> None:
    engine = load(folder, dtype="bfloat16")
    handle = engine.open(kv_tokens=20, prompt_tokens=5)
    assert extend(engine, handle, [1, 2, 3]).dtype == torch.float32


OTHER_ARCHITECTURES = {
    "gemma (norm scales by 1 + weight)": lambda: transformers.GemmaConfig(**SIZES, head_dim=16),
    "gpt2 (learned positions, no grouped heads)": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=48, n_layer=2, n_head=6, n_positions=CONTEXT, bos_token_id=None, eos_token_id=None
    ),
    "mixtral (experts)": lambda: transformers.MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "olmo2 (post-norms)": lambda: transformers.Olmo2Config(**SIZES),
    "phi3 (fused projections)": lambda: transformers.Phi3Config(**SIZES),
    "qwen2 (biases)": lambda: transformers.Qwen2Config(**SIZES),
}


@pytest.mark.parametrize("name", OTHER_ARCHITECTURES)
def test_other_architectures_equal_generate(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path, OTHER_ARCHITECTURES[name]())
    engine, prompt = load(folder, block_tokens=7), random_tokens(9)
    handle = engine.open(kv_tokens=40, prompt_tokens=9)
    assert decode(engine, handle, prompt, 20) == greedy(load_reference(folder), prompt, 20)


# A window, or a border of rope scaling, that no sequence outgrows
HARMLESS = {
    "mistral, window of the context": lambda: transformers.MistralConfig(**SIZES, sliding_window=CONTEXT),
    "phi3, window beyond the context": lambda: transformers.Phi3Config(**SIZES, sliding_window=CONTEXT + 71),
    "qwen2, sliding layers, window beyond": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=CONTEXT, layer_types=["full_attention", "sliding_attention"]
    ),
    "qwen2, all layers full": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=8, layer_types=["full_attention"] * 2
    ),
    "llama, dynamic rope": lambda: transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_border_that_no_sequence_crosses_is_harmless(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path, HARMLESS[name]())
    engine, reference, prompts = load(folder, block_tokens=7), load_reference(folder), [random_tokens(150), [5, 6]]
    assert beside(engine, prompts, 40) == [greedy(reference, prompt, 40) for prompt in prompts]


def beside(engine: TorchEngine, prompts: list[list[int]], count: int) -> list[list[int]]:
    """What is written to prompts that share every step."""
    handles = [engine.open(kv_tokens=len(prompt) + count, prompt_tokens=len(prompt)) for prompt in prompts]
    out: list[list[int]] = [[] for _ in prompts]
    for _ in range(count):
        rows = [EngineRow(h, new[-1:] or prompt) for h, new, prompt in zip(handles, out, prompts, strict=True)]
        for new, token in zip(out, engine.step(rows).logits.argmax(-1).tolist(), strict=True):
            new.append(token)
    return out


def longrope(border: int) -> Any:
    """Phi3 whose rotation changes once the longest sequence of a batch has more tokens than `border`."""
    dim = SIZES["hidden_size"] // SIZES["num_attention_heads"] // 2
    rope = {"rope_type": "longrope", "short_factor": [1.0] * dim, "long_factor": [9.0] * dim, "rope_theta": 1e4}
    return transformers.Phi3Config(
        **SIZES,
        rope_parameters={**rope, "original_max_position_embeddings": border},
        original_max_position_embeddings=border,
    )


def test_rope_scaling_that_changes_with_the_neighbours_is_refused_beyond_its_border(tmp_path: Path) -> None:
    folder = save(tmp_path, longrope(64))
    with pytest.raises(ConfigError, match=r"rope_type 'longrope'.*more than 64 tokens.*set max_seq_len to 64 or less"):
        load(folder)
    engine, reference = load(folder, max_seq_len=64), load_reference(folder)
    prompts = [random_tokens(40), [5, 6]]
    assert beside(engine, prompts, 24) == [greedy(reference, prompt, 24) for prompt in prompts]


@pytest.mark.parametrize("chunk", [512, 9])
def test_the_check_at_load_finds_what_changes_beyond_a_border(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    folder = save(tmp_path, longrope(64))
    monkeypatch.setattr(loading, "refuse_unsupported", lambda *_: None)
    with pytest.raises(ConfigError, match="differ from the model's own"):
        load(folder, max_num_tokens=chunk, max_batch_size=4)


REFUSED = {
    "sliding window": (lambda: transformers.MistralConfig(**SIZES, sliding_window=8), "sliding_attention"),
    "mixed layer types": (
        lambda: transformers.Qwen3Config(
            **SIZES, sliding_window=8, use_sliding_window=True, layer_types=["full_attention", "sliding_attention"]
        ),
        "sliding_attention",
    ),
    "scaled logits": (lambda: transformers.GraniteConfig(**SIZES, logits_scaling=4.0), "differ from the model's own"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_compute_is_refused_at_load(name: str, tmp_path: Path) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        load(save(tmp_path, make()))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"max_batch": 4}, "max_batch.*known fields.*max_batch_size"),
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"max_batch_size": "8"}, r"\$\.max_batch_size"),
        ({"threads": -1}, "threads is -1"),
        ({"dtype": "float64"}, r"\$\.dtype"),
        ({"max_batch_size": 8, "max_num_tokens": 4}, "set max_num_tokens to 8 or more"),
        ({"kv_cache_config": {"tokens_per_block": 0}}, "kv_cache_config.tokens_per_block is 0"),
        ({"kv_cache_config": {"max_tokens": 3}}, "kv_cache_config.max_tokens is 3"),
        ({"kv_cache_config": {"fraction": 0.5}}, "fraction"),
    ],
)
def test_bad_settings_name_the_field(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TorchEngineConfig.from_mapping(raw)


def test_good_settings_are_read() -> None:
    config = TorchEngineConfig.from_mapping({"max_batch_size": 4, "kv_cache_config": {"tokens_per_block": 32}})
    assert config == TorchEngineConfig(max_batch_size=4, kv_cache_config=KvCacheConfig(tokens_per_block=32))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "tpu9"}, "device is 'tpu9'"),
        ({"device": "cuda:99"}, "CUDA devices exist"),
        ({"device": "meta"}, "use cpu, cuda"),
        ({"max_seq_len": CONTEXT + 1}, f"max_seq_len is {CONTEXT + 1}, but the model takes at most {CONTEXT}"),
    ],
)
def test_settings_that_do_not_fit_are_refused(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(folder, **settings)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load(tmp_path / "missing")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config\.json: model_type is None"):
        load(tmp_path)


# Grouping

COSTS = Costs(per_score=100, per_key=10, per_group=50_000)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 2000)), min_size=1, max_size=20))
@settings(max_examples=200, deadline=None)
def test_groups_are_a_partition_and_never_cost_more_than_one_by_one(sizes: list[tuple[int, int]]) -> None:
    counts, ends = [new for new, _ in sizes], [new + old for new, old in sizes]
    groups = plan_groups(counts, ends, COSTS)
    assert sorted(i for group in groups for i in group) == list(range(len(sizes)))

    def cost(parts: list[list[int]]) -> int:
        return sum(
            COSTS.of(len(p), max(counts[i] for i in p), max(ends[i] for i in p)) + COSTS.per_group for p in parts
        )

    assert cost(groups) <= cost([[i] for i in range(len(sizes))])


def test_similar_decodes_are_one_group_in_their_order_and_a_long_prompt_is_its_own() -> None:
    assert plan_groups([1] * 4, [50, 20, 40, 30], COSTS) == [[0, 1, 2, 3]]
    assert plan_groups([1, 200, 1], [50, 200, 40], COSTS) == [[2, 0], [1]]


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
