"""The launcher's first response."""

from __future__ import annotations

from typing import Any

import pytest

from tools.launch.greeting import Refused, first_response


@pytest.mark.parametrize(
    ("fits", "asked"), [(400, [160]), (159, [160, 40]), (12, [160, 40, 10]), (1, [160, 40, 10, 1])]
)
def test_the_first_response_is_as_long_as_fits(fits: int, asked: list[int]) -> None:
    seen = []

    def generate(fields: dict[str, Any]) -> dict[str, Any]:
        seen.append(fields["max_tokens"])
        if fields["max_tokens"] > fits:
            raise Refused("too long")
        return {"text_output": "fine"}

    assert first_response(generate, "a prompt") == (asked[-1], {"text_output": "fine"})
    assert seen == asked


def test_what_never_fits_is_refused_and_other_failures_are_not_tried_again() -> None:
    def refuse(fields: dict[str, Any]) -> dict[str, Any]:
        raise Refused(f"{fields['max_tokens']} is too long")

    with pytest.raises(Refused, match=r"^1 is too long"):
        first_response(refuse, "a prompt")

    def fail(fields: dict[str, Any]) -> dict[str, Any]:
        raise ValueError(f"{fields['max_tokens']}: the engine failed")

    with pytest.raises(ValueError, match=r"^160: the engine failed"):
        first_response(fail, "a prompt")
