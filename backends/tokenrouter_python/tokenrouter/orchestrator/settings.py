"""What an entry model's deployment says to its orchestrator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenrouter.entry_queue import EntryQueuePolicy, Priorities
from tokenrouter.speculation import Speculation


@dataclass(frozen=True)
class OrchestratorSettings:
    """Settings of one orchestrator.

    Attributes:
        models: names of the deployment's models, small first.
        max_inflight: most requests that run at once; the others wait.
        connect_timeout_ns: how long a request waits for a model that is not connected.
        queue: the queue in front.
        priorities: of the queue.
        max_request_ns: a request ends so long after its arrival, waiting or running; 0 = no limit.
        speculation: whether and how far small models go ahead; None = only for requests that ask for it.
        replicas: names by model; a model that is left out is its own only one.
    """

    models: tuple[str, ...]
    max_inflight: int
    connect_timeout_ns: int
    queue: EntryQueuePolicy
    priorities: Priorities = field(default_factory=Priorities)
    max_request_ns: int = 0
    speculation: Speculation | None = None
    replicas: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def all_replicas(self) -> dict[str, tuple[str, ...]]:
        """Names by model, of every model."""
        return {model: self.replicas.get(model, (model,)) for model in self.models}
