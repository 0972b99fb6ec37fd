"""The policy interface: who writes the next token of a request?

A policy is written for one request and executed for a batch. Four methods make it, called in this order. The others
have defaults that fit most: `prepare` and `mask` are for policies that load weights or restrict what a model may
sample, and `InsideEngine` has what only engines that own their loop ask.

1. ``entry(request)``, once at admission in the orchestrator: the model that writes first.
2. ``receive(row)``, in a subserver when a request arrives there (the first time, and after each hand-off): how long
   the visit lasts at most. The default sets no limit.
3. ``route(batch)``, in a subserver after every forward pass, for all its requests with this policy at once: the model
   that goes on. Rows whose visit limit is reached are not asked.
4. ``send(row, target)``, in a subserver for every request that leaves: whether the token just sampled is kept
   (committed, streamed, counted) or discarded, and what state travels along.

A worked example. Policy: leave the small model when its best token is unlikely, let the large model write one token::

    class LowConfidence(Policy):
        name = "low_confidence"
        two_models = True                               # refuse deployments with another number of models

        class Params(PolicyParams):
            threshold: float = 0.5                      # anything else in policy_params is refused by name

        def route(self, batch):                         # batch.logits: [B, V]; called at the large model as well
            confidence = batch.logits.softmax(-1).amax(-1)
            return confidence < self.params.threshold   # [B] bool, True = "the other model"

        def send(self, row, target):
            return Handoff(keep_token=row.model != self.models[0])   # the small model's doubtful token is dropped

        def receive(self, row):
            return Visit(limit=1, then=self.models[0]) if row.model == self.models[1] else Visit()

Request 7 with prompt [5, 6]: ``entry`` returns "small". Small runs [5, 6], samples 9 with confidence 0.8: stays, 9 is
committed. Small runs [9], samples 4 with confidence 0.3: ``route`` says True, ``send`` discards 4, the request leaves.
Large receives [5, 6, 9] (its first visit, so the whole history), samples 8; the visit limit of one token is reached,
so 8 is committed and the request returns to small, which runs only [8].

Names are used for models, never Booleans, except that ``route`` of a two-model policy may return a bool tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, TypeVar, Union

import msgspec
import numpy.typing as npt

from tokenrouter.errors import ConfigError, InvalidRequest
from tokenrouter.messages import Measure

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

T = TypeVar("T")
Destinations: TypeAlias = Union[Sequence[str], Sequence[int], Sequence[bool], "npt.NDArray[Any]", "Tensor"]


class PolicyParams(msgspec.Struct, forbid_unknown_fields=True):
    """Base of a policy's knobs. Subclass fields need defaults unless a deployment must set them."""


@dataclass(frozen=True, slots=True)
class EntryRequest:
    """What `Policy.entry` sees.

    Attributes:
        prompt: the prompt's text, or "" if the client sent token ids and the policy asked for no text.
        tokens: the prompt's token ids.
        seed: the request's 64-bit seed.
    """

    prompt: str
    tokens: Sequence[int]
    seed: int


class Row(Protocol):
    """One request at one model, as a policy sees it. Read-only, except for `state`."""

    @property
    def model(self) -> str:
        """The model the request is at."""
        ...

    @property
    def source(self) -> str:
        """The model that handed it over, or "" on the first visit."""
        ...

    @property
    def seed(self) -> int:
        """The request's 64-bit seed."""
        ...

    @property
    def position(self) -> int:
        """Index in the response of the token now decided on (tokens committed so far, over all models)."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        ...

    @property
    def tokens(self) -> Sequence[int]:
        """Prompt and committed tokens; the token just sampled is not among them."""
        ...

    @property
    def visit_tokens(self) -> int:
        """Tokens committed in this visit."""
        ...

    @property
    def state(self) -> dict[str, Any]:
        """The policy's own data of this request; msgpack-able; travels with every hand-off."""
        ...


@dataclass
class RouteBatch:
    """Result of one forward pass for all rows of one policy at one model.

    Attributes:
        model: where the step ran.
        rows: [B] the requests.
        tokens: [B] int64, what was just sampled.
        logits: [B, V] float32, raw next-token logits (no temperature, penalties or filters).
        hidden: [B, H] float32, the vector fed to the LM head, or None if the engine gives none.
    """

    model: str
    rows: Sequence[Row]
    tokens: Tensor
    logits: Tensor
    hidden: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def seeds(self) -> list[int]:
        """[B] 64-bit seeds."""
        return [row.seed for row in self.rows]

    @property
    def positions(self) -> list[int]:
        """[B] index of the sampled token in the response."""
        return [row.position for row in self.rows]


class Handoff(msgspec.Struct, frozen=True):
    """Answer of `Policy.send`.

    Attributes:
        keep_token: commit the token just sampled before leaving; otherwise it is discarded, and the target writes
            this position.
        state: replaces the request's state if not None.
    """

    keep_token: bool
    state: dict[str, Any] | None = None


class Visit(msgspec.Struct, frozen=True):
    """Answer of `Policy.receive`.

    Attributes:
        limit: after this many committed tokens the request leaves to `then` without asking `route`; None = no limit.
        then: the model after the limit.
    """

    limit: int | None = None
    then: str = ""


@dataclass(frozen=True)
class PolicyContext:
    """Where a policy runs, and what that place offers.

    Attributes:
        models: names of all models of the deployment, in the order of its configuration (small first).
        directory: what relative paths in parameters (checkpoints) are relative to, or None. If given, no path in
            parameters leads out of it, because clients send parameters too.
        checkpoints: the paths that parameters may name, relative to `directory`; None = any in it.
        tokenizer: of the deployment's models.
        input_embedding: from a model's name to its input embedding [V, H]; ConfigError for a model of another process.
        device: where that process keeps logits and hidden states, for example ``cuda:0``.
        hidden_size: H of `RouteBatch.hidden`; 0 if the engine gives none, None if that is not known.
    """

    models: tuple[str, ...]
    directory: str | None = None
    checkpoints: frozenset[str] | None = None
    tokenizer: Tokenizer | None = field(default=None, compare=False)
    input_embedding: Callable[[str], Tensor] | None = field(default=None, compare=False)
    device: str = field(default="cpu", compare=False)
    hidden_size: int | None = field(default=None, compare=False)


class InsideEngine:
    """Facts about a policy for engines that own their loop: they run it inside their worker or in the model's graph.

    Stepped engines ask for none of this. The defaults fit policies that read logits and keep no state.

    Class attributes:
        rebuilds_state: `receive` brings a stale state up to date from the tokens committed since, so nothing is lost
            although changes that `route` and `send` make cannot leave the engine.
    """

    rebuilds_state: ClassVar[bool] = False

    def decides(self, model: str) -> bool:
        """Whether requests may leave `model` because `route` says so. Default: if `route` is overridden."""
        return getattr(type(self), "route", None) is not Policy.route

    def needs_hidden(self, model: str) -> bool:
        """Whether `route` reads `RouteBatch.hidden` at `model`; not every engine can give it. Default: no."""
        return False

    def needs_token(self, model: str) -> bool:
        """Whether `route` at `model`, where it reads hidden states, also reads the token just sampled. Default: no."""
        return False


class Policy(InsideEngine):
    """Base class of all policies; see the module's text for the order of calls.

    One instance serves all requests with the same parameters, so per-request data belongs in `Row.state`. Instances
    exist in the orchestrator (for `entry`) and in each subserver; they share nothing.

    Class attributes:
        name: what users write in `policy`.
        two_models: refuse deployments that do not have exactly two models.
        Params: the knobs.
    """

    name: ClassVar[str] = ""
    two_models: ClassVar[bool] = False
    Params: ClassVar[type[PolicyParams]] = PolicyParams

    def __init__(self, params: PolicyParams, context: PolicyContext) -> None:
        if self.two_models and len(context.models) != 2:
            raise ConfigError(
                f"policy {self.name!r} routes between two models; this deployment has {', '.join(context.models)}"
            )
        self.params: Any = params
        self.context = context
        self.models = context.models
        self.check()

    def check(self) -> None:
        """Raises `InvalidRequest` or `ConfigError` if the parameters make no sense; called once."""

    def needed(self, name: str, found: T | None) -> T:
        """A field of the context that this policy cannot do without.

        Raises:
            ConfigError: the place of execution does not offer it.
        """
        if found is None:
            fields = ("hidden_size", "input_embedding", "tokenizer")
            offered = ", ".join(each for each in fields if getattr(self.context, each) is not None) or "nothing"
            raise ConfigError(f"policy {self.name!r} needs {name!r}, which is not offered where it runs ({offered} is)")
        return found

    def speculates(self) -> bool:
        """Whether the small model may go on from a token that it discards, before the large one has decided.

        It may if both models' decisions follow from logits, hidden states, tokens, seed and position alone, if a
        request carries no `Row.state`, and if the small model (the first of two) has no visit limit and discards its
        token where it leaves. Then the tokens are those of plain routing. A model at which the policy `remembers` does
        not go ahead. Default: no.
        """
        return False

    def prepare(self, model: str) -> None:
        """Loads what this policy needs to run at `model`, so that errors show at start. Default: nothing.

        Called once per model in the process that runs it, before the first `route`, and with "" in the orchestrator,
        before the first `entry`. Policies also load lazily, so that an instance for a client's own parameters works
        without this call.

        Raises:
            ConfigError: a file is missing, damaged or made for other models.
        """

    def mask(self, model: str, vocab_size: int) -> Sequence[int]:
        """Token ids that `model` must never sample for this policy's requests. Default: none.

        The sampler bans them before greedy choice, temperature and filters; `RouteBatch.logits` stay raw, so a policy
        still sees the values of these columns. Constant per policy and model: asked once, when a request opens.

        Args:
            model: the model that samples.
            vocab_size: width V of its logits.
        """
        return ()

    def visited(self) -> tuple[str, ...]:
        """Models a request may visit; KV is reserved on these. Default: all."""
        return self.models

    def entry(self, request: EntryRequest) -> str:
        """The model that writes the first token. Default: the first of the deployment."""
        return self.models[0]

    def receive(self, row: Row) -> Visit:
        """How long the request stays at most. Default: until `route` sends it away."""
        return Visit()

    def route(self, batch: RouteBatch) -> Destinations:
        """The model that goes on, per row.

        Names, or indices into `models`, or for two models Booleans (True = leave). Default: everybody stays.
        """
        return [batch.model] * len(batch)

    def explain(self, batch: RouteBatch) -> Sequence[Sequence[Measure]]:
        """What `route` is going to look at, per row: values beside thresholds. Changes nothing. Default: nothing.

        Asked before `route`, and only for requests that want to be explained; `explaining` helps to write it.
        """
        return [()] * len(batch)

    def explain_entry(self, request: EntryRequest) -> Sequence[Measure]:
        """Likewise for `entry`."""
        return ()

    def remembers(self, model: str) -> bool:
        """Whether `route` at `model` puts into `Row.state` what cannot be had again from the tokens. Default: no.

        The state of a request that stays is then reported with every token, so that a model that is lost loses none
        of it. Engines that own their loop cannot report it, and refuse such a policy. Asked once, when a request opens.
        """
        return False

    def send(self, row: Row, target: str) -> Handoff:
        """What travels when `route` sent the request away. Default: the token just sampled is kept."""
        return Handoff(keep_token=True)

    def other(self, model: str) -> str:
        """The other one of two models."""
        return self.models[1] if model == self.models[0] else self.models[0]


def destination_names(result: Destinations, batch: RouteBatch, models: tuple[str, ...]) -> list[str]:
    """What `route` returned as model names, one per row; at most one host sync.

    Raises:
        InvalidRequest: wrong length, unknown model, or Booleans although there are not exactly two models.
    """
    values: list[Any] = result.tolist() if hasattr(result, "tolist") else list(result)
    if len(values) != len(batch):
        raise InvalidRequest(f"route returned {len(values)} destinations for {len(batch)} requests")
    return [_name(value, batch.model, models) for value in values]


def _name(value: Any, model: str, models: tuple[str, ...]) -> str:
    if isinstance(value, str):
        if value not in models:
            raise InvalidRequest(f"route returned the unknown model {value!r}; known: {', '.join(models)}")
        return value
    if isinstance(value, bool):
        if len(models) != 2:
            raise InvalidRequest(f"route returned a Boolean, but there are {len(models)} models; return names")
        return (models[1] if model == models[0] else models[0]) if value else model
    if isinstance(value, int) and 0 <= value < len(models):
        return models[value]
    raise InvalidRequest(f"route returned {value!r}; return a model name, an index below {len(models)}, or a Boolean")
