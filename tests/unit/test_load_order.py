"""Order of loads between processes that start at any time; real locks, and waits that are bounded."""

from __future__ import annotations

import multiprocessing
import threading
import time
from pathlib import Path

import pytest

from tests.support.waiting import until
from tokenrouter.channel.unix import socket_path
from tokenrouter.triton.load_order import turn_to_load

BOUND_S = 20.0


class Loader(threading.Thread):
    """A model that loads until it is told to end."""

    def __init__(self, model: str, after: list[str], directory: Path, trace: list[str], patience_s: float) -> None:
        super().__init__(daemon=True)
        self.model, self.after, self.directory, self.trace, self.patience_s = model, after, directory, trace, patience_s
        self.begun, self.may_end = threading.Event(), threading.Event()

    def run(self) -> None:
        with turn_to_load(self.model, self.after, self.directory, patience_s=self.patience_s):
            socket_path(self.directory, self.model).touch()
            self.trace.append(f"{self.model} begins")
            self.begun.set()
            assert self.may_end.wait(BOUND_S)
            self.trace.append(f"{self.model} ends")

    def end(self) -> None:
        self.may_end.set()
        self.join(BOUND_S)
        assert not self.is_alive()


@pytest.fixture
def models(tmp_path: Path) -> dict[str, Loader]:
    trace: list[str] = []
    orders = {"large": [], "medium": ["large"], "small": ["large", "medium"]}
    return {name: Loader(name, after, tmp_path, trace, BOUND_S) for name, after in orders.items()}


def test_models_that_start_together_load_in_order(models: dict[str, Loader]) -> None:
    for name in ("small", "medium", "large"):
        models[name].start()
    for name in ("large", "medium", "small"):
        assert models[name].begun.wait(BOUND_S)
        others = [other for other in models.values() if other.begun.is_set() and other.is_alive()]
        assert others == [models[name]], "two load at once"
        models[name].end()
    ends = [f"{name} {what}" for name in ("large", "medium", "small") for what in ("begins", "ends")]
    assert models["small"].trace == ends


def test_a_model_that_never_begins_is_not_waited_for_long(
    models: dict[str, Loader], caplog: pytest.LogCaptureFixture
) -> None:
    small = models["small"]
    small.patience_s = 0.1
    small.start()
    assert small.begun.wait(BOUND_S)
    small.end()
    assert "small loads before large, which has not begun to load" in caplog.text
    assert "small loads before medium" in caplog.text


def test_a_model_that_has_loaded_is_not_waited_for(models: dict[str, Loader]) -> None:
    models["large"].start()
    models["large"].end()
    models["medium"].start()
    assert models["medium"].begun.wait(BOUND_S)
    models["medium"].end()


def fail_to_load(waiting: Loader, directory: Path) -> None:
    with turn_to_load("large", [], directory):
        socket_path(directory, "large").touch()
        waiting.start()
        assert not waiting.begun.wait(0.2)
        raise MemoryError


def test_a_failed_load_lets_the_next_one_go_on_and_leaves_no_file(models: dict[str, Loader], tmp_path: Path) -> None:
    with pytest.raises(MemoryError):
        fail_to_load(models["medium"], tmp_path)
    assert models["medium"].begun.wait(BOUND_S)
    models["medium"].end()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large.sock", "medium.sock"]


def _load_for_ever(directory: Path) -> None:
    with turn_to_load("large", [], directory):
        socket_path(directory, "large").touch()
        time.sleep(BOUND_S)


def test_a_killed_process_holds_nobody_up(models: dict[str, Loader], tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_load_for_ever, args=(tmp_path,))
    process.start()
    try:
        until(socket_path(tmp_path, "large").exists, what="the process loads")
        models["medium"].start()
        assert not models["medium"].begun.wait(1.0)
    finally:
        process.kill()
        process.join(BOUND_S)
    assert models["medium"].begun.wait(BOUND_S)
    models["medium"].end()
