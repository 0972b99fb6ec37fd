"""The demo pair on the torch engine: real tokens, prompts of the demo task."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from perf.compare.cells import Cell
from perf.compare.thresholds import ByInFlight
from perf.emulated.deployment import batching
from perf.load.requests import Load
from tokenrouter.checkpoint import load_tokenizer
from tokenrouter.errors import ConfigError
from tools.build_repository.build import write_repository
from tools.build_repository.spec import BatchingSpec, DeploymentSpec, load_spec
from tools.dtmc.profile import Profile, load_profile
from tools.load import read_prompts
from tools.profile.__main__ import main as measure_profile
from tools.tritonserver.server import TritonServer

ROOT = Path(__file__).resolve().parents[2]
PROFILES = ROOT / "perf" / "results" / "comparison_profiles"
"""Those that are shipped."""
POLICIES: Mapping[str, dict[str, Any]] = {
    # Thresholds with a good part of the tokens from the large model: where routing costs most.
    "citer": {"threshold": 0.9999},
    "r2r": {"threshold": 0.0003},
    "rstitch": {"threshold": 0.001},
    "collm": {"threshold": 0.015},
    "random": {"p": 0.3},
    "me": {"weights": {"small": 0.7, "large": 0.3}},
}
_MAX_TOKENS = 96
_PROFILE_S = 16.0


class DemoSetting:
    """Like `settings.EmulatedSetting`. Thresholds follow from profiles that are measured once.

    Args:
        kept: folder in which profiles that are not in `PROFILES` are kept, in one of its name.
        most: largest number in flight that will be measured.
        warm_up_s, seconds: see `Load`.
        models: model repository with the checkpoints.
    """

    policies, workloads, scale, real = tuple(POLICIES), ("demo",), 1, True

    def __init__(
        self, *, kept: Path, most: int, warm_up_s: float, seconds: float, models: Path = ROOT / "model_repository"
    ) -> None:
        self._kept, self._most, self._models = kept / PROFILES.name, most, models
        self._warm_up_s, self._seconds = warm_up_s, seconds
        self._profiles: dict[str, Profile] = {}
        tokenizer = load_tokenizer(models / "small" / "1")
        self._prompts = [list(tokenizer.encode(text).ids) for text in read_prompts()]

    def kind(self, cell: Cell) -> str:
        return f"{cell.policy} on the demo pair"

    def profile(self, cell: Cell) -> Profile:
        """Measured on this machine, with eager thresholds."""
        if cell.policy not in self._profiles:
            name = f"{cell.policy}.yaml"
            path = PROFILES / name if (PROFILES / name).is_file() else self._kept / name
            if not path.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                self._measure(cell, path)
            self._profiles[cell.policy] = load_profile(path)
        return self._profiles[cell.policy]

    def _measure(self, cell: Cell, path: Path) -> None:
        with (
            tempfile.TemporaryDirectory(prefix="tokenrouter-compare-") as folder,
            TritonServer(self.repository(Path(folder), cell, {}, self._most)) as server,
        ):
            measure_profile(
                server.metrics_url,
                path,
                seconds=_PROFILE_S,
                load=True,
                url=server.grpc_url,
                inflight=self._most,
                max_tokens=_MAX_TOKENS,
            )

    def repository(self, folder: Path, cell: Cell, thresholds: ByInFlight, most: int) -> Path:
        shutil.copytree(self._models, folder, dirs_exist_ok=True)
        spec = load_spec(ROOT / "configs" / "demo.yaml")
        profile = self.profile(cell) if thresholds else None
        write_repository(demo_spec(spec, cell.policy, thresholds, profile, most), folder)
        return folder

    def load(self, cell: Cell) -> Load:
        """Problems of the demo set in turn; responses end by themselves."""
        prompts = self._prompts
        return Load(
            cell.in_flight, lambda index: prompts[index % len(prompts)], _MAX_TOKENS, self._warm_up_s, self._seconds
        )

    def comparable(self, cell: Cell) -> bool:
        """Prompts and the rest of the machine are not in the profile."""
        return False


def demo_spec(
    spec: DeploymentSpec, policy: str, thresholds: ByInFlight, profile: Profile | None, most: int
) -> DeploymentSpec:
    """The demo deployment with another policy, other thresholds, and room for `most` requests.

    Raises:
        ConfigError: the policy has no parameters here.
    """
    if policy not in POLICIES:
        raise ConfigError(f"no policy {policy!r} for the demo pair; there are {', '.join(POLICIES)}")
    entry = msgspec.structs.replace(
        spec.entry, policy=policy, policy_params=POLICIES[policy], max_inflight=most, aliases={}
    )
    models = {
        name: msgspec.structs.replace(
            model, batching=BatchingSpec(**(batching(name, thresholds, profile, most) if profile else {}))
        )
        for name, model in spec.models.items()
    }
    return msgspec.structs.replace(spec, entry=entry, models=models)
