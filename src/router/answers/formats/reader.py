"""Reads answers' tokens into reasoning, content and calls, streamed or whole."""

from __future__ import annotations

from router.answers.formats.events import Arguments, ChatEvent, Content, Reasoning
from router.answers.formats.format import CallReader, Format
from router.answers.formats.markers import Markers
from router.answers.formats.reasoning import ReasoningStyle
from router.answers.formats.schema_types import ArgumentTypes
from router.answers.formats.source import Say, Steps, overlap

_Text = Content | Reasoning | Arguments
_LONGEST_CITATION = 256


class AnswerReader:
    """One answer; visible characters become events, marks, or space beside these."""

    def __init__(
        self,
        format: Format | None,
        style: ReasoningStyle | None,
        markers: Markers,
        *,
        types: ArgumentTypes,
        is_open: bool = False,
        is_begun: bool = False,
        is_answering: bool = False,
    ) -> None:
        """Take the formats.

        Args:
            format: None: no calls.
            is_open: The prompt ends within reasoning; `is_begun`: past its mark.
            is_answering: The prompt ends with the mark that begins an answer.
        """
        self.text_of = markers.text_of
        """What `read` takes for a token."""
        self._calls = CallReader(markers, types)
        self._format = format
        self._calls.is_reasoning = is_open and style is not None
        self._is_fresh = True  # only white space has come out
        self._is_behind_call = False  # the same, since the last call
        self._is_unclosed = False  # a call has ended the reasoning, and its closing mark may follow
        self._trims = self._calls.is_reasoning and not is_begun  # white space that comes next belongs to a mark
        self._openers = tuple(map(markers.encoded, format.openers)) if format else ()
        self._closers = tuple(map(markers.encoded, format.closers)) if format else ()
        self._marks = _Marks(style, markers) if style else _Marks.none()
        self._may_think = not self._calls.is_reasoning
        self._is_wrapped = is_answering  # a mark around the answer has come
        self._steps = format.turn(self._calls) if format and format.turn else self._turn()
        self._is_done = False

    @property
    def num_complete_calls(self) -> int:
        return self._calls.num_complete

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends in reasoning."""
        return self._calls.is_reasoning

    def read(self, text: str) -> list[ChatEvent]:
        """Read more of `text_of`'s text."""
        if not text:
            return []
        self._calls.source.push(text)
        return self._resume()

    def end(self) -> list[ChatEvent]:
        """Return what is left."""
        self._calls.source.is_complete = True
        return self._resume()

    def _resume(self) -> list[ChatEvent]:
        if not self._is_done:
            try:
                next(self._steps)
            except StopIteration:
                self._is_done = True
        events, self._calls.events = self._calls.events, []
        return merged(events)

    def _turn(self) -> Steps[None]:
        marks = self._marks
        while True:
            if self._format is not None and self._is_fresh and not self._calls.is_reasoning:
                yield from self._start(self._format)
            say = self._say_reasoning if self._calls.is_reasoning else self._say_content
            space, mark = yield from self._text(say)
            if not mark:
                return
            if mark == marks.closes:
                self._calls.is_reasoning, self._is_fresh, self._trims = False, True, True
                self._may_think = self._is_unclosed = False
                self._is_wrapped = not marks.begins
            elif mark == marks.opens:
                self._calls.is_reasoning, self._trims = True, True
            elif mark in self._openers and self._format is not None:
                yield from self._read_calls(self._format, mark, space)
            elif mark in marks.inline:
                say(space)
                if not self._calls.visible(mark).endswith(">"):
                    yield from self._calls.source.until(">", limit=_LONGEST_CITATION)
            elif mark in (marks.begins, marks.ends):
                self._is_wrapped, self._trims = mark == marks.begins, True
            else:
                say(space)  # the mark closes nothing

    def _expected(self) -> tuple[str, ...]:
        """Return the marks that count here."""
        marks = self._marks
        if self._calls.is_reasoning:
            again = (marks.opens,) if self._trims else ()
            return (*self._openers, marks.closes, *again)
        found = [*self._openers, *marks.inline]
        if self._is_behind_call:
            found += self._closers
        if (self._may_think and self._is_fresh) or marks.may_come_again:
            found.append(marks.opens)
        if self._is_unclosed:
            found.append(marks.closes)
        if self._is_wrapped or self._is_fresh:
            found.append(marks.ends if self._is_wrapped else marks.begins)
        return tuple(filter(None, found))

    def _start(self, format: Format) -> Steps[None]:
        """Read a first call without a mark."""
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
        self._calls.is_reasoning, self._is_fresh, self._trims, self._is_behind_call = False, False, True, True

    def _text(self, say: Say) -> Steps[tuple[str, str]]:
        """Pass text up to a mark; return space before it, and it, "" at the end."""
        source = self._calls.source
        while True:
            if self._trims:
                rest = source.rest
                source.skip(len(rest) - len(rest.lstrip()))
            rest, marks = source.rest, self._expected()
            found = [(place, mark) for mark in marks if (place := rest.find(mark)) >= 0]
            if found:
                place, mark = min(found, key=lambda one: (one[0], self._is_only_first(one[1]), one[1]))
                text = rest[:place].rstrip()
                if text and self._is_only_first(mark):
                    if not source.is_complete and any(opener.startswith(rest[place:]) for opener in self._openers):
                        say(text)
                        source.skip(len(text))
                        yield
                        continue
                    say(rest[: place + len(mark)])  # within a text it is text
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

    def _is_only_first(self, mark: str) -> bool:
        """Whether the mark counts only first."""
        marks = self._marks
        if mark == marks.opens:
            return self._calls.is_reasoning or not marks.may_come_again
        return mark == marks.begins or (mark in self._closers and mark not in self._openers)

    def _say_content(self, text: str) -> None:
        self._say(Content, text)

    def _say_reasoning(self, text: str) -> None:
        self._say(Reasoning, text)

    def _say(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        if text:
            self._trims = False
            if kind is Content and not text.isspace():
                self._is_fresh = self._is_behind_call = False
            self._calls.say(kind, text)


class _Marks:
    """A style's encoded marks; empty ones never come."""

    def __init__(self, style: ReasoningStyle, markers: Markers) -> None:
        self.opens, self.closes = markers.encoded(style.opens), markers.encoded(style.closes)
        self.begins, self.ends = map(markers.encoded, style.around_answer)
        self.inline = tuple(map(markers.encoded, style.inline))
        self.may_come_again = style.may_come_again

    @classmethod
    def none(cls) -> _Marks:
        return cls(ReasoningStyle(name="", opens="", closes=""), Markers((), {}))


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
