"""Bytes of each token, for clients that join characters."""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer

from wire.text.token_bytes import byte_level

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "▁"


class TokenBytes(dict[int, bytes]):
    """Each id's bytes, filled on first use."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
        kinds = _decoder_kinds(tokenizer)
        self._is_byte_level = "ByteLevel" in kinds
        self._has_bytes = "ByteFallback" in kinds

    def __missing__(self, token_id: int) -> bytes:
        data = self[token_id] = self._of(token_id)
        return data

    def _of(self, token_id: int) -> bytes:
        if (added := self._added.get(token_id)) is not None:
            return added.encode()
        token = self._tokenizer.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self._is_byte_level:
            return byte_level(token)
        if self._has_bytes and (found := _BYTE.fullmatch(token)):
            return bytes([int(found[1], 16)])
        return token.replace(_SPACE, " ").encode()


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    decoder = tokenizer.decoder
    if decoder is None:
        return set()
    state: dict[str, Any] = json.loads(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    return {step["type"] for step in steps}
