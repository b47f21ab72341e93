"""The fewest tokens of so many bytes, by the longest token, to refuse prompts early; only for lossless tokenizers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

# Bytes of a text that may become one byte of the normalised text: a compatibility form 4 (a digit of a seven-segment
# display), and what that leaves is composed 3 to 1 at most (Sinhala, Hangul).
_UNICODE_SHRINKS = 12
_LOWERCASE_SHRINKS = 3  # the Kelvin sign
_UNICODE_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_KEEP_EVERYTHING = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")
_MAY_REMOVE = ("Split", "Punctuation")
_NUM_BYTES = 256


@dataclass(frozen=True, slots=True)
class TokenBound:
    """Bytes of a token (`most_bytes`), and how normalising shrinks."""

    most_bytes: int
    shrinks: int

    def fewest_tokens(self, text: str) -> int:
        if text.isascii():
            return -(-len(text) // self.most_bytes)
        return -(-len(text.encode()) // (self.most_bytes * self.shrinks))


def token_bound(tokenizer: Tokenizer) -> TokenBound | None:
    """Return the bound, unless the tokenizer may drop or merge any text."""
    state = json.loads(tokenizer.to_str())
    shrinks = _shrinkage(state["normalizer"])
    kept = _pre_tokenizer_keeps(state["pre_tokenizer"])
    # A token that takes the blanks beside it with it covers any number of them.
    strips = any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"])
    if shrinks is None or not kept or strips or not _has_all_bytes(state, tokenizer):
        return None
    return TokenBound(_most_bytes(state, tokenizer), shrinks)


def _most_bytes(state: dict[str, Any], tokenizer: Tokenizer) -> int:
    added = {token["content"] for token in state["added_tokens"]}
    of_added = max((len(token.encode()) for token in added), default=1)
    own = tokenizer.get_vocab(with_added_tokens=True).keys() - added
    # In the byte-level alphabet a character is a byte.
    length = len if _spells_bytes(state) else _utf8_length
    return max(of_added, max(map(length, own)))


def _utf8_length(token: str) -> int:
    return len(token.encode())


def _shrinkage(normalizer: dict[str, Any] | None) -> int | None:
    """Return the normalizer's shrinkage, if bounded."""
    if normalizer is None:
        return 1
    kind = normalizer["type"]
    if kind == "Sequence":
        product = 1
        for step in normalizer["normalizers"]:
            factor = _shrinkage(step)
            if factor is None:
                return None
            product *= factor
        return product
    if kind in _UNICODE_FORMS:
        return _UNICODE_SHRINKS
    if kind == "Lowercase":
        return _LOWERCASE_SHRINKS
    if kind == "Replace":
        replaced = normalizer["pattern"].get("String")
        return 1 if replaced is not None and len(replaced.encode()) <= len(normalizer["content"].encode()) else None
    return 1 if kind in ("Prepend", "ByteLevel") else None


def _pre_tokenizer_keeps(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether every byte is in a piece."""
    if pre_tokenizer is None:
        return True
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return all(_pre_tokenizer_keeps(step) for step in pre_tokenizer["pretokenizers"])
    if kind in _MAY_REMOVE:
        return bool(pre_tokenizer["behavior"] != "Removed")
    return kind in _KEEP_EVERYTHING


def _has_all_bytes(state: dict[str, Any], tokenizer: Tokenizer) -> bool:
    """Whether unknown text is spelled in bytes."""
    model = state["model"]
    if model["type"] == "BPE" and not model.get("byte_fallback"):
        alphabet = ByteLevel.alphabet() if _spells_bytes(state) else None
    elif model["type"] in ("BPE", "Unigram") and model.get("byte_fallback"):
        alphabet = [f"<0x{byte:02X}>" for byte in range(_NUM_BYTES)]
    else:
        alphabet = None
    return alphabet is not None and all(tokenizer.token_to_id(token) is not None for token in alphabet)


def _spells_bytes(state: dict[str, Any]) -> bool:
    """Whether pieces are byte-level before tokenizing."""
    return _is_byte_level(state["normalizer"]) or _is_byte_level(state["pre_tokenizer"])


def _is_byte_level(step: dict[str, Any] | None) -> bool:
    if step is None:
        return False
    if step["type"] == "Sequence":
        return any(_is_byte_level(one) for one in step.get("normalizers") or step.get("pretokenizers") or ())
    return bool(step["type"] == "ByteLevel")
