"""What commands refuse, and the one place that says so.

CommandError
DtmcError, LoadError, LaunchError ...    each beside what raises it
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tokenrouter.errors import RouterError

REFUSED = 2
INTERRUPTED = 130


def complain(what: object) -> None:
    """Tells the user what is wrong, on stderr."""
    print(f"error: {what}", file=sys.stderr)


class CommandError(Exception):
    """Why a command cannot do what it was asked for; the message names the remedy."""


@contextmanager
def reported(*also: type[Exception]) -> Iterator[None]:
    """Around a command, as a decorator: ends it with one line and exit code 2 for what it refuses, 130 for Ctrl-C.

        @app.command()
        @reported(ValueError)
        def solve(...): ...

    Args:
        also: what is reported beside `CommandError`, `RouterError` and `OSError`.
    """
    refused: tuple[type[Exception], ...] = (CommandError, RouterError, OSError, *also)
    try:
        yield
    except BrokenPipeError:  # somebody's `| head`, which typer ends quietly
        raise
    except refused as exc:
        complain(exc)
        raise SystemExit(REFUSED) from exc
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
