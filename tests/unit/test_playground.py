"""What the playground offers, and what it is made of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tokenrouter.openai_api import playground
from tokenrouter.openai_api.app import Settings, create_app
from tokenrouter.openai_api.deployment import Deployment
from tokenrouter.policies import BUILTIN

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path(playground.__file__).parent / "page"


@pytest.fixture(scope="module")
def deployment() -> Deployment:
    return Deployment(ROOT / "model_repository")


def test_every_policy_comes_with_its_knobs(deployment: Deployment) -> None:
    described = playground.describe(deployment)
    assert (described.entry, described.models, described.policy) == ("tokenrouter", ["small", "large"], "rstitch")
    knobs = {policy.name: policy.parameters for policy in described.policies}
    assert set(knobs) == set(BUILTIN)
    assert knobs["random"] == {"p": {"type": "number", "default": 0.5}}


def test_the_page_asks_nobody_else() -> None:
    for path in PAGE.iterdir():
        text = path.read_text("utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "").replace("http://HOST:PORT", "")
        assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), path


def test_the_wheel_has_the_page() -> None:
    assert f'"{playground.__name__}" = ["page/*"]' in (ROOT / "pyproject.toml").read_text("utf-8")


@pytest.mark.parametrize("path", ["/playground/../app.py", "/playground/%2e%2e%2fapp.py", "/playground/nothing.js"])
def test_it_gives_out_its_own_files_alone(deployment: Deployment, path: str) -> None:
    with TestClient(create_app(deployment, Settings("127.0.0.1:1"))) as client:
        assert client.get(path).status_code == 404
        assert "default-src 'none'" in client.get("/").headers["content-security-policy"]


def test_it_can_be_turned_off(deployment: Deployment) -> None:
    with TestClient(create_app(deployment, Settings("127.0.0.1:1", playground=False))) as client:
        assert client.get("/").status_code == 404
