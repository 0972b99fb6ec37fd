"""How the commands of perf are run: typer, with options that take several values (`--inflight 1 2 4`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

from tools.errors import reported


class _SeveralValues(TyperCommand):
    """Options that may be repeated take several values at once too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        several = {
            name for parameter in self.params if getattr(parameter, "multiple", False) for name in parameter.opts
        }
        repeated: list[str] = []
        name = ""
        for arg in args:
            if arg.startswith("--"):
                name = arg if arg in several else ""
            elif name and repeated[-1] != name:
                repeated.append(name)
            repeated.append(arg)
        return super().parse_args(ctx, repeated)


def application(main: Callable[..., None], *refused: type[Exception]) -> typer.Typer:
    """A function as the command of its module, whose docstring is the help."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    paragraphs = (main.__globals__["__doc__"] or "").strip().split("\n\n")
    # \b keeps the lines of a paragraph as they are.
    app.command(cls=_SeveralValues, help="\n\n".join(f"\b\n{text}" for text in paragraphs))(reported(*refused)(main))
    return app


def run(main: Callable[..., None], *refused: type[Exception]) -> None:
    """Runs it. What `tools.errors.reported` reports, and `refused`, end it with one line and exit code 2."""
    application(main, *refused)()
