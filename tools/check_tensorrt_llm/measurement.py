"""What only a run tells: KV blocks, how a resumed request is charged, and what a hand-off costs, part by part.

One model, called without adapter and server, with the library's statistics of its iterations. On a machine without a
GPU, on the double of the tests, the numbers mean nothing, but everything runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tokenrouter.engines.tensorrt_llm.config import TensorRtLlmConfig
from tokenrouter.engines.tensorrt_llm.iterations import first_step
from tokenrouter.engines.tensorrt_llm.library import Library
from tokenrouter.engines.tensorrt_llm.processor import VisitProcessor
from tokenrouter.engines.tensorrt_llm.visits import ControlIds, Task
from tokenrouter.messages import PolicySpec, Sampling
from tools.build_repository.arguments import tensorrt_llm
from tools.check_tensorrt_llm.report import Section

BLOCK = 32
MAX_NUM_TOKENS = 16 * BLOCK
RESUMES = 24
"""More than blocks in `MAX_NUM_TOKENS`, so charged a block each they need two steps, and charged a token each one."""
DECODING = 8
DECODE_STEP = f"decode step of {DECODING}"
REPEATS = 8
_STATS_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class Measurement:
    """What to measure.

    Attributes:
        checkpoint: folder of the model.
        gpu: its index.
        history: tokens of a request that is resumed.
        options: further keys of model.yaml.
    """

    checkpoint: Path
    gpu: int
    history: int
    options: dict[str, Any]

    def config(self) -> TensorRtLlmConfig:
        """Settings as the builder makes them, with statistics.

        Raises:
            ConfigError: they cannot work.
        """
        tokens = 4 * self.history + RESUMES * 8 * BLOCK
        options = {
            "max_batch_size": RESUMES + DECODING,
            "max_num_tokens": MAX_NUM_TOKENS,
            "max_seq_len": self.history + 8 * BLOCK,
            "enable_iter_perf_stats": True,
            "kv_cache_config": {"max_tokens": -(-tokens // BLOCK) * BLOCK, "tokens_per_block": BLOCK},
            **self.options,
        }
        arguments = tensorrt_llm(options, gpus=1, extend_tokens=2 * BLOCK)
        return TensorRtLlmConfig.from_mapping(self.checkpoint, {**arguments, "gpus": [self.gpu]})


@contextmanager
def opened(measurement: Measurement) -> Iterator[Bench]:
    """The model, loaded; it has all memory to itself."""
    config = measurement.config()
    with loaded(config) as library:
        yield Bench(library, config, measurement.history)


@contextmanager
def loaded(config: TensorRtLlmConfig) -> Iterator[Library]:
    """The library with a model."""
    library = Library(config)
    try:
        yield library
    finally:
        library.shutdown()


class Bench:
    """One loaded model and what is asked of it."""

    def __init__(self, library: Library, config: TensorRtLlmConfig, history: int) -> None:
        self._library = library
        self._config = config
        self._history = history
        # Any ids do; a history of its own for each use, so that nothing is shared.
        self._first = 0

    def sections(self) -> Iterator[Section]:
        """Everything, in an order in which nothing disturbs what follows."""
        yield self.blocks()
        yield self.resumes()
        yield self.handoff()

    # --- questions ----------------------------------------------------------------------------------------------

    def blocks(self) -> Section:
        """Blocks that the library says it has."""
        self._run([self._tokens(4)], count=2)
        asked, told = self._config.info.kv_blocks, self._iterations()
        found = told[-1].get("kvCacheStats", {}).get("maxNumBlocks") if told else None
        problems = () if found == asked else (f"{found} KV blocks instead of {asked}",)
        return Section("KV blocks", ("asked for", "allocated"), ((str(asked), str(found)),), problems)

    def resumes(self) -> Section:
        """How many of `RESUMES` requests, of which all but a token is cached, share a step."""
        histories = [self._tokens(2 * BLOCK) for _ in range(RESUMES)]
        self._run(histories, count=1)
        self._iterations()
        self._run([[*history, 1] for history in histories], count=1)
        told = self._iterations()
        together = max((_number(each, "numContextRequests") for each in told), default=0)
        whole, blocks = MAX_NUM_TOKENS // (2 * BLOCK), MAX_NUM_TOKENS // BLOCK
        if together > blocks:
            charged = "the tokens that are not cached"
        elif together > whole:
            charged = "a block each, in turn"
        else:
            charged = "the whole history"
        row = (str(RESUMES), str(2 * BLOCK), str(MAX_NUM_TOKENS), str(together), charged)
        problems = () if together > whole else (f"only {together} resumed requests share a step: EQUAL_PROGRESS",)
        columns = ("resumed at once", "history", "max_num_tokens", "most in a step", "so each is charged")
        return Section("How a resumed request is charged", columns, (row,), problems)

    def handoff(self) -> Section:
        """Milliseconds of a hand-off, by part; medians."""
        history = self._tokens(self._history)
        self._run([history], count=1)
        self._iterations()
        submit, total, step = self._resumed(history, REPEATS)
        plain, _ = self._decoding(None)
        routed, mixed = self._decoding(history)
        rest = None if total is None or step is None or submit is None else total - step - submit
        per_row = None if plain is None or routed is None else (routed - plain) / DECODING
        rows = (
            ("resume alone: submission to first token", total),
            ("of it, `generate_async`", submit),
            ("of it, the step", step),
            ("of it, queues, pickling and responses", rest),
            (DECODE_STEP, plain),
            (f"decode step of {DECODING} with our processors", routed),
            ("processor, per row and step", per_row),
            (f"decode step of {DECODING} with one resume in it", mixed),
        )
        lacking = [name for name, value in rows if value is None]
        problems = (f"not measured: {', '.join(lacking)}",) if lacking else ()
        remark = f"history of {self._history} tokens, all but one cached"
        cells = tuple((name, "-" if value is None else f"{value:.3f}") for name, value in rows)
        return Section("Cost of a hand-off", ("part", "ms"), cells, problems, remark)

    # --- requests -----------------------------------------------------------------------------------------------

    def _tokens(self, count: int) -> list[int]:
        self._first += 1
        return [(self._first * 7 + i) % 200 for i in range(count)]

    def _submit(self, tokens: Sequence[int], count: int, processor: Any = None) -> Any:
        return self._library.generate(tokens, max_tokens=count, end_id=None, stop_ids=(), processor=processor)

    def _run(self, prompts: Sequence[Sequence[int]], count: int) -> None:
        for output in [self._submit(prompt, count) for prompt in prompts]:
            output.result()

    def _resumed(self, history: list[int], repeats: int) -> tuple[float | None, float | None, float | None]:
        """Milliseconds of the call, until the first token, and of the step; an iteration's latency includes waiting."""
        submit, total, steps = [], [], []
        for i in range(repeats):
            started = time.perf_counter()
            output = self._submit([*history, i], 1)
            submit.append((time.perf_counter() - started) * 1e3)
            output.result()
            total.append((time.perf_counter() - started) * 1e3)
            if (first := first_step(output.outputs[0])) is not None:
                steps.append(first[1] * 1e3)
        return statistics.median(submit), statistics.median(total), statistics.median(steps) if steps else None

    def _decoding(self, history: list[int] | None) -> tuple[float | None, float | None]:
        """Milliseconds of a decode step, and of one with a resume; processors and resumes only with a history."""
        count = 6 * BLOCK
        prompts = [self._tokens(4) for _ in range(DECODING)]
        processors = [None if history is None else _processor(self._config, len(each), count) for each in prompts]
        self._iterations()
        outputs = [self._submit(prompt, count, each) for prompt, each in zip(prompts, processors, strict=True)]
        if history is not None:
            self._resumed([*history, 1], REPEATS)
        for output in outputs:
            output.result()
        told = self._iterations()
        alone = _median(told, lambda each: _rows(each) == (0, DECODING))
        return alone, _median(told, lambda each: _rows(each) == (1, DECODING))

    def _iterations(self) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = self._library.llm.get_stats(_STATS_TIMEOUT_S)
        return told


def _processor(config: TensorRtLlmConfig, prompt_tokens: int, count: int) -> VisitProcessor:
    """The one of a visit that nobody leaves by decision."""
    task = Task(
        model="small",
        models=("small", "large"),
        checkpoint=str(config.arguments["model"]),
        directory=None,
        policy=PolicySpec("single"),
        sampling=Sampling(count),
        prompt_tokens=prompt_tokens,
        source="",
        state={},
        limit=None,
        then="small",
        banned=(),
        ids=ControlIds(),
        decides=False,
        mark=None,
        marked=False,
    )
    return VisitProcessor(msgspec.msgpack.encode(task), None)


def _number(iteration: dict[str, Any], name: str) -> int:
    return int(iteration.get("inflightBatchingStats", {}).get(name, 0))


def _rows(iteration: dict[str, Any]) -> tuple[int, int]:
    return _number(iteration, "numContextRequests"), _number(iteration, "numGenRequests")


def _median(iterations: list[dict[str, Any]], wanted: Callable[[dict[str, Any]], bool]) -> float | None:
    latencies = [float(each["iterLatencyMS"]) for each in iterations if wanted(each)]
    return statistics.median(latencies) if latencies else None
