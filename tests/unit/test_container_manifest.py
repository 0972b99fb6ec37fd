"""The Helm chart, by the manifest that was rendered from it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from tools.build_repository.spec import DeploymentSpec
from tools.container.manifest import CHART, MANIFEST, ROOT, WRITTEN, header, render

DOCUMENTS: list[dict[str, Any]] = [
    document for document in yaml.safe_load_all(MANIFEST.read_text("utf-8")) if document is not None
]
PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002, "supervisor": 8003, "openai": 9000}


def only(kind: str, name: str = "tokenrouter") -> dict[str, Any]:
    (found,) = [each for each in DOCUMENTS if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


@pytest.fixture
def deployment() -> DeploymentSpec:
    """The TokenRouter deployment, not the Kubernetes one."""
    text = only("ConfigMap")["data"]["deployment.yaml"]
    return msgspec.convert(yaml.safe_load(text), DeploymentSpec, strict=False)


@pytest.fixture
def pod() -> dict[str, Any]:
    template: dict[str, Any] = only("Deployment")["spec"]["template"]
    return template


@pytest.fixture
def triton(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["spec"]["containers"]
    loaded: dict[str, Any] = container
    return loaded


@pytest.mark.parametrize("path", WRITTEN.values(), ids=lambda path: path.name)
def test_manifest_was_rendered_from_this_chart(path: Path) -> None:
    assert path.read_text("utf-8").startswith(header()), "run python -m tools.container.manifest (needs helm)"


@pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")
def test_helm_renders_the_manifests() -> None:
    assert render() == {path: path.read_text("utf-8") for path in WRITTEN.values()}


def test_schema_of_values_knows_exactly_the_values() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    schema = yaml.safe_load((CHART / "values.schema.json").read_text("utf-8"))
    assert {*schema["properties"]} == {*values, "global"}


def test_versions_are_the_projects() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    version = (ROOT / "backends/tokenrouter_python/tokenrouter/__init__.py").read_text("utf-8").split('"')[-2]
    assert chart["appVersion"] == chart["version"] == version
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    assert f"ARG TRITON_RELEASE={values['image']['tag']}\n" in (ROOT / "Dockerfile").read_text("utf-8")


def test_gpus_are_those_that_the_models_name(deployment: DeploymentSpec, triton: dict[str, Any]) -> None:
    highest = max(index for model in deployment.models.values() for index in model.gpus)
    assert triton["resources"]["limits"]["nvidia.com/gpu"] == highest + 1 == 2


def test_every_model_has_a_name_that_leads_to_the_pod(deployment: DeploymentSpec, pod: dict[str, Any]) -> None:
    for name in deployment.models:
        service = only("Service", f"tokenrouter-{name}")["spec"]
        assert service["clusterIP"] == "None"
        assert service["selector"].items() <= pod["metadata"]["labels"].items()
        assert service["selector"][f"tokenrouter/model.{name}"] == "true"
    assert len(deployment.models) == len([each for each in DOCUMENTS if each["kind"] == "Service"]) - 1


def test_selectors_and_ports_fit(pod: dict[str, Any], triton: dict[str, Any]) -> None:
    assert {port["name"]: port["containerPort"] for port in triton["ports"]} == PORTS
    service = only("Service")["spec"]
    assert {port["name"]: port["port"] for port in service["ports"]} == PORTS
    assert {port["targetPort"] for port in service["ports"]} == PORTS.keys()
    labels = pod["metadata"]["labels"].items()
    assert service["selector"].items() <= labels
    assert only("Deployment")["spec"]["selector"]["matchLabels"].items() <= labels
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(PORTS["metrics"])


def test_grace_period_covers_what_running_requests_may_take(pod: dict[str, Any], triton: dict[str, Any]) -> None:
    environment = {entry["name"]: entry["value"] for entry in triton["env"]}
    drain = int(triton["lifecycle"]["preStop"]["exec"]["command"][1])
    # Triton looks once a second whether its models have ended, and then needs some time itself.
    needed = drain + int(environment["TOKENROUTER_EXIT_TIMEOUT_S"]) + 10
    assert pod["spec"]["terminationGracePeriodSeconds"] >= needed


def test_loading_may_take_half_an_hour_and_only_then_probes_count(triton: dict[str, Any]) -> None:
    startup = triton["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 1800
    assert "--ready-timeout=1800" in triton["args"], "the supervisor must not give up before"
    probes = {kind: triton[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")}
    assert {kind: probe["path"] for kind, probe in probes.items()} == {
        "startup": "/readyz",
        "readiness": "/readyz",
        "liveness": "/healthz",
    }
    assert {probe["port"] for probe in probes.values()} == {"supervisor"}


def test_least_privilege(pod: dict[str, Any]) -> None:
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    for container in (*spec["initContainers"], *spec["containers"]):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_only_the_init_container_writes_the_repository(pod: dict[str, Any], triton: dict[str, Any]) -> None:
    (build,) = pod["spec"]["initContainers"]
    mounts = {mount["mountPath"]: mount for mount in triton["volumeMounts"]}
    assert mounts["/models"]["readOnly"] is True
    assert mounts["/checkpoints"]["readOnly"] is True
    assert {"name": "models", "mountPath": "/models"} in build["volumeMounts"]
    config = build["command"][build["command"].index("--config") + 1]
    # Beside the other deployments, so that what they name by relative paths (profiles) is found.
    assert f"/opt/tokenrouter/{config}".startswith(f"{build['volumeMounts'][0]['mountPath']}/")
    assert build["command"][:3] == ["python3", "-m", "tools.build_repository"]


def test_volumes_are_there_and_shared_memory_is_memory(pod: dict[str, Any]) -> None:
    spec = pod["spec"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    used = {mount["name"] for each in (*spec["initContainers"], *spec["containers"]) for mount in each["volumeMounts"]}
    assert used == volumes.keys()
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "4Gi"}
