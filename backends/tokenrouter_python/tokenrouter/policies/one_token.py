"""What R2R, CITER, Co-LLM and the random baseline share: the small model leads, the large one writes single tokens."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from tokenrouter.errors import ConfigError, InvalidRequest
from tokenrouter.policies.base import Destinations, Handoff, Policy, RouteBatch, Row, Visit
from tokenrouter.policies.checkpoints import cached, default_checkpoint, listed, resolve

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


class OneToken(Policy):
    """The small model's token is discarded at a trigger; the large model writes exactly one token in its place."""

    two_models: ClassVar[bool] = True

    def receive(self, row: Row) -> Visit:
        """One token at the large model, no limit at the small one."""
        return Visit(limit=1, then=self.models[0]) if row.model == self.models[1] else Visit()

    def decides(self, model: str) -> bool:
        """At the small model only."""
        return model == self.models[0]

    def speculates(self) -> bool:
        """The rule looks at one position of the small model."""
        return True

    def route(self, batch: RouteBatch) -> Destinations:
        """[B] bool at the small model; the large one always returns (and is not asked, given its visit limit)."""
        if batch.model != self.models[0]:
            return [self.models[0]] * len(batch)
        return self.leaves(batch)

    @abstractmethod
    def leaves(self, batch: RouteBatch) -> Destinations:
        """[B] bool: which rows leave the small model."""

    def send(self, row: Row, target: str) -> Handoff:
        """The small model's token is discarded, the large model's is kept."""
        return Handoff(keep_token=row.model != self.models[0])


class LearnedOneToken(OneToken):
    """A `OneToken` policy whose rule is a network in a file, run at the small model only.

    Params need `checkpoint: str` and `threshold: float | None`. What `load` returns has `hidden_size` (H, or None if
    hidden states are not used) and `origin` (the file, for error texts).

    Attributes:
        checkpoint: the parameters' file, else the deployment's own for this policy, else "".
    """

    default_threshold: ClassVar[float]

    def check(self) -> None:
        """Refuses thresholds outside [0, 1] (NaN is outside), and files that the deployment does not list."""
        self.checkpoint: str = self.params.checkpoint or default_checkpoint(self.context, self.name)
        if self.params.checkpoint:
            listed(self.context, self.checkpoint)
        self._networks: dict[str, Any] = {}
        check_unit("threshold", self.params.threshold)

    def prepare(self, model: str) -> None:
        """Loads the network at the small model; if the hidden size is known there, it has to fit."""
        if model == self.models[0] and self.uses_checkpoint():
            network, hidden_size = self.network(self.context.device), self.context.hidden_size
            if hidden_size is not None:
                self._check_hidden(model, hidden_size, network)

    def uses_checkpoint(self) -> bool:
        """Whether these parameters need the file. Default: always."""
        return True

    def needs_hidden(self, model: str) -> bool:
        """Wherever the network runs; those that take logits only are few, and lose nothing."""
        return model == self.models[0] and self.uses_checkpoint()

    @staticmethod
    @abstractmethod
    def load(path: Path, device: str) -> Any:
        """The network of a file on a device; called through `network`, which caches by file and device."""

    def network(self, device: str) -> Any:
        """The network on `device`; instances with the same checkpoint share its weights.

        Raises:
            ConfigError: no file, or one of another shape.
        """
        found = self._networks.get(device)
        if found is None:
            path = resolve(self.context, self.checkpoint, shipped=not self.params.checkpoint)
            found = cached(type(self).load, path, device)
            self._networks[device] = found
        return found

    def threshold(self, stored: float | None) -> float:
        """The request's threshold, else the file's, else the source's default."""
        given: float | None = self.params.threshold
        if given is not None:
            return given
        return self.default_threshold if stored is None else stored

    def hidden(self, batch: RouteBatch, network: Any) -> Tensor:
        """[B, H] float32 hidden states of the batch.

        Raises:
            ConfigError: the engine gives none, or of another width than the network was trained for.
        """
        self._check_hidden(batch.model, 0 if batch.hidden is None else batch.hidden.shape[-1], network)
        assert batch.hidden is not None
        return batch.hidden.float()

    def _check_hidden(self, model: str, size: int, network: Any) -> None:
        if network.hidden_size is None:
            return
        if size == 0:
            raise ConfigError(f"policy {self.name!r} needs hidden states, which the engine of {model!r} does not give")
        if size != network.hidden_size:
            raise ConfigError(
                f"policy {self.name!r}: model {model!r} has hidden size {size}, the router expects "
                f"{network.hidden_size} ({network.origin}); it was trained for another small model"
            )


def check_unit(name: str, value: float | None) -> None:
    """Refuses numbers outside [0, 1]; None means not given.

    Raises:
        InvalidRequest: names the parameter and the value.
    """
    if value is not None and not 0.0 <= value <= 1.0:
        raise InvalidRequest(f"policy_params.{name} is {value}; it lies in [0, 1]")
