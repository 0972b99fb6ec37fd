from __future__ import annotations

import os
import subprocess
import sys
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

MODELS = Path(__file__).parents[2] / "model_repository"
PAIR = ["--model", str(MODELS / "small" / "1"), "--model", str(MODELS / "large" / "1")]
UNUSED = ["--handoff-ids", "257,261", "--without-gpu"]

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
        command, env=environment, cwd=MODELS.parent, capture_output=True, text=True, timeout=100, check=False
    )
    return result.returncode, result.stdout


def test_without_tensorrt_llm_it_says_so() -> None:
    code, output = run_apart(None)
    assert code == 2
    assert "tensorrt_llm is not installed here" in output


def test_a_package_that_does_not_import_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "tensorrt_llm").mkdir()
    (tmp_path / "tensorrt_llm" / "__init__.py").write_text("raise OSError('libnvinfer.so.10 is not there')")
    code, output = run_apart(tmp_path)
    assert code == 2
    assert "cannot be imported: OSError: libnvinfer" in output


def test_the_double_is_as_the_table_says() -> None:
    assert [each for each in compare() if each.problem or each.missing or each.new or each.changed] == []
    code, output = run()
    assert code == 0
    assert "generation skipped: no --model" in output
    assert "BROKEN" not in output


def test_a_missing_essential_field_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(llmapi.KvCacheConfig.model_fields, "tokens_per_block")
    found = finding("tensorrt_llm.llmapi.KvCacheConfig")
    assert found.missing == found.essential == ("tokens_per_block",)
    code, output = run(*PAIR)
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
    assert code == 0
    assert "differs" in output


def test_an_argument_of_generate_async_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate_async(self: Any, inputs: Any, sampling_params: Any = None, streaming: bool = False) -> None: ...

    monkeypatch.setattr(tensorrt_llm.LLM, "generate_async", generate_async)
    assert finding("tensorrt_llm.LLM.generate_async").essential == ("kv_cache_retention_config", "cache_salt")


def test_a_processor_with_another_number_of_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    def four(self: Any, req_id: int, logits: Any, token_ids: Any, stream_ptr: Any) -> None: ...

    def renamed(self: Any, request: int, logits: Any, tokens: Any, stream_ptr: Any, client_id: Any) -> None: ...

    path = "tensorrt_llm.sampling_params.LogitsProcessor.__call__"
    monkeypatch.setattr(sampling_params.LogitsProcessor, "__call__", four)
    assert "takes 4 positional arguments, not 5" in finding(path).essential[0]
    monkeypatch.setattr(sampling_params.LogitsProcessor, "__call__", renamed)
    assert finding(path).essential == ()


def test_a_method_that_is_no_coroutine_and_a_class_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llmapi.RequestOutput, "__anext__", lambda self: None)
    monkeypatch.delattr(llmapi, "CudaGraphConfig")
    assert finding("tensorrt_llm.llmapi.RequestOutput.__anext__").essential == ("not a coroutine function",)
    assert finding("tensorrt_llm.llmapi.CudaGraphConfig").essential[0].startswith("not there")


def test_bindings_are_read_from_their_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    class Binding:
        """Like a class of a C++ extension: no signature, but a text."""

        __signature__ = "none"

        def __init__(self, *args: Any) -> None:
            """__init__(self, token_range_retention_configs: collections.abc.Sequence[X], priority: int = 35) -> None"""

    monkeypatch.setattr(llmapi, "KvCacheRetentionConfig", Binding)
    monkeypatch.setattr("inspect.signature", fail_for(Binding))
    found = finding("tensorrt_llm.llmapi.KvCacheRetentionConfig")
    assert found.new == ("priority",)
    assert found.essential == ("decode_retention_priority",)


def fail_for(cls: type) -> Any:
    import inspect

    signature = inspect.signature

    def guarded(found: Any) -> Any:
        if found is cls:
            raise ValueError("no signature found for builtin type")
        return signature(found)

    return guarded


def test_twenty_routed_tokens() -> None:
    code, output = run(*PAIR, *UNUSED)
    assert code == 0, output
    assert "10 hand-offs: small 0-7, large 8-8" in output
    assert "0 lost" in output


def test_two_copies_of_one_model_write_what_it_writes_alone() -> None:
    code, output = run(*PAIR[:2], *UNUSED)
    assert code == 0, output
    assert "problem" not in output


@pytest.mark.pins("reuse", "generated_stored")
def test_a_lost_cache_is_a_problem() -> None:
    code, output = run(*PAIR[:2], *UNUSED)
    assert code == 0, output


def test_what_does_not_load_is_told() -> None:
    code, output = run(*PAIR, "--without-gpu")
    assert code == 1
    assert "handoff_ids" in output


def test_without_a_gpu_nothing_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_tensorrt_llm, "has_gpu", lambda: False)
    assert "generation skipped: there is no GPU" in run(*PAIR)[1]


def test_bad_options_are_refused() -> None:
    assert run(*PAIR, *PAIR, "--without-gpu")[0] == 2
    assert "handoff-ids" in run(*PAIR, "--without-gpu", "--handoff-ids", "x")[1]


def test_problems_of_a_generation() -> None:
    result: Any = type("Result", (), {"tokens": [1], "handoffs": 0, "tokens_by_model": {"small": 1}})()
    alone: Any = type("Result", (), {"tokens": [2]})()
    problems = Outcome(result, alone, 3, 0).problems(Settings((Path("a"),)))
    assert [text.split()[0] for text in problems] == ["1", "not", "KV", "two"]
