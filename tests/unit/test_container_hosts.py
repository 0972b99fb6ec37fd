"""The Helm chart's layout `hosts`, by the manifest that was rendered from it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import yaml

from tokenrouter.channel.address import DEFAULT_PORT, Address
from tokenrouter.channel.tls import TlsSettings
from tokenrouter.yaml_files import merged
from tools.build_repository.hosts import addresses, host_problems
from tools.build_repository.kv_budget import host_budgets
from tools.build_repository.spec import DeploymentSpec
from tools.container.manifest import HOSTS_MANIFEST

DOCUMENTS: list[dict[str, Any]] = [each for each in yaml.safe_load_all(HOSTS_MANIFEST.read_text("utf-8")) if each]
MODELS = ("large", "small")
ENTRY = "tokenrouter"


def only(kind: str, name: str = ENTRY) -> dict[str, Any]:
    (found,) = [each for each in DOCUMENTS if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


@pytest.fixture
def deployment() -> DeploymentSpec:
    """As the builder in the pods puts it together."""
    data = only("ConfigMap")["data"]
    content = merged(yaml.safe_load(data["deployment.yaml"]), yaml.safe_load(data["hosts.yaml"]))
    return msgspec.convert(content, DeploymentSpec, strict=False)


def container(kind: str, name: str) -> dict[str, Any]:
    (found,) = only(kind, name)["spec"]["template"]["spec"]["containers"]
    loaded: dict[str, Any] = found
    return loaded


def test_models_keep_their_order_and_each_is_found_by_its_service(deployment: DeploymentSpec) -> None:
    assert list(deployment.models) == ["small", "large"]
    assert list(host_problems(deployment)) == []
    assert deployment.entry.routed_orchestrators == only("Deployment")["spec"]["replicas"] == 2
    for name, address in addresses(deployment.models).items():
        found = Address.parse(address)
        service = only("Service", found.host.split(".")[0])["spec"]
        assert found == Address(f"{ENTRY}-{name}.default.svc", DEFAULT_PORT)
        assert {"name": "channel", "port": DEFAULT_PORT, "targetPort": "channel"} in service["ports"]
        labels = only("StatefulSet", f"{ENTRY}-{name}")["spec"]["template"]["metadata"]["labels"]
        assert service["selector"].items() <= labels.items()
        assert service["clusterIP"] == "None"
        assert deployment.models[name].listen == "0.0.0.0"


def test_every_pod_loads_its_own_and_has_its_own_certificate(deployment: DeploymentSpec) -> None:
    pods = [("Deployment", ENTRY, "tokenrouter,ensemble,tensorrt_llm_bls")]
    pods += [("StatefulSet", f"{ENTRY}-{name}", name) for name in MODELS]
    for kind, name, load in pods:
        triton = container(kind, name)
        assert f"--load={load}" in triton["args"]
        assert ("--openai" in triton["args"]) == (kind == "Deployment")
        mounts = {mount["name"]: mount["mountPath"] for mount in triton["volumeMounts"]}
        assert mounts["channel-tls"] == deployment.tls.folder == TlsSettings().folder
        volumes = {volume["name"]: volume for volume in only(kind, name)["spec"]["template"]["spec"]["volumes"]}
        certificate = only("Certificate", f"{name}-channel")["spec"]
        assert volumes["channel-tls"]["secret"]["secretName"] == certificate["secretName"] == f"{name}-channel"
        assert certificate["dnsNames"] == [f"{name}.default.svc"]
        assert {"server auth", "client auth"} <= set(certificate["usages"])
    assert deployment.tls.peers == tuple(only("Certificate", f"{ENTRY}-channel")["spec"]["dnsNames"])
    assert deployment.tls.mode == "mtls"


def test_gpus_are_the_models_and_one_of_each_is_served_once() -> None:
    assert "nvidia.com/gpu" not in str(container("Deployment", ENTRY)["resources"])
    gpus = {
        name: container("StatefulSet", f"{ENTRY}-{name}")["resources"]["limits"]["nvidia.com/gpu"] for name in MODELS
    }
    assert gpus == {"small": 1, "large": 2}
    assert {only("StatefulSet", f"{ENTRY}-{name}")["spec"]["replicas"] for name in MODELS} == {1}


def test_entries_are_replaced_one_by_one_without_one_more() -> None:
    """One more would find no KV left."""
    assert only("Deployment")["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert container("Deployment", ENTRY)["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_only_entries_may_call_models() -> None:
    models, entries = only("NetworkPolicy", f"{ENTRY}-models")["spec"], only("NetworkPolicy")["spec"]
    (rule,) = models["ingress"]
    assert rule["ports"] == [{"port": "channel"}]
    (peer,) = rule["from"]
    pods = only("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert peer["podSelector"]["matchLabels"].items() <= pods.items()
    assert entries["podSelector"]["matchLabels"].items() <= pods.items()
    for name in MODELS:
        labels = only("StatefulSet", f"{ENTRY}-{name}")["spec"]["template"]["metadata"]["labels"]
        assert models["podSelector"]["matchLabels"].items() <= labels.items()
        assert not entries["podSelector"]["matchLabels"].items() <= labels.items()
        assert not only("Service")["spec"]["selector"].items() <= labels.items()
    assert {"port": "channel"} in [port for rule in entries["egress"] for port in rule["ports"]]


def test_models_of_two_hosts_take_no_memory_from_each_other(
    deployment: DeploymentSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both call their first GPU 0, and mean two."""
    from tools.build_repository import kv_budget

    asked: list[list[str]] = []
    monkeypatch.setattr(kv_budget, "_budget_model", lambda name, model: name)
    monkeypatch.setattr(kv_budget, "compute", lambda models, memory: asked.append(models))
    host_budgets(deployment)
    assert asked == [["small"], ["large"]]
