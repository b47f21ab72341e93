"""A format, and its reader's tools."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from router.answers.formats.events import Arguments, CallEnded, CallStarted, ChatEvent, Content, Reasoning
from router.answers.formats.markers import Markers
from router.answers.formats.schema_types import ArgumentTypes
from router.answers.formats.source import Source, Steps


class CallReader:
    """The text read, calls out, and model's and functions' facts."""

    def __init__(self, markers: Markers, types: ArgumentTypes) -> None:
        self.source = Source()
        self.types = types
        self.events: list[ChatEvent] = []
        self.num_started = 0
        self.num_complete = 0
        self.is_reasoning = False  # what has come so far ends inside of reasoning
        self._markers = markers

    def mark(self, text: str) -> str:
        """Encode a format's text like the source."""
        return self._markers.encoded(text)

    def visible(self, text: str) -> str:
        return self._markers.visible(text)

    def space_and(self, *marks: str) -> Steps[str]:
        """Skip white space, and read a mark if next; half marks at the end are skipped."""
        yield from self.source.space()
        encoded = {self.mark(mark): mark for mark in marks}
        found = yield from self.source.literal(*encoded)
        if not found and (rest := self.source.rest) and any(mark.startswith(rest) for mark in encoded):
            self.source.skip(len(rest))
        return encoded.get(found, "")

    def attempt(self, call: Steps[bool]) -> Steps[bool]:
        """Read a call, or nothing if it breaks before its name."""
        position, before = self.source.hold(), self.num_started
        is_complete = yield from call
        if self.num_started == before:
            self.source.rewind(position)
            return False
        if not is_complete and self.source.is_complete:
            self.source.skip(len(self.source.rest))  # half of a key or of a mark
        self.events.append(CallEnded(is_complete))
        self.num_complete += is_complete
        return is_complete

    def calls(self, call: Callable[[CallReader], Steps[bool]], end: str) -> Steps[None]:
        """Read calls in a row, and behind any the mark that ends them."""
        before = self.num_started
        while (yield from self.attempt(call(self))):
            pass
        if self.num_started > before:
            yield from self.space_and(end)

    def start(self, name: str, own_id: str | None = None) -> None:
        self.source.release()
        self.num_started += 1
        self.events.append(CallStarted(self.visible(name), own_id))

    def say(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        if text := self._markers.shown(text):
            self.events.append(kind(text))

    def argue(self, text: str) -> None:
        """Pass on arguments' JSON."""
        if text := self._markers.shown(text):
            self.events.append(Arguments(text))


class ObjectWriter:
    """Writes arguments key by key as JSON."""

    def __init__(self, reader: CallReader) -> None:
        self._reader = reader
        self._begin = "{"

    def key(self, name: str) -> None:
        quoted = json.dumps(self._reader.visible(name), ensure_ascii=False)
        self._reader.argue(f"{self._begin}{quoted}: ")
        self._begin = ", "

    def value(self, json_text: str) -> None:
        self._reader.argue(json_text)

    def end(self) -> None:
        self._reader.argue("{}" if self._begin == "{" else "}")


class IdKind(Enum):
    """Which call ids a template accepts."""

    RANDOM = "random"
    SHORT = "short"  # nine letters and digits
    COUNTED = "counted"  # functions.NAME:NUMBER, counted through the chat

    def new(self, name: str, number: int) -> str:
        """Make the id of a call, `number` before it."""
        if self is IdKind.COUNTED:
            return f"functions.{name}:{number}"
        return uuid.uuid4().hex[:9] if self is IdKind.SHORT else f"call_{uuid.uuid4().hex[:24]}"

    def accepts(self, own_id: str) -> bool:
        """Whether the model's own id serves."""
        if self is IdKind.SHORT:
            return re.fullmatch(r"[A-Za-z0-9]{9}", own_id) is not None
        return self is IdKind.COUNTED and re.fullmatch(r"functions\..+:\d+", own_id, re.DOTALL) is not None


class Values(Enum):
    """How arguments are written outside of JSON objects."""

    TAGGED = "tagged"  # a text as it is, others as JSON
    PYTHON = "python words"  # JSON, and Python's words for true and false
    NESTED = "nested"  # as TAGGED, and an element of its own for each value within a list or object
    BARE = "bare"  # Gemma's: texts between quotes of their own, objects with bare keys


@dataclass(frozen=True, kw_only=True)
class ArgumentsForm:
    """How arguments are written one by one."""

    values: Values
    before_key: str = ""
    behind_key: str
    behind_value: str = ""
    between: str = ""
    ends_text: tuple[str, ...] = ()  # what no text holds
    quote: str = ""
    is_typed: bool = False  # text between quotes may be JSON
    kinds: Mapping[str, str] | None = None  # what stands for KIND behind a key, by the value's type
    names: str = r"[\w.:/-]+"  # of functions


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """How a grammar forces calls.

    INDEX: a number; SPACE: optional white space; LINE_END: an optional one; SEPARATOR: semicolon or line end; OWN_ID:
    Mistral's optional id; KIND, NAME: the type of a value, and its key; SAME_NAME: the function's name
    once more.
    """

    before_name: str
    behind_name: str
    behind_arguments: str = ""
    begin: str = ""  # before the first call
    between: str = ""
    end: str = ""  # behind the last one
    trigger: str | None = ""  # the token that opens a call, where it is none of the first two; None: no token alone
    answers: str = ""  # before an answer in words
    arguments: ArgumentsForm | None = None  # None: a JSON object
    thinks: tuple[str, str] = ("", "")  # the marks of thinking, in a format that reads it itself


INDEX = "\ue000"
SPACE = "\ue001"
LINE_END = "\ue002"
SEPARATOR = "\ue003"
OWN_ID = "\ue004"
KIND = "\ue005"
NAME = "\ue006"
SAME_NAME = "\ue007"

Read = Callable[[CallReader, str], Steps[None]]


@dataclass(frozen=True, kw_only=True)
class Format:
    """A form of tool calls; `read` begins behind an opener or before a start."""

    name: str
    read: Read
    openers: tuple[str, ...]
    starts: tuple[str, ...] = ()  # begin a call at the beginning of an answer only
    closers: tuple[str, ...] = ()  # are dropped where no call is open
    others: tuple[str, ...] = ()  # further marks that may be tokens
    ids: IdKind = IdKind.RANDOM
    is_one: bool = False  # one call for each answer
    describes: bool = False  # its templates fail where a function has no description
    aliases: tuple[str, ...] = ()  # names of other servers' parsers
    signs: Callable[[str], bool]  # whether a template is written for it
    form: CallForm | None = None  # None: calls are not forced in this format
    turn: Callable[[CallReader], Steps[None]] | None = None  # reads a whole answer instead, reasoning included

    @property
    def marks(self) -> Iterable[str]:
        """All that may be tokens."""
        return (*self.openers, *self.closers, *self.others)
