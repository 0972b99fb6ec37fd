"""The example of an autoscaler: its target, its signals, and the rules that serve them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILE = ROOT / "configs" / "monitoring" / "hpa.yaml"
HPA: dict[str, Any] = yaml.safe_load(FILE.read_text("utf-8"))
RULES = yaml.safe_load((FILE.parent / "hpa_adapter.yaml").read_text("utf-8"))["rules"]["custom"]
NAMES = [metric["pods"]["metric"]["name"] for metric in HPA["spec"]["metrics"]]


def test_it_scales_the_deployment_of_the_manifest() -> None:
    documents = yaml.safe_load_all((ROOT / "configs" / "deploy" / "kubernetes.yaml").read_text("utf-8"))
    (deployment,) = [each for each in documents if each and each["kind"] == "Deployment"]
    target = HPA["spec"]["scaleTargetRef"]
    assert (HPA["apiVersion"], HPA["kind"]) == ("autoscaling/v2", "HorizontalPodAutoscaler")
    assert target == {
        "apiVersion": deployment["apiVersion"],
        "kind": deployment["kind"],
        "name": deployment["metadata"]["name"],
    }
    assert 1 <= HPA["spec"]["minReplicas"] < HPA["spec"]["maxReplicas"]


def test_its_signals_are_published_and_served() -> None:
    listed = set(re.findall(r"`(tokenrouter_\w+)", (ROOT / "docs" / "metrics.md").read_text("utf-8")))
    served = [re.match(r"\w+", rule["seriesQuery"]) for rule in RULES]
    assert set(NAMES) <= listed
    assert [match and match[0] for match in served] == NAMES
    for metric in HPA["spec"]["metrics"]:
        assert metric["type"] == "Pods"
        assert metric["pods"]["target"]["type"] == "AverageValue"
        assert int(metric["pods"]["target"]["averageValue"]) >= 1
    for rule in RULES:
        assert set(rule["resources"]["overrides"]) == {"namespace", "pod"}


@pytest.mark.skipif(shutil.which("kubernetes-validate") is None, reason="kubernetes-validate (PyPI) is not installed")
def test_it_is_valid_for_kubernetes() -> None:
    for version in ("1.25", "1.31"):
        subprocess.run(["kubernetes-validate", "--kubernetes-version", version, "--strict", FILE], check=True)
