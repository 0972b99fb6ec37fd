"""Entry point of ``python -m tools.dtmc``."""

from tools.dtmc.cli import app

app(prog_name="python -m tools.dtmc")
