from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.unit.torch_models import CONTEXT, SIZES, VOCAB, decode, greedy, load, load_reference, random_tokens, save
from tokenrouter.engines.base import EngineRow
from tokenrouter.engines.torch import loading
from tokenrouter.engines.torch.engine import TorchEngine
from tokenrouter.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")

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
