"""From what a client sent to a request that can be served: validation, defaults, tokenisation."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from tokenizers import Tokenizer

from tokenrouter.errors import InvalidRequest, PromptTooLong
from tokenrouter.messages import PolicySpec, Sampling
from tokenrouter.tokenization import decode_prompt, encode_prompt, largest_id, special_words, surely_tokens, word_forms

MAX_SEED = 2**64 - 1
MAX_INT32 = 2**31 - 1
MOST_EXPLAINED = 4096
_CHARACTERS = 4
"""Of a token, in most texts."""


# Numbers of ids of all words together.
_ID_LISTS = {"stop_word_ids": "prompt_ids", "bad_word_ids": "prompt_ids"}


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one request may ask of the entry model before anything is known of it; checked before any work.

    Attributes:
        prompt_bytes: of `text_input`, as UTF-8.
        prompt_ids: number of `input_ids`.
        words: number of `stop_words`, and of `bad_words`.
        word_bytes: of each, as UTF-8, and of every other text such as `policy`.
        policy_params_bytes: of `policy_params`, as UTF-8.
        timeout_seconds: longest `timeout`.
    """

    prompt_bytes: int = 1 << 20
    prompt_ids: int = 1 << 20
    words: int = 256
    word_bytes: int = 1024
    policy_params_bytes: int = 1 << 16
    timeout_seconds: int = 86_400

    def __post_init__(self) -> None:
        """Refuses limits that no request could keep."""
        for name in self.__struct_fields__:
            if getattr(self, name) < 1:
                raise ValueError(f"limits.{name} is {getattr(self, name)}; it is at least 1")

    def check_count(self, field: str, count: int) -> None:
        """Raises InvalidRequest for too many values of a field that is a list."""
        limits = {"input_ids": "prompt_ids", "stop_words": "words", "bad_words": "words", **_ID_LISTS}
        if field in limits:
            self._check(limits[field], f"{field} has {count} values", count)

    def check(self, fields: RequestFields) -> None:
        """Raises InvalidRequest for a field over its limit; names it, the limit, and what to do."""
        self._check_bytes("prompt_bytes", "text_input", fields.text_input)
        self._check_bytes("policy_params_bytes", "policy_params", fields.policy_params)
        self._check_bytes("word_bytes", "policy", fields.policy)
        self.check_count("input_ids", len(fields.input_ids or ()))
        self.check_count("stop_words", len(fields.stop_word_ids))
        self.check_count("bad_words", len(fields.bad_word_ids))
        for name, words in (("stop_words", fields.stop_words), ("bad_words", fields.bad_words)):
            self.check_count(name, len(words))
            for i, word in enumerate(words):
                self._check_bytes("word_bytes", f"{name}[{i}]", word)

    def timeout_ns(self, timeout_us: int) -> int:
        """A request's `timeout` in ns. Raises InvalidRequest if it is too long."""
        self._check("timeout_seconds", f"timeout is {timeout_us} microseconds", -(-timeout_us // 10**6))
        return timeout_us * 1000

    def check_bytes(self, field: str, size: int) -> None:
        """Raises InvalidRequest for a text of so many bytes, before it is decoded."""
        limits = {"text_input": "prompt_bytes", "policy_params": "policy_params_bytes"}
        self._check(limits.get(field, "word_bytes"), f"{field} has {size} bytes", size)

    def _check_bytes(self, limit: str, field: str, text: object) -> None:
        if isinstance(text, str) and len(text) * 4 > getattr(self, limit):
            size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
            self._check(limit, f"{field} has {size} bytes", size)

    def _check(self, limit: str, what: str, value: int) -> None:
        if value > (most := getattr(self, limit)):
            raise InvalidRequest(f"{what}; this deployment takes at most {most} (limits.{limit})")


class Defaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What holds for a request of the entry model that leaves a field out.

    Attributes:
        max_tokens: or None: a request has to name it.
        add_special_tokens, exclude_input_in_output: as NVIDIA's models have them.
    """

    max_tokens: int | None = None
    add_special_tokens: bool = True
    exclude_input_in_output: bool = False

    def __post_init__(self) -> None:
        """Refuses what no request could ask for."""
        if self.max_tokens is not None and not 1 <= self.max_tokens <= MAX_INT32:
            raise ValueError(f"defaults.max_tokens is {self.max_tokens}; it lies in 1..{MAX_INT32}")


@dataclass(frozen=True, slots=True)
class RequestFields:
    """The fields of one request as the client named them; None means not given. See the README for their meaning.

    `policy_params` is JSON text, as a server gets it, or a mapping; behind `input_length` the ids are padding.
    """

    text_input: str | None = None
    input_ids: Sequence[int] | None = None
    input_length: int | None = None
    add_special_tokens: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    bad_words: Sequence[str] = ()
    stop_words: Sequence[str] = ()
    bad_word_ids: Sequence[Sequence[int]] = ()
    stop_word_ids: Sequence[Sequence[int]] = ()
    end_id: int | None = None
    seed: int | None = None
    return_log_probs: bool = False
    stream: bool = False
    policy: str | None = None
    policy_params: str | Mapping[str, Any] | None = None
    priority: int | None = None
    speculation: bool | None = None
    explain: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A valid request.

    Attributes:
        prompt: text of the prompt.
        tokens: token ids of the prompt, at least one.
        sampling: how tokens are chosen.
        stop_words: texts that end the response; the matched word stays in it. Those that are a special token are
            among the sampling's end ids instead.
        policy: what routes it.
        stream: whether every token is reported as it comes.
        timeout_ns: the request ends this long after its arrival, or None.
        priority: level in the entry queue, 1 first; 0 = the deployment's default.
        speculation: whether its small model may go ahead of the large one; None = as the deployment says.
        explain: whether the response says why it was handed over, for every token.
        trace: the caller's span, for which what becomes of the request is exported; None = for nobody.
    """

    prompt: str
    tokens: list[int]
    sampling: Sampling
    stop_words: tuple[str, ...]
    policy: PolicySpec
    stream: bool = False
    timeout_ns: int | None = None
    priority: int = 0
    speculation: bool | None = None
    explain: bool = False
    trace: Any = None


class LengthCheck(Protocol):
    """Told the number of a prompt's tokens, or how many it has at least; raises what refuses the request."""

    def __call__(self, prompt_tokens: int, *, at_least: bool = False) -> None: ...


def unchecked(prompt_tokens: int, *, at_least: bool = False) -> None:
    """Any length will do."""


@dataclass(frozen=True)
class RequestBuilder:
    """Turns fields into a `GenerationRequest`.

    Attributes:
        tokenizer: the deployment's tokenizer.
        vocab_size: token ids in `input_ids` lie below this.
        end_ids: default end of a response.
        policy: the deployment's policy.
        selectable: policies that a client may choose per request.
        limits: of what one request may hold.
        defaults: of what a request leaves out.
    """

    tokenizer: Tokenizer
    vocab_size: int
    end_ids: tuple[int, ...]
    policy: PolicySpec
    selectable: frozenset[str] = field(default_factory=frozenset)
    limits: Limits = field(default_factory=Limits)
    defaults: Defaults = field(default_factory=Defaults)

    def build(
        self,
        fields: RequestFields,
        *,
        timeout_ns: int | None = None,
        check_length: LengthCheck = unchecked,
    ) -> GenerationRequest:
        """Validates everything that can be known without the models' limits.

        Args:
            fields: what the client sent.
            timeout_ns: of the request.
            check_length: told the number of the prompt's tokens before anything is made of them; it may raise.

        Raises:
            InvalidRequest: names the field, its value and the allowed form.
        """
        self.limits.check(fields)
        prompt, tokens = self._prompt(fields, check_length)
        words = [*fields.stop_words, *self._texts(fields.stop_word_ids)]
        special = special_words(self.tokenizer, words)
        return GenerationRequest(
            prompt=prompt,
            tokens=tokens,
            sampling=self._sampling(fields, special.values()),
            stop_words=tuple(word for word in words if word and word not in special),
            policy=self._policy(fields),
            stream=fields.stream,
            timeout_ns=timeout_ns,
            priority=fields.priority or 0,
            speculation=fields.speculation,
            explain=self._explains(fields),
        )

    def _prompt(self, fields: RequestFields, check_length: LengthCheck) -> tuple[str, list[int]]:
        if fields.text_input is not None and fields.input_ids is not None:
            raise InvalidRequest("both text_input and input_ids are given; send one of them")
        if fields.input_ids is not None:
            tokens = [int(token) for token in fields.input_ids]
            if fields.input_length is not None:
                tokens = tokens[: _in_range("input_lengths", fields.input_length, 1, len(tokens), "input_ids")]
            check_length(len(tokens))
            self._check_ids(tokens)
            return decode_prompt(self.tokenizer, tokens), tokens
        if not fields.text_input:
            raise InvalidRequest("text_input is empty or missing; send a non-empty prompt (or input_ids)")
        special = fields.add_special_tokens
        if special is None:
            special = self.defaults.add_special_tokens
        self._check_long(fields.text_input, check_length)
        tokens = encode_prompt(self.tokenizer, fields.text_input, add_special_tokens=special)
        check_length(len(tokens))
        if not tokens:
            raise InvalidRequest("text_input gives no token with this model's tokenizer; send some other text")
        # A tokenizer may know tokens that the model has no embedding for.
        if largest_id(self.tokenizer) >= self.vocab_size and max(tokens) >= self.vocab_size:
            text = self.tokenizer.id_to_token(max(tokens))
            raise InvalidRequest(
                f"text_input holds {text!r} (token {max(tokens)}), which the model does not know; its token ids lie in "
                f"[0, {self.vocab_size})"
            )
        return fields.text_input, tokens

    def _check_long(self, text: str, check_length: LengthCheck) -> None:
        """Refuses a text that is much too long before all of it is encoded; one that only looks so is encoded twice."""
        try:
            check_length(len(text) // _CHARACTERS)
        except PromptTooLong:
            for tokens in surely_tokens(self.tokenizer, text):
                check_length(tokens, at_least=True)

    def _explains(self, fields: RequestFields) -> bool:
        """An explanation is kept until the end, so a response that has one is short."""
        limit = self.defaults.max_tokens if fields.max_tokens is None else fields.max_tokens
        if fields.explain and limit is not None and limit > MOST_EXPLAINED:
            raise InvalidRequest(
                f"explain is true, and max_tokens is {limit}: at most {MOST_EXPLAINED} tokens are explained; lower it"
            )
        return fields.explain

    def _check_ids(self, tokens: Sequence[int]) -> None:
        if not tokens:
            raise InvalidRequest("input_ids is empty; send at least one token id")
        for i, token in enumerate(tokens):
            if not 0 <= token < self.vocab_size:
                raise InvalidRequest(f"input_ids[{i}] is {token}; token ids lie in [0, {self.vocab_size})")

    def _sampling(self, fields: RequestFields, stop_ids: Iterable[int]) -> Sampling:
        # 0 turns a filter off, as if it were not given.
        greedy = fields.temperature is None and not fields.top_k and not fields.top_p
        max_tokens = self.defaults.max_tokens if fields.max_tokens is None else fields.max_tokens
        if max_tokens is None:
            raise InvalidRequest("max_tokens is missing; send the most tokens that the response may have")
        _in_range("max_tokens", max_tokens, 1, MAX_INT32)
        min_tokens = 0 if fields.min_tokens is None else fields.min_tokens
        _in_range("min_tokens", min_tokens, 0, max_tokens, "max_tokens")
        return Sampling(
            max_tokens=max_tokens,
            end_ids=self._end_ids(fields.end_id, stop_ids),
            seed=self._seed(fields.seed),
            temperature=0.0 if greedy else _number("temperature", fields.temperature, 1.0, low=0.0),
            top_k=_in_range("top_k", fields.top_k or 0, 0, MAX_INT32),
            top_p=_top_p(fields.top_p),
            min_tokens=min_tokens,
            repetition_penalty=_penalty("repetition_penalty", fields.repetition_penalty),
            presence_penalty=_number("presence_penalty", fields.presence_penalty, 0.0),
            frequency_penalty=_number("frequency_penalty", fields.frequency_penalty, 0.0),
            bad_words=self._bad_words(fields.bad_words) + self._bad_ids(fields.bad_word_ids),
            log_probs=fields.return_log_probs,
            vocab_size=self.vocab_size,
        )

    def _end_ids(self, end_id: int | None, stop_ids: Iterable[int]) -> tuple[int, ...]:
        """Special tokens give no text in which a stop word could be found: they end the response by their ids."""
        ids = self.end_ids if end_id is None else ()
        if end_id is not None and end_id != -1:
            ids = (_in_range("end_id", end_id, 0, self.vocab_size - 1),)
        return tuple(dict.fromkeys([*ids, *(token for token in stop_ids if token < self.vocab_size)]))

    @staticmethod
    def _seed(seed: int | None) -> int:
        if seed is None:
            return int.from_bytes(os.urandom(8), "little")
        return _in_range("seed", seed, 0, MAX_SEED)

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        forms = (ids for word in words if word for ids in word_forms(self.tokenizer, word))
        return tuple(ids for ids in forms if max(ids) < self.vocab_size)

    def _bad_ids(self, words: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(word) for word in words if max(word) < self.vocab_size)

    def _texts(self, words: Sequence[Sequence[int]]) -> list[str]:
        """Responses are searched for text."""
        return [self.tokenizer.decode(list(word), skip_special_tokens=False) for word in words]

    def _policy(self, fields: RequestFields) -> PolicySpec:
        params = _params(fields.policy_params)
        if fields.policy is None:
            return PolicySpec(self.policy.name, self.policy.params if params is None else params)
        if fields.policy != self.policy.name and fields.policy not in self.selectable:
            known = ", ".join(sorted(self.selectable | {self.policy.name}))
            raise InvalidRequest(f"policy is {fields.policy!r}; this deployment offers: {known}")
        inherits = fields.policy == self.policy.name and params is None
        return PolicySpec(fields.policy, self.policy.params if inherits else params or "{}")


def _params(given: str | Mapping[str, Any] | None) -> str | None:
    """Parameters of a policy as JSON text."""
    if given is None or isinstance(given, str):
        return given
    try:
        return msgspec.json.encode(dict(given)).decode()
    except (TypeError, ValueError) as exc:
        raise InvalidRequest(
            f"policy_params is {given!r} ({exc}); send a JSON object, as text or as a mapping"
        ) from exc


def _in_range(name: str, value: int, low: int, high: int, high_name: str = "") -> int:
    if not low <= value <= high:
        limit = f"{high_name} ({high})" if high_name else str(high)
        raise InvalidRequest(f"{name} is {value}; it lies in {low}..{limit}")
    return value


def _number(name: str, value: float | None, default: float, low: float = -math.inf) -> float:
    """A finite number of at least `low`; NaN fails every comparison, so it is asked for by name."""
    if value is None:
        return default
    if not math.isfinite(value) or value < low:
        bound = "a finite number" if low == -math.inf else f"a finite number of at least {low:g}"
        raise InvalidRequest(f"{name} is {value}; send {bound}")
    return float(value)


def _top_p(value: float | None) -> float:
    if not value:
        return 1.0
    if not 0.0 < value <= 1.0:
        raise InvalidRequest(f"top_p is {value}; it lies in (0, 1], and 0 turns it off")
    return float(value)


def _penalty(name: str, value: float | None) -> float:
    if value is None:
        return 1.0
    if not (math.isfinite(value) and value > 0.0):
        raise InvalidRequest(f"{name} is {value}; send a finite number above 0 (1 is no penalty)")
    return float(value)
