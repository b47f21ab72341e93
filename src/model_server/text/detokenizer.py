"""Ids to text, piece by piece while a request runs, and whole at its end."""

# One rule for every tokenizer: `append` holds back only the bytes of a character that is not complete yet. They come
# with the token that completes them. So the pieces joined are the decoded text, special tokens kept, and what is cut
# off inside a character at the end never shows, neither in the pieces nor in the final text (TGI's final text is empty
# in that case, `models/model.py:decode_token`). There is nothing to flush.
#
# Byte-level decoders (GPT-2's) go by a table of bytes per id and an incremental UTF-8 decoder. Others decode each token
# after the few tokens before it, as TGI does with prefix and read offsets.

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from model_server.text.tokenizer import BytePieces, Tokenizer

# How many tokens of context decide about leading spaces; TGI starts with as many.
_CONTEXT = 5
# A character has at most four bytes, so what a prompt leaves open is in its last three tokens.
_OPEN_TOKENS = 3
_REPLACEMENT = "�"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _REPLACEMENT * (error.end - error.start), error.end


# The byte-fallback decoder shows one replacement per invalid byte; Python's "replace" one per broken character.
_EACH_BYTE = "tercet.replace_each_byte"
codecs.register_error(_EACH_BYTE, _replace_each_byte)


class Detokenizer:
    """One request's text; `prompt_ids` give the first token's context."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        pieces = tokenizer.byte_pieces
        self._decoder: _Decoder = (
            _GeneralDecoder(tokenizer, prompt_ids)
            if pieces is None
            else _ByteLevelDecoder(pieces, tokenizer.special_ids, prompt_ids)
        )

    def append(self, token_id: int) -> str:
        """Return the text that a token completes, special tokens as text."""
        return self._decoder.append(token_id)

    def final_text(self) -> str:
        """Return the text without special tokens or an incomplete end."""
        return self._decoder.final_text()


class _Decoder(Protocol):
    def append(self, token_id: int) -> str: ...

    def final_text(self) -> str: ...


class _ByteLevelDecoder:
    def __init__(self, pieces: BytePieces, special_ids: frozenset[int], prompt_ids: Sequence[int]) -> None:
        self._pieces = pieces
        self._special_ids = special_ids
        self._ids: list[int] = []
        tail = b"".join(pieces[token_id][0] for token_id in prompt_ids[-_OPEN_TOKENS:])
        _, used = codecs.utf_8_decode(tail, "replace", False)
        self._open = tail[used:]
        self._opened_by_prompt = self._open

    def append(self, token_id: int) -> str:
        self._ids.append(token_id)
        data, text = self._pieces[token_id]
        if text is not None and not self._open:
            return text
        data = self._open + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._open = data[used:]
        return text

    def final_text(self) -> str:
        pieces, special_ids = self._pieces, self._special_ids
        data = b"".join([pieces[token_id][0] for token_id in self._ids if token_id not in special_ids])
        return codecs.utf_8_decode(self._opened_by_prompt + data, "replace", False)[0]


class _GeneralDecoder:
    """Any decoder of the library, with byte tokens joined here."""

    # The library judges a whole run of them at once, so that one invalid byte takes back characters which have been
    # streamed. Here only the invalid bytes become replacements.
    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._bytes = tokenizer.fallback_bytes
        self._open = b""
        self._context = list(prompt_ids[-_CONTEXT:])
        self._last_prompt_ids = list(prompt_ids[-1:])
        self._ids: list[int] = []
        self._known = tokenizer.known_pieces
        # Only the very start of a text is special, so known pieces hold once there is text.
        self._started = bool(self._context) and tokenizer.decode(self._context, skip_special_tokens=False) != ""
        for token_id in prompt_ids[-_OPEN_TOKENS:]:
            if token_id in self._bytes:
                self._append_byte(token_id)
            else:
                self._open = b""

    def append(self, token_id: int) -> str:
        self._ids.append(token_id)
        if token_id in self._bytes:
            text = self._append_byte(token_id)
        else:
            text = _REPLACEMENT * len(self._open) + self._text_of(token_id)
            self._open = b""
        self._context.append(token_id)
        if len(self._context) > _CONTEXT:
            del self._context[0]
        self._started = self._started or text != ""
        return text

    def final_text(self) -> str:
        tokenizer = self._tokenizer
        ids = [token_id for token_id in self._ids if token_id not in tokenizer.special_ids]
        before = [token_id for token_id in self._last_prompt_ids if token_id not in tokenizer.special_ids]
        text = tokenizer.decode(before + ids, skip_special_tokens=False)
        if _REPLACEMENT not in text:
            return text[len(tokenizer.decode(before, skip_special_tokens=False)) :]
        again = _GeneralDecoder(tokenizer, before)
        return "".join([again.append(token_id) for token_id in ids])

    def _append_byte(self, token_id: int) -> str:
        data = self._open + bytes([self._bytes[token_id]])
        text, used = codecs.utf_8_decode(data, _EACH_BYTE, False)
        self._open = data[used:]
        return text

    def _text_of(self, token_id: int) -> str:
        """Return what a token adds after the context."""
        if self._started and self._known is not None and (known := self._known.get(token_id)) is not None:
            return known
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        text = self._tokenizer.decode([*self._context, token_id], skip_special_tokens=False)[len(before) :]
        if before and self._known is not None:
            self._known[token_id] = text
        return text
