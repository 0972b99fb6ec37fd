"""Emulated engines with the step times, rates and lengths of the reference file; everything else is real."""

from __future__ import annotations

from pathlib import Path

from perf.compare.cells import Cell
from perf.compare.measure import ByInFlight
from perf.compare.repository import write_repository
from perf.compare.workloads import Reference, Workload
from perf.load.requests import Load, random_prompts
from tools.dtmc.profile import Profile

# Token ids of printable ASCII: text of other bytes is held back until its characters are complete.
_PRINTABLE = 94


class EmulatedSetting:
    """See `measure.Setting`.

    Args:
        reference: workloads, policies, step times.
        scale: prompts and responses are so many times shorter.
        warm_up_s, seconds: see `Load`.
    """

    def __init__(self, reference: Reference, *, scale: int, warm_up_s: float, seconds: float) -> None:
        self._reference = reference
        self._scale = scale
        self._warm_up_s = warm_up_s
        self._seconds = seconds

    def _workload(self, cell: Cell) -> Workload:
        return self._reference.workloads[cell.workload]

    def kind(self, cell: Cell) -> str:
        """Policy, and whether prompts cost time."""
        return f"{cell.policy} with prefill" if self._workload(cell).prefill else cell.policy

    def profile(self, cell: Cell) -> Profile:
        """From the file."""
        return self._reference.profile(cell.policy, prefill=self._workload(cell).prefill)

    def repository(self, folder: Path, cell: Cell, thresholds: ByInFlight, most: int) -> Path:
        """Emulated models with signals at the policy's rates."""
        routing = self._reference.policies[cell.policy]
        return write_repository(folder, cell.policy, routing, self.profile(cell), thresholds, most=most)

    def load(self, cell: Cell) -> Load:
        """Random prompts."""
        workload = self._workload(cell).scaled(self._scale)
        prompts = random_prompts(workload.prompt_tokens, _PRINTABLE)
        return Load(cell.in_flight, prompts, workload.response_tokens, self._warm_up_s, self._seconds)

    def comparable(self, cell: Cell) -> bool:
        """The exact models know no prompts."""
        return not self._workload(cell).prefill
