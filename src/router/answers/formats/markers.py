"""From tokens to text with each marker token as one character, a lone surrogate, unlike the same letters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from router.events import Token

_FIRST = 0xD800


class Markers:
    """The markers of one model."""

    def __init__(self, marks: Iterable[str], added_tokens: Mapping[str, int], special: Collection[str] = ()) -> None:
        """Map marks that are tokens; others stay letters."""
        tokens = sorted({mark for mark in marks if mark in added_tokens}, key=lambda mark: (-len(mark), mark))
        self._characters = {text: chr(_FIRST + number) for number, text in enumerate(tokens)}
        self._texts = {ord(character): text for text, character in self._characters.items()}
        self._shown = self._texts | {ord(self._characters[text]): "" for text in tokens if text in special}
        self._ids = {text: added_tokens[text] for text in tokens}
        self._by_id = {number: text for text, number in self._ids.items()}

    def encoded(self, text: str) -> str:
        """Encode a format's text, a character per token."""
        for mark, character in self._characters.items():
            text = text.replace(mark, character)
        return text

    def visible(self, text: str) -> str:
        """The opposite."""
        return text.translate(self._texts)

    def shown(self, text: str) -> str:
        """Return the visible text without special tokens."""
        return text.translate(self._shown)

    def is_token(self, mark: str) -> bool:
        return mark in self._characters

    @property
    def ids(self) -> list[int]:
        return sorted(self._by_id)

    def pieces(self, text: str) -> list[str | int]:
        """Split a format's text into token ids and texts."""
        pieces: list[str | int] = []
        for character in self.encoded(text):
            mark = self._texts.get(ord(character))
            if mark is not None:
                pieces.append(self._ids[mark])
            elif pieces and isinstance(pieces[-1], str):
                pieces[-1] += character
            else:
                pieces.append(character)
        return pieces

    def text_of(self, token: Token) -> str:
        """Return a token's text; other special ones add none."""
        mark = self._by_id.get(token.id)
        if mark is None:
            return "" if token.special else token.text
        # A character that was incomplete before may come with the marker.
        before = token.text.removesuffix(mark)
        return self._characters[mark] if token.special else before + self._characters[mark]
