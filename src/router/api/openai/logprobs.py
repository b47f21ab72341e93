"""Log probabilities: one name per token, and its bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from router.events import Token

_CUT = "\ufffd"  # what is shown where a token is not a whole character


class Named(NamedTuple):
    r"""A token by text, or `\xe2\x9c` for partial bytes."""

    name: str
    data: bytes
    is_text: bool
    logprob: Any


class TokenNames:
    """One vocabulary's names."""

    def __init__(self, token_bytes: Mapping[int, bytes]) -> None:
        self._bytes = token_bytes

    def chosen(self, token: Token) -> Named:
        """Name an answer's token by its text, unless part of a character."""
        data = self._bytes[token.id]
        text = _decoded(data)
        if text is not None and token.text and _CUT not in token.text:
            text, data = token.text, token.text.encode()
        return _named(text, data, token)

    def listed(self, top_tokens: Sequence[Token], chosen: Token) -> list[Named]:
        """Name the likeliest tokens, `chosen` alike among them."""
        return [self.chosen(chosen) if top.id == chosen.id else self.alone(top) for top in top_tokens]

    def alone(self, token: Token) -> Named:
        """Name a token by itself, whatever comes before it."""
        data = self._bytes[token.id]
        text = _decoded(data)
        # Decoders drop the space that begins a text; and what they say of other kinds is better than the vocabulary.
        if text is not None and token.text and _CUT not in token.text and text.strip() != token.text.strip():
            text, data = token.text, token.text.encode()
        return _named(text, data, token)


def chat_logprob(names: TokenNames, token: Token, top_tokens: Sequence[Token]) -> dict[str, Any]:
    """One entry of a choice's `logprobs.content`."""
    tops = [_entry(top) for top in names.listed(top_tokens, token)]
    return _entry(names.chosen(token)) | {"top_logprobs": tops}


def _entry(one: Named) -> dict[str, Any]:
    return {"token": one.name, "logprob": one.logprob, "bytes": list(one.data)}


def _named(text: str | None, data: bytes, token: Token) -> Named:
    if text is not None:
        return Named(text, data, True, token.logprob)
    return Named("".join(f"\\x{byte:02x}" for byte in data), data, False, token.logprob)


def _decoded(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
