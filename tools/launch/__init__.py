"""`python -m tools.launch`, what `make serve` calls: serves a model repository, and brings back what dies.

`decisions` says what to do about a death (pure); `supervisor` does it: `watch` tells it of deaths. `health` tells the
world; `follower` copies the log; `greeting` is the first response. What it does for users: docs/reliability.md.
"""
