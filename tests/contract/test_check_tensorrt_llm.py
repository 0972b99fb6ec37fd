"""The command that compares an installed TensorRT-LLM with the tables, run on the double."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import tensorrt_llm
import typer
from tensorrt_llm import llmapi, sampling_params
from typer.testing import CliRunner

from tokenrouter.engines.tensorrt_llm import facts
from tools.check_tensorrt_llm import __main__ as check_tensorrt_llm
from tools.check_tensorrt_llm.generation import Outcome, Settings
from tools.check_tensorrt_llm.inspection import Finding, compare
from tools.check_tensorrt_llm.measurement import Bench
from tools.check_tensorrt_llm.resident import SURFACES as RESIDENT

MODELS = Path(__file__).parents[2] / "model_repository"
SMALL, LARGE = (["--model", str(MODELS / name / "1")] for name in ("small", "large"))
UNUSED = ["--handoff-ids", "257,261", "--without-gpu", "--history", "300"]

app = typer.Typer()
app.command()(check_tensorrt_llm.main)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def finding(path: str) -> Finding:
    return next(each for each in compare() if each.surface.path == path)


def run_apart(path: Path | None) -> tuple[int, str]:
    """The command in another process, with `path` as the only addition to sys.path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, "-m", "tools.check_tensorrt_llm"]
    result = subprocess.run(
        command, env=environment, cwd=MODELS.parent, capture_output=True, text=True, timeout=280, check=False
    )
    return result.returncode, result.stdout


def test_without_tensorrt_llm_it_says_so(tmp_path: Path) -> None:
    code, output = run_apart(None)
    assert (code, "tensorrt_llm is not installed here" in output) == (2, True)
    (tmp_path / "tensorrt_llm").mkdir()
    (tmp_path / "tensorrt_llm" / "__init__.py").write_text("raise OSError('libnvinfer.so.10 is not there')")
    code, output = run_apart(tmp_path)
    assert (code, "cannot be imported: OSError: libnvinfer" in output) == (2, True)


# --- inspection ------------------------------------------------------------------------------------------------------


def test_the_double_is_as_the_table_says() -> None:
    assert [each for each in compare() if each.problem or each.missing or each.new or each.changed] == []
    code, output = run()
    assert code == 0
    assert "generation skipped: no --model" in output
    assert "BROKEN" not in output
    for name in ("manager_in_frames", "KvCacheConfig, use_kv_cache_manager_v2", "Qwen3ForCausalLM.forward"):
        assert name in output


def test_a_missing_essential_field_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(llmapi.KvCacheConfig.model_fields, "tokens_per_block")
    found = finding("tensorrt_llm.llmapi.KvCacheConfig")
    assert found.missing == found.essential == ("tokens_per_block",)
    code, output = run(*SMALL, *LARGE)
    assert code == 1
    assert "BROKEN tensorrt_llm.llmapi.KvCacheConfig: tokens_per_block" in output
    assert "generation" not in output


def test_other_fields_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = llmapi.KvCacheConfig.model_fields
    monkeypatch.delitem(fields, "use_uvm")
    monkeypatch.setitem(fields, "disk_cache", facts.Parameter("disk_cache", default=None))
    monkeypatch.setitem(fields, "tokens_per_block", facts.Parameter("tokens_per_block", default=64))
    found = finding("tensorrt_llm.llmapi.KvCacheConfig")
    assert (found.missing, found.new, found.essential) == (("use_uvm",), ("disk_cache",), ())
    assert found.changed == ("tokens_per_block=64 (was 32)",)
    code, output = run()
    assert (code, "differs" in output) == (0, True)


def test_what_is_gone_or_has_changed_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate_async(self: Any, inputs: Any, sampling_params: Any = None, streaming: bool = False) -> None: ...

    monkeypatch.setattr(tensorrt_llm.LLM, "generate_async", generate_async)
    monkeypatch.setattr(llmapi.RequestOutput, "__anext__", lambda self: None)
    monkeypatch.delattr(llmapi, "CudaGraphConfig")
    assert finding("tensorrt_llm.LLM.generate_async").essential == ("kv_cache_retention_config", "cache_salt")
    assert finding("tensorrt_llm.llmapi.RequestOutput.__anext__").essential == ("not a coroutine function",)
    assert finding("tensorrt_llm.llmapi.CudaGraphConfig").essential[0].startswith("not there")


def test_a_processor_with_another_number_of_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    def four(self: Any, req_id: int, logits: Any, token_ids: Any, stream_ptr: Any) -> None: ...

    def renamed(self: Any, request: int, logits: Any, tokens: Any, stream_ptr: Any, client_id: Any) -> None: ...

    path = "tensorrt_llm.sampling_params.LogitsProcessor.__call__"
    monkeypatch.setattr(sampling_params.LogitsProcessor, "__call__", four)
    assert "takes 4 positional arguments, not 5" in finding(path).essential[0]
    monkeypatch.setattr(sampling_params.LogitsProcessor, "__call__", renamed)
    assert finding(path).essential == ()


def test_bindings_are_read_from_their_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    class Binding:
        """Like a class of a C++ extension: no signature, but a text."""

        def __init__(self, *args: Any) -> None:
            """__init__(self, token_range_retention_configs: collections.abc.Sequence[X], priority: int = 35) -> None"""

    signature = inspect.signature

    def guarded(found: Any) -> Any:
        if found is Binding:
            raise ValueError("no signature found for builtin type")
        return signature(found)

    monkeypatch.setattr(llmapi, "KvCacheRetentionConfig", Binding)
    monkeypatch.setattr("inspect.signature", guarded)
    found = finding("tensorrt_llm.llmapi.KvCacheRetentionConfig")
    assert found.new == ("priority",)
    assert found.essential == ("decode_retention_priority",)


def test_names_of_a_resident_engine_are_told_and_break_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The double has no executor: what it can show is that absence is told, and presence inspected."""
    code, output = run("--resident")
    assert (code, "BROKEN" in output) == (0, False)
    absent = compare(RESIDENT)
    assert {each.problem.split(":")[0] for each in absent} == {"not there"}
    assert not any(each.essential for each in absent)

    class KVCacheManager:
        def __init__(self) -> None:
            self.impl = None

        def rewind_kv_cache(self, request: Any, length: int) -> None: ...

    module = types.ModuleType("tensorrt_llm._torch.pyexecutor.resource_manager")
    module.KVCacheManager = KVCacheManager  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorrt_llm._torch.pyexecutor", types.ModuleType("pyexecutor"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found = {each.surface.name: each.missing for each in compare(RESIDENT) if not each.problem}
    assert "impl" not in found["KVCacheManager"]
    assert "free_resources" in found["KVCacheManager"]
    assert found["KVCacheManager.rewind_kv_cache"] == ("rewind_len",)


# --- runs ------------------------------------------------------------------------------------------------------------


def test_everything_at_once_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With worker processes, as on a GPU."""
    monkeypatch.delenv("TLLM_WORKER_USE_SINGLE_PROCESS")
    code, output = run(*SMALL, *LARGE, *UNUSED, "--output", str(tmp_path / "found.json"))
    assert code == 0, output
    report = json.loads((tmp_path / "found.json").read_text())
    assert report["version"] == facts.VERSION
    titles = [section["title"] for section in report["sections"]]
    assert len(titles) == len(report["sections"]) == 6
    found = {name: value for section in report["sections"][3:] for name, value, *_ in section["rows"]}
    assert "10 hand-offs: small 0-7, large 8-8" in found["routing"]
    assert "0 lost" in found["reuse"]
    assert "worker process" in found["a worker that dies"]
    assert float(found["resume alone: submission to first token"]) > 0
    blocks, charged = (report["sections"][i]["rows"][0] for i in (2, 3))
    assert blocks[0] == blocks[1]
    assert charged[-1] == "a block each, in turn"


def test_a_report_is_markdown_too(tmp_path: Path) -> None:
    assert run("--output", str(tmp_path / "found.md"))[0] == 0
    text = (tmp_path / "found.md").read_text()
    assert text.startswith(f"# TensorRT-LLM {facts.VERSION} beside")
    assert "| workers_named | that what Open MPI spawns" in text
    assert (
        run("--output", str(tmp_path / "found.txt"))[0] == run("--output", str(tmp_path / "found.md" / "a.md"))[0] == 2
    )


@pytest.mark.pins("reuse", "generated_stored", "equal_progress")
def test_two_copies_of_one_model_write_as_one_and_what_the_library_loses_is_a_problem() -> None:
    code, output = run(*SMALL, *UNUSED)
    assert code == 0, output
    assert "problem" not in output


def test_a_pool_that_is_smaller_than_asked_for_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_TENSORRT_LLM_POOL", "70")
    monkeypatch.setattr(Bench, "sections", lambda self: [self.blocks()])
    code, output = run(*SMALL, *UNUSED)
    assert (code, "70 KV blocks instead of" in output) == (1, True)


def test_what_does_not_load_is_told() -> None:
    code, output = run(*SMALL, *LARGE, "--without-gpu", "--history", "300")
    assert code == 1
    assert "handoff_ids" in output


def test_without_a_gpu_nothing_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_tensorrt_llm, "has_gpu", lambda: False)
    assert "generation skipped: there is no GPU" in run(*SMALL)[1]


def test_bad_options_are_refused() -> None:
    assert run(*SMALL * 3, "--without-gpu")[0] == 2
    assert "handoff-ids" in run(*SMALL, "--without-gpu", "--handoff-ids", "x")[1]


def test_problems_of_a_generation() -> None:
    result: Any = type("Result", (), {"tokens": [1], "handoffs": 0, "tokens_by_model": {"small": 1}})()
    alone: Any = type("Result", (), {"tokens": [2]})()
    problems = Outcome(result, alone, 3, 0, ("", 5.1)).problems(Settings((Path("a"),)))
    assert [text.split()[0] for text in problems] == ["1", "not", "KV", "two", "a"]
