"""Profile of a deployment: step times, routing probabilities, committed tokens. The one definition of the format.

The profiler writes it; the Markov model and the simulator read it. Symbols in brackets are those of
arXiv 2610.12242, section 3.

```yaml
delta_ms: 0.1                     # time quantum [delta] of the Markov model
models:
  small: {step_ms: 6.0}           # one number: every batch takes as long [L_i]
  large:
    step_ms: {1: 27.9, 8: 29.5}   # or a table: batch size -> milliseconds
    extend_ms_per_token: 0.02     # each extended token beyond the one input token of every request
    max_batch: 64
    kv_tokens: 200000             # KV that one replica has for routed requests
entry: small                      # model that receives a new request
routing:                          # [P]; probabilities that are left out are 0
  small: {small: 0.65, large: 0.35}
  large: {small: 1.0}
commit:                           # [C]; tokens committed on that move; left out is 0
  small: {small: 1, large: 0}
  large: {small: 1}
handoff_ms: 0.0                   # delay of one hand-off between two models
```
"""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec
import yaml

from tokenrouter.step_time import step_time_ms
from tokenrouter.yaml_files import Dumper, parse_yaml
from tools.dtmc.errors import ProfileError

ROW_TOLERANCE = 1e-6  # a row of P may miss 1 by rounding of printed probabilities, not more

BatchSize = Annotated[int, msgspec.Meta(ge=1)]


class ModelProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One model.

    Attributes:
        step_ms: milliseconds of one step: a number, or a table from measured batch size to milliseconds.
        extend_ms_per_token: milliseconds that each extended token adds to the step that takes it in.
        max_batch: largest batch of one step; None is unlimited.
        kv_tokens: tokens whose KV one replica has for routed requests; None is unlimited. The Markov model knows no
            limit.
    """

    step_ms: float | dict[BatchSize, float]
    extend_ms_per_token: float = 0.0
    max_batch: BatchSize | None = None
    kv_tokens: BatchSize | None = None

    def step_time_ms(self, batch: int, extended_tokens: float = 0.0) -> float:
        """Milliseconds of one step, by the rule of `tokenrouter.step_time`.

        Args:
            batch: number of requests in the step, 1 or more.
            extended_tokens: of the whole batch, beyond the one input token that every request has in any step; each
                adds `extend_ms_per_token`. A mean may be fractional.
        """
        if batch < 1:
            raise ValueError(f"a step has at least one request, not {batch}")
        return step_time_ms(self.step_ms, batch) + self.extend_ms_per_token * extended_tokens


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """A validated deployment profile; `load_profile` makes one. Fields: see the module.

    The order of `models` is the order of every array in this package.
    """

    models: dict[str, ModelProfile]
    entry: str
    routing: dict[str, dict[str, float]]
    commit: dict[str, dict[str, float]]
    delta_ms: float = 0.1
    handoff_ms: float = 0.0

    def __post_init__(self) -> None:
        """Checks the meaning of what msgspec has checked the types of."""
        _check_names(self)
        _check_times(self)
        _check_routing(self)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.models)

    @cached_property
    def routing_matrix(self) -> tuple[tuple[float, ...], ...]:
        """P, rows scaled to sum to exactly 1."""
        rows = ([self.routing[i].get(j, 0.0) for j in self.names] for i in self.names)
        return tuple(tuple(p / math.fsum(row) for p in row) for row in rows)

    @cached_property
    def commit_matrix(self) -> tuple[tuple[float, ...], ...]:
        """C, tokens committed on the move from row to column."""
        return tuple(tuple(self.commit.get(i, {}).get(j, 0.0) for j in self.names) for i in self.names)


def load_profile(path: Path) -> Profile:
    """Reads and checks a profile file.

    Raises:
        ProfileError: the file cannot be read, or a field is wrong; the message names file, field and remedy.
    """
    try:
        return parse_profile(path.read_bytes())
    except (OSError, ProfileError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise ProfileError(f"{path}: {reason}") from exc


def parse_profile(text: bytes | str) -> Profile:
    """Parses and checks the YAML text of a profile; errors as in `load_profile`."""
    try:
        return msgspec.convert(parse_yaml(text), Profile)
    except msgspec.ValidationError as exc:
        raise ProfileError(str(exc)) from exc  # carries the path of the field
    except yaml.YAMLError as exc:
        raise ProfileError(f"not valid YAML: {exc}") from exc


def dump_profile(profile: Profile) -> str:
    """YAML text that `parse_profile` reads back to an equal profile."""
    return str(yaml.dump(msgspec.to_builtins(profile, str_keys=False), Dumper=Dumper, sort_keys=False))


def _check_names(profile: Profile) -> None:
    if not profile.models:
        raise ValueError("models: empty; name at least one model")
    known = f"the models are {', '.join(profile.models)}"
    if profile.entry not in profile.models:
        raise ValueError(f"entry: no model {profile.entry!r}; {known}")
    for field, matrix in (("routing", profile.routing), ("commit", profile.commit)):
        for row, columns in matrix.items():
            for name in (row, *columns):
                if name not in profile.models:
                    raise ValueError(f"{field}.{row}: no model {name!r}; {known}")


def _check_times(profile: Profile) -> None:
    _check_positive("delta_ms", profile.delta_ms)
    _check_not_negative("handoff_ms", profile.handoff_ms)
    for name, model in profile.models.items():
        field = f"models.{name}.step_ms"
        times = [model.step_ms] if isinstance(model.step_ms, float) else list(model.step_ms.values())
        if not times:
            raise ValueError(f"{field}: empty table; give one batch size and its milliseconds")
        for milliseconds in times:
            _check_positive(field, milliseconds)
        _check_not_negative(f"models.{name}.extend_ms_per_token", model.extend_ms_per_token)


def _check_routing(profile: Profile) -> None:
    for name in profile.models:
        row = profile.routing.get(name)
        if row is None:
            raise ValueError(f"routing.{name}: missing; give the probabilities of where a request goes after a step")
        for target, p in row.items():
            _check_not_negative(f"routing.{name}.{target}", p)
        total = math.fsum(row.values())
        if abs(total - 1) > ROW_TOLERANCE:
            raise ValueError(f"routing.{name}: probabilities sum to {total:.6g}; make them sum to 1")
    for source, columns in profile.commit.items():
        for target, tokens in columns.items():
            _check_not_negative(f"commit.{source}.{target}", tokens)
    _check_one_class(profile)


def _check_one_class(profile: Profile) -> None:
    """Every model that a request can reach must lead back to one common set, or the long run depends on chance."""
    reach = {name: _reachable(profile, name) for name in profile.models}
    common = set.intersection(*(reach[name] for name in reach[profile.entry]))
    if not common:
        raise ValueError("routing: requests can end in separate groups of models; give a way back between them")
    if not any(profile.commit.get(i, {}).get(j, 0.0) * p > 0 for i in common for j, p in profile.routing[i].items()):
        raise ValueError("commit: no move commits a token in the long run; give the tokens of the moves that do")


def _reachable(profile: Profile, start: str) -> set[str]:
    found, todo = {start}, [start]
    while todo:
        new = {name for name, p in profile.routing[todo.pop()].items() if p > 0} - found
        found |= new
        todo.extend(new)
    return found


def _check_positive(field: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{field}: {value:g}; give a positive number of milliseconds")


def _check_not_negative(field: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{field}: {value:g}; give a number of 0 or more")
