"""How `tools.evaluate` reads policies and problems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools.demo_models.task import load_problems
from tools.errors import CommandError
from tools.evaluate import parse_setting


@pytest.mark.parametrize(
    ("text", "policy", "params"),
    [
        ("r2r", "r2r", {}),
        ("rstitch:threshold=0.02", "rstitch", {"threshold": 0.02}),
        ("me:weights=[0.7,0.3]", "me", {"weights": [0.7, 0.3]}),
        (
            "glimprouter:threshold=1,separator==,think_end=####",
            "glimprouter",
            {"threshold": 1, "separator": "=", "think_end": "####"},
        ),
        ('glimprouter:separator="\\n"', "glimprouter", {"separator": "\n"}),
        ("query_level:router=classifier", "query_level", {"router": "classifier"}),
    ],
)
def test_settings(text: str, policy: str, params: dict[str, Any]) -> None:
    setting = parse_setting(text)
    assert (setting.label, setting.policy, setting.params) == (text, policy, params)


def test_an_answer_may_be_a_number(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text('{"prompt": "a", "answer": 59}\n{"prompt": "b", "answer": "59"}\n', "utf-8-sig")
    assert [problem.answer for problem in load_problems(path)] == ["59", "59"]


@pytest.mark.parametrize("answer", ["true", "null", "[59]", "{}"])
def test_an_answer_of_another_type_is_refused_with_its_line(tmp_path: Path, answer: str) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(f'{{"prompt": "a", "answer": "1"}}\n{{"prompt": "b", "answer": {answer}}}\n')
    with pytest.raises(CommandError, match=r"problems\.jsonl:2: .*Expected `str`, got .* at `\$\.answer`"):
        load_problems(path)
