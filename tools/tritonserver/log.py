"""What a server's log tells."""

from __future__ import annotations

import re

_LOADED = re.compile(r"successfully loaded '([^']+)'")
_COMPLAINT = re.compile(r"^E\d|error: |unrecognized option")
_FAILURES = (
    re.compile(r"failed to load '(?P<model>[^']+)' version \d+: (?P<reason>.*)"),
    re.compile(r"Poll failed for model directory '(?P<model>[^']+)': (?P<reason>.*)"),
    re.compile(r"failed to load model '(?P<model>[^']+)': (?P<reason>.*)"),
)
_LAST_LINES = 15


def loaded_models(log: str) -> list[str]:
    """Models that have been loaded, in order."""
    return list(dict.fromkeys(_LOADED.findall(log)))


def model_errors(log: str) -> dict[str, str]:
    """Why models failed to load, by model."""
    errors: dict[str, str] = {}
    for pattern in _FAILURES:
        for found in pattern.finditer(log):
            reason = found["reason"].strip().removesuffix('"').replace("\\n", "\n").replace('\\"', '"')
            errors.setdefault(found["model"], reason.strip())
    return errors


def explanation(log: str, what: str) -> str:
    """Why the server is not ready: the models' own errors if there are any, else the complaints or the end."""
    if errors := model_errors(log):
        return "\n".join(f"model {name!r} does not load: {error}" for name, error in errors.items())
    lines = log.splitlines()
    complaints = [line for line in lines if _COMPLAINT.search(line)]
    return f"{what}; from its log:\n" + "\n".join(complaints or lines[-_LAST_LINES:])
