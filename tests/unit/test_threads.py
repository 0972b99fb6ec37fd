from __future__ import annotations

import os
from pathlib import Path

import pytest

from tokenrouter.engines.torch import threads

V1 = "4:memory:/x\n2:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n0::/\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        pytest.param("0::/\n", {}, 8, id="no-limit-files"),
        pytest.param("0::/\n", {"cpu.max": "max 100000\n"}, 8, id="v2-unlimited"),
        pytest.param("0::/\n", {"cpu.max": "200000 100000\n"}, 2, id="v2-in-a-container"),
        pytest.param("0::/a/b\n", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3, id="v2-parent-binds"),
        pytest.param(
            "0::/a/b\n", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "100000 100000"}, 1, id="v2-child-binds"
        ),
        pytest.param("0::/gone\n", {"cpu.max": "400000 100000"}, 4, id="v2-path-not-visible"),
        pytest.param("0::/\n", {"cpu.max": "50000 100000"}, 1, id="v2-half-a-core-is-one-thread"),
        pytest.param("0::/\n", {"cpu.max": "290000 100000"}, 2, id="v2-fractions-round-down"),
        pytest.param("0::/\n", {"cpu.max": "1600000 100000"}, 8, id="v2-quota-above-affinity"),
        pytest.param(
            V1,
            {"cpu/docker/abc/cpu.cfs_quota_us": "200000", "cpu/docker/abc/cpu.cfs_period_us": "100000"},
            2,
            id="v1",
        ),
        pytest.param(
            V1, {"cpu,cpuacct/cpu.cfs_quota_us": "300000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 3, id="v1-mount"
        ),
        pytest.param(
            V1, {"cpu/docker/abc/cpu.cfs_quota_us": "-1", "cpu/docker/abc/cpu.cfs_period_us": "100000"}, 8, id="v1-none"
        ),
        pytest.param(V1, {"unified/cpu.max": "500000 100000"}, 5, id="hybrid-v2"),
    ],
)
def test_granted_cores(tmp_path: Path, membership: str, files: dict[str, str], cores: int) -> None:
    root = write(tmp_path / "cgroup", {"marker": "", **files})
    file = tmp_path / "membership"
    file.write_text(membership)
    assert threads.granted_cores(root, file) == cores


def test_without_cgroups_the_affinity_counts(tmp_path: Path) -> None:
    assert threads.granted_cores(tmp_path / "none", tmp_path / "neither") == 8


@pytest.mark.parametrize(("engines", "each"), [(1, 8), (2, 4), (3, 2), (8, 1), (100, 1), (0, 8)])
def test_engines_share_the_cores(monkeypatch: pytest.MonkeyPatch, engines: int, each: int) -> None:
    monkeypatch.setattr(threads, "granted_cores", lambda: 8)
    assert threads.default_threads(engines) == each
    assert each * engines <= 8 or each == 1
