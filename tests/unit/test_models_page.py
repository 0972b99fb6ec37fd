"""What docs/models.md says of the torch engine: each architecture writes what `generate` writes, or is refused.

Tiny random models in float32, one config class each: a request alone, beside others, and with prompts in chunks.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tokenrouter.engines.base import EngineRow
from tokenrouter.engines.torch.config import KvCacheConfig, TorchEngineConfig
from tokenrouter.engines.torch.engine import TorchEngine
from tokenrouter.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
VOCAB = 97
CONTEXT = 64
NEW = 12
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,  # large enough that logits differ clearly
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GPT = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": CONTEXT,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in SIZES.items() if name not in names}


@dataclass(frozen=True)
class Model:
    """An architecture, and, if it is refused, why: as the page says it, and what the error says.

    `from_311`: only the transformers that Python 3.10 no longer has lets its attention be replaced.
    """

    make: Callable[[], Any]
    why: str = ""
    says: str = ""
    from_311: bool = False

    @property
    def refused(self) -> bool:
        return bool(self.why) or (self.from_311 and sys.version_info < (3, 11))

    @property
    def on_the_page(self) -> str:
        if self.why:
            return f"no: {self.why}"
        return "yes, from Python 3.11 on, whose transformers is newer" if self.from_311 else "yes"


DIFFERS = "differ from the model's own"
EXPERTS = {"num_experts_per_tok": 2}
HEAD = {"head_dim": 8}
OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3, "pad_token_id": 1}
MODELS = {
    "Bloom": Model(
        lambda: transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, eos_token_id=None),
        "attention with biases by distance (ALiBi)",
        "cannot serve this architecture",
    ),
    "Cohere": Model(lambda: transformers.CohereConfig(**SIZES), "scaled logits", DIFFERS),
    "Falcon": Model(
        lambda: transformers.FalconConfig(**without("intermediate_size", "num_key_value_heads")),
        "attention of its own that cannot be replaced",
        DIFFERS,
    ),
    "GPT-2": Model(lambda: transformers.GPT2Config(**GPT)),
    "GPT-J": Model(lambda: transformers.GPTJConfig(**GPT, rotary_dim=4), says=DIFFERS, from_311=True),
    "GPT-NeoX": Model(lambda: transformers.GPTNeoXConfig(**without("num_key_value_heads"))),
    "Gemma": Model(lambda: transformers.GemmaConfig(**SIZES, **HEAD)),
    "Gemma 2": Model(
        lambda: transformers.Gemma2Config(**SIZES, **HEAD, sliding_window=CONTEXT), "capped attention scores", "softcap"
    ),
    "Gemma 3 (text), within its window": Model(
        lambda: transformers.Gemma3TextConfig(**SIZES, **HEAD, sliding_window=CONTEXT)
    ),
    "Gemma 3 (text), beyond its window": Model(
        lambda: transformers.Gemma3TextConfig(**SIZES, **HEAD, sliding_window=CONTEXT // 2),
        "layers with a sliding window; lower `max_seq_len` to it",
        "Set max_seq_len to 32 or less",
    ),
    "GLM-4": Model(lambda: transformers.Glm4Config(**SIZES, **HEAD)),
    "Granite": Model(lambda: transformers.GraniteConfig(**SIZES)),
    "Granite with `logits_scaling`": Model(
        lambda: transformers.GraniteConfig(**SIZES, logits_scaling=4.0), "scaled logits", DIFFERS
    ),
    "Llama": Model(lambda: transformers.LlamaConfig(**SIZES)),
    "Mistral, within its window": Model(lambda: transformers.MistralConfig(**SIZES, sliding_window=CONTEXT)),
    "Mixtral": Model(lambda: transformers.MixtralConfig(**SIZES, **EXPERTS, num_local_experts=4, sliding_window=None)),
    "Nemotron": Model(lambda: transformers.NemotronConfig(**SIZES)),
    "OLMo 2": Model(lambda: transformers.Olmo2Config(**SIZES)),
    "OPT": Model(
        lambda: transformers.OPTConfig(
            **without("num_key_value_heads", "intermediate_size", "initializer_range", "pad_token_id"), **OPT
        )
    ),
    "Phi": Model(lambda: transformers.PhiConfig(**SIZES)),
    "Phi 3": Model(lambda: transformers.Phi3Config(**SIZES)),
    "Qwen2": Model(lambda: transformers.Qwen2Config(**SIZES)),
    "Qwen3": Model(lambda: transformers.Qwen3Config(**SIZES, **HEAD)),
    "Qwen3-MoE": Model(
        lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, **HEAD, num_experts=4, moe_intermediate_size=16)
    ),
    "SmolLM3": Model(lambda: transformers.SmolLM3Config(**SIZES)),
    "StableLM": Model(lambda: transformers.StableLmConfig(**SIZES)),
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


def load(folder: Path, dtype: Any = "float32") -> TorchEngine:
    cache = KvCacheConfig(tokens_per_block=8, max_tokens=8 * CONTEXT)
    settings = TorchEngineConfig(
        device="cpu", dtype=dtype, threads=1, max_batch_size=8, max_seq_len=CONTEXT, kv_cache_config=cache
    )
    return TorchEngine.from_folder(folder, settings)


def generated(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers writes to each prompt alone, greedily."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    out = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        new = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False
        )
        out.append(new[0, len(prompt) :].tolist())
    return out


def written(engine: TorchEngine, prompts: list[list[int]], chunk: int = CONTEXT) -> list[list[int]]:
    """What the engine writes to prompts that share its steps, each given at most `chunk` tokens a step."""
    handles = [engine.open(kv_tokens=len(prompt) + NEW, prompt_tokens=len(prompt)) for prompt in prompts]
    unseen, out = [list(prompt) for prompt in prompts], [list[int]() for _ in prompts]
    while active := [i for i, new in enumerate(out) if len(new) < NEW]:
        logits = engine.step([EngineRow(handles[i], unseen[i][:chunk]) for i in active]).logits
        for i, token in zip(active, logits.argmax(-1).tolist(), strict=True):
            unseen[i] = unseen[i][chunk:]
            if not unseen[i]:
                out[i].append(token)
                unseen[i] = [token]
    for handle in handles:
        engine.close(handle)
    return out


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if not model.refused])
def test_a_served_architecture_writes_what_generate_writes(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, MODELS[name].make())
    engine = load(folder)
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (3, 40, 11)]
    wanted = generated(folder, prompts)
    assert len({tuple(new) for new in wanted}) == len(prompts)
    assert [written(engine, [prompt])[0] for prompt in prompts] == wanted
    assert written(engine, prompts) == wanted
    assert written(engine, prompts, chunk=7) == wanted


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.refused])
def test_another_one_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, MODELS[name].make())
    with pytest.raises(ConfigError, match=MODELS[name].says) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_the_page_has_this_table() -> None:
    rows = [f"| {name} | {model.on_the_page} |" for name, model in MODELS.items()]
    table = re.search(r"\| architecture \| served \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE.read_text("utf-8"))
    assert table is not None
    assert table.group(1).splitlines() == rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_logits_beside_others_differ_by_no_more_than_the_page_says(tmp_path: Path, dtype: str) -> None:
    engine = load(save(tmp_path, MODELS["Llama"].make()), dtype)
    rng = random.Random(5)
    histories = [[rng.randrange(VOCAB) for _ in range(length)] for length in (3, 50, 11, 30, 30, 7)]

    def logits(chosen: list[list[int]]) -> torch.Tensor:
        """[n, tokens, V] of the last tokens of histories that share every step."""
        handles = [engine.open(kv_tokens=len(history)) for history in chosen]
        parts = (slice(0, -2), slice(-2, -1), slice(-1, None))
        steps = [[history[part] for history in chosen] for part in parts]
        out = [
            engine.step([EngineRow(handle, new) for handle, new in zip(handles, tokens, strict=True)]).logits.clone()
            for tokens in steps
        ]
        for handle in handles:
            engine.close(handle)
        return torch.stack(out, dim=1)

    together, alone = logits(histories), torch.cat([logits([history]) for history in histories])
    stated = re.search(rf"\| {dtype} \|[^|]*\| (\S+) \|", PAGE.read_text("utf-8"))
    assert stated is not None
    assert float((together - alone).abs().max() / alone.abs().max()) <= float(stated.group(1))
