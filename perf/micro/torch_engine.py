"""Decode speed of the torch engine beside `transformers.generate`, and what the engine itself adds to a step.

    python -m perf.micro.torch_engine [--model DIR] [--batches 1 8 16] [--json]

Both sides do the same work on the same weights with the same threads: a static batch of equal prompts is prefilled and
decoded greedily. Their runs alternate, so that a disturbance of the machine hits both, and medians are compared.

Engine overhead is the time of a step minus the time that the same step spends inside the model's modules (decoder with
its paged attention, and LM head), taken by hooks on them. What remains is validation, packing, index building and
bookkeeping.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tokenrouter.engines.base import EngineRow
from tokenrouter.engines.torch.config import TorchEngineConfig
from tokenrouter.engines.torch.engine import TorchEngine

DEFAULT_MODEL = Path("model_repository/large/1")


@dataclass(frozen=True)
class Measurement:
    """Medians at one batch size; `ratio` is engine over generate, above 1 if the engine is faster.

    The ratio is the median over pairs of neighbouring runs, so a slow spell of the machine does not enter it.
    """

    batch: int
    engine_tokens_per_s: float
    generate_tokens_per_s: float
    ratio: float
    step_ms: float
    model_ms: float
    overhead_ms: float


def main() -> None:
    arguments = _parse()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model or _default_model(Path(scratch))
        config = TorchEngineConfig(
            threads=arguments.threads, max_batch_size=max(arguments.batches), max_num_tokens=8192, device="cpu"
        )
        engine = TorchEngine.from_folder(folder, config)
        reference = _load_reference(folder)
        results = [_measure(engine, reference, batch, arguments) for batch in arguments.batches]
    if arguments.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        _print(results, f"{arguments.model or folder.name}, {torch.get_num_threads()} threads")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="perf.micro.torch_engine", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--model", type=Path, help="checkpoint folder; default: the demo's large model")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16], help="batch sizes")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens of each sequence")
    parser.add_argument("--tokens", type=int, default=64, help="tokens decoded by each sequence")
    parser.add_argument("--repeats", type=int, default=11, help="runs of each side")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args()


def _default_model(scratch: Path) -> Path:
    """The demo's large model if it was built, otherwise random weights of its size."""
    if (DEFAULT_MODEL / "model.safetensors").is_file():
        return DEFAULT_MODEL
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    folder = scratch / "random-weights"
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def _load_reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.eval()


def _measure(engine: TorchEngine, reference: Any, batch: int, arguments: argparse.Namespace) -> Measurement:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(engine.info.vocab_size, (batch, arguments.prompt), generator=generator)
    tokens: int = arguments.tokens

    def with_engine() -> None:
        _decode(engine, prompts.tolist(), tokens)

    def with_generate() -> None:
        reference.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )

    pairs = _alternate(with_engine, with_generate, arguments.repeats)
    step_ms, model_ms = _overhead(engine, prompts.tolist(), tokens)
    return Measurement(
        batch=batch,
        engine_tokens_per_s=batch * tokens / statistics.median(ours for ours, _ in pairs),
        generate_tokens_per_s=batch * tokens / statistics.median(theirs for _, theirs in pairs),
        ratio=statistics.median(theirs / ours for ours, theirs in pairs),
        step_ms=step_ms,
        model_ms=model_ms,
        overhead_ms=step_ms - model_ms,
    )


def _decode(engine: TorchEngine, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """Decodes a static batch greedily and returns the new tokens."""
    handles = [engine.open(kv_tokens=len(prompt) + tokens, prompt_tokens=len(prompt)) for prompt in prompts]
    rows = [EngineRow(handle, prompt) for handle, prompt in zip(handles, prompts, strict=True)]
    outputs: list[list[int]] = [[] for _ in prompts]
    for _ in range(tokens):
        chosen = engine.step(rows).logits.argmax(dim=-1).tolist()
        for output, token in zip(outputs, chosen, strict=True):
            output.append(token)
        rows = [EngineRow(handle, [token]) for handle, token in zip(handles, chosen, strict=True)]
    for handle in handles:
        engine.close(handle)
    return outputs


def _alternate(one: Callable[[], None], other: Callable[[], None], repeats: int) -> list[tuple[float, float]]:
    """Seconds of each, run in turns after one warm-up each; which goes first alternates too."""
    one()
    other()
    pairs = []
    for repeat in range(repeats):
        if repeat % 2:
            second = _seconds(other)
            pairs.append((_seconds(one), second))
        else:
            first = _seconds(one)
            pairs.append((first, _seconds(other)))
    return pairs


def _overhead(engine: TorchEngine, prompts: Sequence[list[int]], steps: int) -> tuple[float, float]:
    """Median milliseconds of a decode step, and of the part of a step that is spent inside the model."""
    handles = [engine.open(kv_tokens=len(prompt) + steps, prompt_tokens=len(prompt)) for prompt in prompts]
    engine.step([EngineRow(handle, prompt) for handle, prompt in zip(handles, prompts, strict=True)])
    rows = [EngineRow(handle, [1]) for handle in handles]
    totals, insides = [], []
    with _clock(engine) as inside:
        for _ in range(steps):
            inside.clear()
            totals.append(_seconds(lambda: engine.step(rows)))
            insides.append(sum(inside))
    for handle in handles:
        engine.close(handle)
    return statistics.median(totals) * 1e3, statistics.median(insides) * 1e3


@contextmanager
def _clock(engine: TorchEngine) -> Iterator[list[float]]:
    """Collects the seconds of every call of the engine's decoder and LM head."""
    inside: list[float] = []
    began = 0.0

    def start(*_: object) -> None:
        nonlocal began
        began = time.perf_counter()

    def stop(*_: object) -> None:
        inside.append(time.perf_counter() - began)

    modules = (engine._decoder, engine._head)
    hooks = [hook for m in modules for hook in (m.register_forward_pre_hook(start), m.register_forward_hook(stop))]
    try:
        yield inside
    finally:
        for hook in hooks:
            hook.remove()


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _print(results: Sequence[Measurement], title: str) -> None:
    table = Table(title=title)
    for heading in ("batch", "engine tok/s", "generate tok/s", "ratio", "step ms", "model ms", "overhead ms"):
        table.add_column(heading, justify="right")
    for row in results:
        table.add_row(
            str(row.batch),
            f"{row.engine_tokens_per_s:,.0f}",
            f"{row.generate_tokens_per_s:,.0f}",
            f"{row.ratio:.2f}",
            f"{row.step_ms:.2f}",
            f"{row.model_ms:.2f}",
            f"{row.overhead_ms:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
