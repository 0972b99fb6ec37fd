"""Which requests may be written with guesses, and how often those were right."""

from __future__ import annotations

import logging
from collections import defaultdict

from tokenrouter.errors import ConfigError, InvalidRequest
from tokenrouter.messages import ModelInfo
from tokenrouter.orchestrator.generation import Generation
from tokenrouter.policies.base import Policy
from tokenrouter.request import GenerationRequest
from tokenrouter.speculation import Agreement, Speculation

log = logging.getLogger(__name__)


class Eligibility:
    """Who may go ahead, and what became of guesses.

    Args:
        speculation: the deployment's setting; None = no request does unless it asks for it.

    Attributes:
        agreement: by name of the policy.
    """

    def __init__(self, speculation: Speculation | None) -> None:
        self.agreement: defaultdict[str, Agreement] = defaultdict(Agreement)
        self._default = speculation is not None
        self._settings = speculation or Speculation()
        self._plain_models: set[str] = set()
        self._told: set[str] = set()

    def track(self, policy: str) -> None:
        """Counts what becomes of this policy's guesses, from 0 on."""
        self.agreement[policy] = Agreement()

    def connected(self, model: str, info: ModelInfo) -> None:
        """A model is there.

        Raises:
            ConfigError: it cannot hold so many guesses.
        """
        if self._default and self._settings.depth >= info.max_context:
            raise ConfigError(
                f"speculation.depth is {self._settings.depth}; model {model!r} has a context of {info.max_context} "
                "tokens: lower the depth"
            )
        self._plain_models.discard(model)
        if not info.speculates:
            self._plain_models.add(model)
            if self._default:
                self._tell_once(f"model {model!r} ({info.engine}) owns its decoding loop")

    def admits(self, request: GenerationRequest, policy: Policy) -> bool:
        """Whether a request's small model may go ahead.

        Raises:
            InvalidRequest: the client asks for it, and it cannot.
        """
        wanted = self._default if request.speculation is None else request.speculation
        if not wanted:
            return False
        why_not = ""
        if len(policy.models) != 2 or not policy.speculates():
            why_not = f"policy {request.policy.name!r} decides by more than logits, hidden states and tokens"
        elif plain := self._plain_models.intersection(policy.models):
            why_not = f"the engine of model {min(plain)!r} owns its decoding loop"
        if why_not and request.speculation:
            raise InvalidRequest(f"speculation is true, but {why_not}: leave speculation out")
        if why_not:
            self._tell_once(why_not)
        return not why_not

    def check_explained(self, request: GenerationRequest, policy: Policy) -> None:
        """Raises InvalidRequest if a request asks why, and a model decides where nobody can look."""
        if request.explain and (plain := self._plain_models.intersection(policy.models)):
            raise InvalidRequest(
                f"explain is true, but the engine of model {min(plain)!r} owns its decoding loop: leave explain out"
            )

    def depth(self, generation: Generation) -> int:
        """Most guesses that the small model may hold in its next visit."""
        if not generation.speculates or not self._plain_models.isdisjoint(generation.policy.models):
            return 0
        agreement = self.agreement[generation.request.policy.name]
        return self._settings.depth if agreement.suffices(self._settings.least_agreement) else 0

    def _tell_once(self, why: str) -> None:
        if why not in self._told:
            self._told.add(why)
            log.info("served without speculation: %s", why)
