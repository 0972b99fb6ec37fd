from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from perf.load.perf_analyzer.inputs import tensors
from perf.load.perf_analyzer.summary import rows, timing
from perf.load.soak.clients import Workload
from perf.load.table import markdown
from perf.load.timing import Timing, percentiles_ms, summary
from perf.rows import append_rows, write_rows


def finished(started: float, *arrivals: tuple[float, int], error: str = "") -> Timing:
    result = Timing(started=started, finish_reason="stop", error=error)
    for at, tokens in arrivals:
        result.add(tokens, at)
    return result


# --- timing ----------------------------------------------------------------------------------------------------------


def test_a_response_is_timed_by_its_tokens_not_by_its_messages() -> None:
    response = finished(10.0, (10.5, 2), (10.6, 1), (11.0, 3), (11.1, 0))
    assert response.tokens == 6
    assert response.time_to_first_token_s == pytest.approx(0.5)
    assert response.inter_token_s == pytest.approx(0.5 / 4)
    assert response.longest_gap_s == pytest.approx(0.4)
    assert response.latency_s == pytest.approx(1.0)


def test_one_message_has_no_inter_token_time_and_none_has_no_times() -> None:
    assert math.isnan(finished(0.0, (1.0, 5)).inter_token_s)
    assert math.isnan(finished(0.0).time_to_first_token_s)
    assert math.isnan(percentiles_ms([math.nan])["p50"])


def test_a_summary_counts_errors_apart_and_gives_milliseconds() -> None:
    responses = [finished(float(i), (i + 0.1 * (i + 1), 1), (i + 1.0, 9)) for i in range(4)]
    row = summary([*responses, finished(0.0, (9.0, 100), error="UNAVAILABLE: full")])
    assert (row["requests"], row["errors"], row["seconds"]) == (4, 1, 4.0)
    assert row["tokens_per_second"] == 10.0
    assert row["time_to_first_token_ms.p50"] == pytest.approx(250.0)
    assert row["latency_ms.mean"] == pytest.approx(1000.0)


# --- files -----------------------------------------------------------------------------------------------------------


def test_rows_are_added_to_a_table_with_the_same_columns_only(tmp_path: Path) -> None:
    path = tmp_path / "new" / "table.csv"
    for number in (1, 2):
        append_rows(path, [{"a": number, "b": ""}])
    assert path.read_text() == "a,b\n1,\n2,\n"
    with pytest.raises(ValueError, match="other columns: a, b"):
        append_rows(path, [{"a": 1}])
    write_rows(path, [{"a": 3}])
    assert path.read_text() == "a\n3\n"


# --- perf_analyzer ---------------------------------------------------------------------------------------------------


def test_inputs_hold_every_tensor_as_a_list() -> None:
    document = tensors(["x", "y"], {"max_tokens": 5, "stop_words": ["a", "b"]})
    assert document == {
        "data": [
            {"text_input": ["x"], "max_tokens": [5], "stop_words": ["a", "b"]},
            {"text_input": ["y"], "max_tokens": [5], "stop_words": ["a", "b"]},
        ]
    }
    with pytest.raises(ValueError, match="max_token"):
        tensors(["x"], {"max_token": 5})


def recorded(*responses: tuple[int, Any, str]) -> dict[str, Any]:
    """A request of a profile export, begun at 1 s; responses by (ns after, output_ids, finish_reason)."""
    return {
        "timestamp": 1_000_000_000,
        "response_timestamps": [1_000_000_000 + ns for ns, *_ in responses],
        "response_outputs": [
            {"output_ids": ids, "finish_reason": reason, "text_output": ""} for _, ids, reason in responses
        ],
    }


def test_a_profile_export_gives_times_of_tokens(tmp_path: Path) -> None:
    request = recorded((5_000_000, 17, ""), (9_000_000, [1, 2, 3], ""), (11_000_000, 256, "stop"), (12_000_000, "", ""))
    response = timing(request)
    assert (response.tokens, response.finish_reason, response.error) == (5, "stop", "")
    assert response.time_to_first_token_s == pytest.approx(0.005)
    assert response.inter_token_s == pytest.approx(0.0015)
    cut = recorded((5_000_000, 17, ""))
    export = {"experiments": [{"experiment": {"mode": "concurrency", "value": 4}, "requests": [request, cut]}]}
    path = tmp_path / "concurrency_4.json"
    path.write_text(json.dumps(export))
    (row,) = rows(path)
    assert (row["in_flight"], row["loop"], row["requests"], row["errors"]) == (4, "closed", 1, 1)
    assert markdown([row]).count("\n") == 2


# --- soak ------------------------------------------------------------------------------------------------------------


def test_a_workload_takes_prompts_policies_and_cancels_in_turn() -> None:
    load = Workload(["first prompt", "second prompt"], policies=("", "random"), cancel_every=3)
    assert [b"second prompt" in load.request(i) for i in range(4)] == [False, True, False, True]
    assert [b"random" in load.request(i) for i in range(4)] == [False, True, False, True]
    assert [load.cancels_after(i) for i in range(7)] == [1, 0, 0, 2, 0, 0, 3]
    assert not any(Workload(["x"]).cancels_after(i) for i in range(9))
