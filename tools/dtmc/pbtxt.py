"""Edits single fields of a protobuf text file and leaves every other character alone, comments included.

The text is parsed into fields with their positions; an edit replaces or inserts a slice of the text. Only what
config.pbtxt files use is understood: messages in braces or angle brackets, lists, scalars, strings, `#` comments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tools.dtmc.errors import RepositoryError

_TOKEN = re.compile(
    r"""(?P<skip>[\s,;]+|\#[^\n]*)
    |(?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    |(?P<open>[{<\[])|(?P<close>[}>\]])|(?P<colon>:)
    |(?P<word>[^\s,;\#"'{}<>\[\]:]+)""",
    re.VERBOSE | re.DOTALL,
)
_CLOSER = {"{": "}", "<": ">", "[": "]"}


@dataclass(frozen=True, slots=True)
class Message:
    """Fields between two brackets; `inner` is the slice of the text strictly between them."""

    fields: tuple[Field, ...]
    inner: tuple[int, int]

    def all(self, name: str) -> list[Field]:
        """The fields of that name, in order."""
        return [field for field in self.fields if field.name == name]


@dataclass(frozen=True, slots=True)
class Field:
    """One occurrence of a field.

    Attributes:
        name: its name.
        start: where the name starts.
        value: slice of the text that is the value, brackets and all parts of a string included.
        messages: the messages in the value: one, those of a list, or none for scalars.
    """

    name: str
    start: int
    value: tuple[int, int]
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    start: int
    end: int


def parse(text: str) -> Message:
    """The fields of a whole file.

    Raises:
        RepositoryError: the text is not well formed; the message gives the line.
    """
    return _Parser(text).file()


def set_scalar(text: str, path: tuple[str, str], value: str) -> str:
    """Sets `path[0] { path[1]: value }`; the block and the field are added where they are missing.

    Further occurrences of the field, as in a repeated field written one by one, are removed.
    """
    block_name, name = path
    blocks = parse(text).all(block_name)
    if len(blocks) > 1:
        raise RepositoryError(f"{block_name} occurs {len(blocks)} times; merge them into one block")
    if not blocks:
        return _appended(text, f"{block_name} {{\n  {name}: {value}\n}}\n")
    if len(blocks[0].messages) != 1:
        raise RepositoryError(f"{block_name} is not a block in braces; write {block_name} {{ ... }}")
    (message,) = blocks[0].messages
    fields = message.all(name)
    if not fields:
        return _inserted(text, message, f"{name}: {value}")
    for extra in reversed(fields[1:]):
        text = text[: extra.start].rstrip(" \t") + text[extra.value[1] :]
    return text[: fields[0].start] + f"{name}: {value}" + text[fields[0].value[1] :]


def set_parameter(text: str, key: str, value: str) -> str:
    """Sets the entry `key` of the map `parameters` to a string; added if missing."""
    quoted = "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    for field in parse(text).all("parameters"):
        for entry in field.messages:
            if any(_string(text, name) == key for name in entry.all("key")):
                return _with_value(text, entry, quoted)
    return _appended(text, f'parameters {{ key: "{key}", value: {{ string_value: {quoted} }} }}\n')


def _with_value(text: str, entry: Message, quoted: str) -> str:
    for field in entry.all("value"):
        for message in field.messages:
            for old in message.all("string_value"):
                return text[: old.value[0]] + quoted + text[old.value[1] :]
            return _inserted(text, message, f"string_value: {quoted}")
    return _inserted(text, entry, f"value: {{ string_value: {quoted} }}")


def _string(text: str, field: Field) -> str:
    return text[slice(*field.value)].strip("\"'")


def _appended(text: str, addition: str) -> str:
    return text + ("" if not text or text.endswith("\n") else "\n") + addition


def _inserted(text: str, message: Message, field: str) -> str:
    """Puts a field first in a message: on a line of its own if the message has lines, else inline."""
    start, end = message.inner
    if message.fields and "\n" in text[start : message.fields[0].start]:
        place = message.fields[0].start
        indent = text[text.rfind("\n", 0, place) + 1 : place]
        if indent.strip() == "":
            return text[:place] + f"{field}\n{indent}" + text[place:]
    if not message.fields and "\n" in text[start:end]:
        outer = re.search(r"[ \t]*$", text[:end])
        return text[:start] + f"\n{outer.group() if outer else ''}  {field}" + text[start:]
    return text[:start] + f" {field}" + ("" if text[start : start + 1].isspace() else " ") + text[start:]


class _Parser:
    """Recursive descent over the tokens."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._scan())
        self._next = 0

    def file(self) -> Message:
        fields = tuple(self._fields(closer=None))
        return Message(fields, (0, len(self._text)))

    def _scan(self) -> Iterator[_Token]:
        place = 0
        while place < len(self._text):
            match = _TOKEN.match(self._text, place)
            if match is None:
                raise self._error("unexpected character", place)
            if match.lastgroup != "skip":
                yield _Token(str(match.lastgroup), match.group(), match.start(), match.end())
            place = match.end()

    def _fields(self, closer: str | None) -> Iterator[Field]:
        while (token := self._peek()) is not None and token.text != closer:
            yield self._field()
        if token is None and closer is not None:
            raise self._error(f"missing {closer!r}", len(self._text))

    def _field(self) -> Field:
        name = self._take()
        if name.kind != "word":
            raise self._error(f"expected a field name, not {name.text!r}", name.start)
        if (token := self._peek()) is not None and token.kind == "colon":
            self._take()
        start, end, messages = self._value()
        return Field(name.text, name.start, (start, end), messages)

    def _value(self) -> tuple[int, int, tuple[Message, ...]]:
        token = self._take()
        if token.text in ("{", "<"):
            fields = tuple(self._fields(_CLOSER[token.text]))
            close = self._take()
            return token.start, close.end, (Message(fields, (token.end, close.start)),)
        if token.text == "[":
            messages: list[Message] = []
            while (inner := self._peek()) is not None and inner.text != "]":
                messages += self._value()[2]
            return token.start, self._take().end, tuple(messages)
        if token.kind not in ("word", "string"):
            raise self._error(f"expected a value, not {token.text!r}", token.start)
        end = token.end
        while token.kind == "string" and (more := self._peek()) is not None and more.kind == "string":
            end = self._take().end  # adjacent strings are one value
        return token.start, end, ()

    def _peek(self) -> _Token | None:
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def _take(self) -> _Token:
        token = self._peek()
        if token is None:
            raise self._error("the file ends inside a field", len(self._text))
        self._next += 1
        return token

    def _error(self, what: str, place: int) -> RepositoryError:
        return RepositoryError(f"line {self._text.count(chr(10), 0, place) + 1}: {what}")
