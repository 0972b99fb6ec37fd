"""The two settings: emulated engines by the reference file, and the demo pair."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TypeAlias

from perf.compare.cells import Cell
from perf.compare.demo import DemoSetting
from perf.compare.thresholds import ByInFlight
from perf.compare.workloads import Reference, Workload, load_reference
from perf.emulated.deployment import EmulatedDeployment, Thresholds
from perf.load.requests import Load, random_prompts
from tools.dtmc.profile import Profile


class Engine(str, Enum):
    EMULATED = "emulated"
    TORCH = "torch"


# Token ids of printable ASCII: text of other bytes is held back until its characters are complete.
_PRINTABLE = 94


class EmulatedSetting:
    """Engines and requests of a comparison: step times, rates and lengths of the reference file; all else is real.

    Args:
        reference: workloads, policies, step times.
        scale: prompts and responses are so many times shorter.
        warm_up_s, seconds: see `Load`.
    """

    real = False

    def __init__(self, reference: Reference, *, scale: int, warm_up_s: float, seconds: float) -> None:
        self.policies, self.workloads = tuple(reference.policies), tuple(reference.workloads)
        self._reference, self.scale = reference, scale
        self._warm_up_s, self._seconds = warm_up_s, seconds

    def _workload(self, cell: Cell) -> Workload:
        return self._reference.workload(cell.workload)

    def kind(self, cell: Cell) -> str:
        """Cells of one kind share models, step times and routing; tuned thresholds are kept under this name."""
        return f"{cell.policy} with prefill" if self._workload(cell).prefill else cell.policy

    def profile(self, cell: Cell) -> Profile:
        """Step times and routing, as far as they are known."""
        return self._reference.profile(cell.policy, prefill=self._workload(cell).prefill)

    def repository(self, folder: Path, cell: Cell, thresholds: ByInFlight, most: int) -> Path:
        """Writes a model repository for cells of this kind, with up to `most` in flight; returns the folder."""
        return EmulatedDeployment(self.profile(cell), cell.policy, most, Thresholds("", thresholds)).write(folder)

    def load(self, cell: Cell) -> Load:
        workload = self._workload(cell).scaled(self.scale)
        prompts = random_prompts(workload.prompt_tokens, _PRINTABLE)
        return Load(cell.in_flight, prompts, workload.response_tokens, self._warm_up_s, self._seconds)

    def comparable(self, cell: Cell) -> bool:
        """Whether the profile says all about step times, so that the exact models hold; they know no prompts."""
        return not self._workload(cell).prefill


Setting: TypeAlias = EmulatedSetting | DemoSetting


def setting_of(engine: Engine, *, kept: Path, most: int, scale: int, warm_up_s: float, seconds: float) -> Setting:
    """The setting of an engine; `most` is the largest number in flight that will be measured, `kept` see there."""
    if engine is Engine.TORCH:
        return DemoSetting(kept=kept, most=most, warm_up_s=warm_up_s, seconds=seconds)
    return EmulatedSetting(load_reference(), scale=scale, warm_up_s=warm_up_s, seconds=seconds)
