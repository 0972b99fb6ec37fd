"""One model writes the whole response: the small-only and large-only baselines, and direct calls to a subserver."""

from __future__ import annotations

from tokenrouter.errors import InvalidRequest
from tokenrouter.policies.base import EntryRequest, Policy, PolicyParams


class Single(Policy):
    """No routing. `model` names the writer; by default the first model of the deployment."""

    name = "single"

    class Params(PolicyParams):
        """Knobs of `Single`."""

        model: str = ""

    def check(self) -> None:
        """Refuses an unknown model."""
        if self.params.model and self.params.model not in self.models:
            raise InvalidRequest(f"policy_params.model is {self.params.model!r}; known: {', '.join(self.models)}")

    def visited(self) -> tuple[str, ...]:
        """Only the writer holds KV."""
        return (self.params.model or self.models[0],)

    def entry(self, request: EntryRequest) -> str:
        """The writer."""
        return self.visited()[0]
