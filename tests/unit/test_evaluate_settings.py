"""How `tools.evaluate --policy` is read."""

from __future__ import annotations

from typing import Any

import pytest

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
