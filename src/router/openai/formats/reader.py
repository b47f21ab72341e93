"""Reads the tokens of an answer into reasoning, content and calls; the same for streams and whole answers."""

from __future__ import annotations

from router.events import Token
from router.openai.formats.events import Arguments, ChatEvent, Content, Reasoning
from router.openai.formats.format import CallReader, Format
from router.openai.formats.markers import Markers
from router.openai.formats.reasoning import ReasoningStyle
from router.openai.formats.schema_types import ArgumentTypes
from router.openai.formats.source import Say, Steps, overlap

_Text = Content | Reasoning | Arguments


class AnswerReader:
    """One answer. Each visible character comes out in an event, is part of a mark, or is white space next to one."""

    def __init__(
        self,
        format: Format | None,
        style: ReasoningStyle | None,
        markers: Markers,
        *,
        types: ArgumentTypes,
        is_open: bool = False,
    ) -> None:
        """`format`: None where no calls are read. `is_open`: the prompt ends inside of the reasoning."""
        self._calls = CallReader(markers, types)
        self._format = format
        self._style = style
        self._markers = markers
        self._calls.is_reasoning = is_open and style is not None
        self._is_fresh = True  # only white space has come out
        self._is_unclosed = False  # a call has ended the reasoning, and its closing mark may follow
        self._trims = self._calls.is_reasoning  # white space that comes next belongs to a mark
        self._openers = tuple(map(markers.encoded, format.openers)) if format else ()
        self._closers = tuple(map(markers.encoded, format.closers)) if format else ()
        self._thinks = markers.encoded(style.opens) if style else ""
        self._answers = markers.encoded(style.closes) if style else ""
        self._steps = format.turn(self._calls) if format and format.turn else self._turn()
        self._is_done = False

    @property
    def num_complete_calls(self) -> int:
        return self._calls.num_complete

    @property
    def is_reasoning(self) -> bool:
        """Whether what has come so far ends inside of reasoning."""
        return self._calls.is_reasoning

    def read(self, text: str) -> list[ChatEvent]:
        """What more text brings, as `text_of` makes it from tokens."""
        if not text:
            return []
        self._calls.source.push(text)
        return self._resume()

    def end(self) -> list[ChatEvent]:
        """What is left at the end of the answer."""
        self._calls.source.is_complete = True
        return self._resume()

    def text_of(self, token: Token) -> str:
        """What `read` takes for a token."""
        return self._markers.text_of(token)

    def _resume(self) -> list[ChatEvent]:
        if not self._is_done:
            try:
                next(self._steps)
            except StopIteration:
                self._is_done = True
        events, self._calls.events = self._calls.events, []
        return merged(events)

    def _turn(self) -> Steps[None]:
        while True:
            if self._format is not None and self._is_fresh and not self._calls.is_reasoning:
                yield from self._start(self._format)
            say = self._say_reasoning if self._calls.is_reasoning else self._say_content
            space, mark = yield from self._text(say)
            if not mark:
                return
            if mark == self._answers:
                self._calls.is_reasoning, self._is_fresh, self._trims = False, True, True
                self._thinks, self._is_unclosed = "", False
            elif mark == self._thinks:
                self._calls.is_reasoning, self._trims = True, True
            elif mark in self._openers and self._format is not None:
                yield from self._read_calls(self._format, mark, space)
            else:
                say(space)  # the mark closes nothing

    def _marks(self) -> tuple[str, ...]:
        if self._calls.is_reasoning:
            return (*self._openers, self._answers)
        marks = self._openers + self._closers
        if self._thinks and self._is_fresh:
            marks += (self._thinks,)
        if self._is_unclosed or (self._style and self._markers.is_token(self._style.closes)):
            marks += (self._answers,)
        return marks

    def _start(self, format: Format) -> Steps[None]:
        """A call that begins the answer without a mark."""
        if not format.starts:
            return
        source = self._calls.source
        position = source.hold()
        yield from source.space()
        character = yield from source.peek()
        if character not in format.starts or not character:
            source.rewind(position)
            return
        before = self._calls.num_started
        yield from format.read(self._calls, "")
        if self._calls.num_started == before:
            source.rewind(position)
            self._is_fresh = False
        else:
            self._called()

    def _read_calls(self, format: Format, mark: str, space: str) -> Steps[None]:
        position, before = self._calls.source.hold(), self._calls.num_started
        opener = format.openers[self._openers.index(mark)]
        yield from format.read(self._calls, opener)
        if self._calls.num_started > before:
            self._called()
        else:
            self._calls.source.rewind(position)
            say = self._say_reasoning if self._calls.is_reasoning else self._say_content
            say(space + mark)

    def _called(self) -> None:
        self._is_unclosed |= self._calls.is_reasoning
        self._calls.is_reasoning, self._is_fresh, self._trims = False, False, True

    def _text(self, say: Say) -> Steps[tuple[str, str]]:
        """Passes on text up to the first mark, which is read; returns the white space before it and it, "" at the end.

        White space stays unread until it is known not to be next to a mark.
        """
        source = self._calls.source
        while True:
            if self._trims:
                rest = source.rest
                source.skip(len(rest) - len(rest.lstrip()))
            rest, marks = source.rest, self._marks()
            found = [(place, mark) for mark in marks if (place := rest.find(mark)) >= 0]
            if found:
                place, mark = min(found)
                text = rest[:place].rstrip()
                if mark == self._thinks and text:
                    say(rest[: place + len(mark)])  # within an answer it is text
                    source.skip(place + len(mark))
                    continue
                say(text)
                source.skip(place + len(mark))
                return rest[len(text) : place], mark
            if source.is_complete:
                say(rest.rstrip() if self._calls.is_reasoning else rest)
                source.skip(len(rest))
                return "", ""
            rest = rest[: len(rest) - overlap(rest, marks)].rstrip()
            say(rest)
            source.skip(len(rest))
            yield

    def _say_content(self, text: str) -> None:
        self._say(Content, text)

    def _say_reasoning(self, text: str) -> None:
        self._say(Reasoning, text)

    def _say(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        if text:
            self._trims = False
            if kind is Content and not text.isspace():
                self._is_fresh = False
            self._calls.say(kind, text)


def merged(events: list[ChatEvent]) -> list[ChatEvent]:
    """Neighbouring pieces of one text as one."""
    joined: list[ChatEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, _Text) and isinstance(last, _Text) and type(last) is type(event):
            joined[-1] = type(event)(last.text + event.text)
        else:
            joined.append(event)
    return joined
