"""The model's tokenizer.json, with end and special tokens of its configs. Never imports transformers.

`clean_up_tokenization_spaces` is not applied: it changes produced text, and transformers 5 dropped it.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Backend

from model_server.errors import RequestError, StartupError
from wire import tokenizer_file
from wire.model_files import (
    NAMED_TOKENS,
    length_limit,
    read_optional_config,
    read_optional_object,
    read_tokenizer,
    token_text,
)
from wire.text.added_tokens import add_tokens, tokenizer_settings
from wire.text.prefix_space import set_prefix_space
from wire.text.token_bytes import byte_level
from wire.text.tokenizer_failure import reason_of

_TOKEN_LISTS = ("additional_special_tokens", "extra_special_tokens")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Text to ids and back, on any thread."""

    def __init__(
        self,
        backend: _Backend,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        special_tokens: Iterable[str] = (),
        model_max_length: int | None = None,
        bos_token: str = "",
    ) -> None:
        """Take a tokenizer, with texts that configs call special."""
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._truncation = 0  # the limit set in the backend; 0: none
        self._lock = threading.Lock()
        vocabulary = backend.get_vocab(with_added_tokens=True)
        flagged = {number for number, token in backend.get_added_tokens_decoder().items() if token.special}
        named = {vocabulary[token] for token in special_tokens if token in vocabulary}
        self.eos_token_ids = eos_token_ids
        self.special_ids = frozenset(flagged | named)
        self.model_max_length = model_max_length
        self.bos_token = bos_token
        self.vocab_size = tokenizer_file.num_ids(vocabulary.values(), StartupError)
        self._texts: dict[int, str] = {}

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Read a model's folder."""
        path = tokenizer_file.find(model_dir)
        if path is None:
            raise StartupError(
                f"{model_dir} has no tokenizer.json: fetch or convert the model first (`model-server download-weights`)"
            )
        try:
            backend = _Backend.from_str(read_tokenizer(path, StartupError))
            set_prefix_space(backend, model_dir, StartupError)
            add_tokens(backend, model_dir, StartupError)
        except StartupError:
            raise
        except BaseException as error:
            raise StartupError(f"cannot load the tokenizer {path}: {reason_of(error)}") from None
        tokenizer_config = _read_json(model_dir / "tokenizer_config.json")
        settings = tokenizer_settings(model_dir, tokenizer_config, StartupError)
        generation = _read_json(model_dir / "generation_config.json").get("eos_token_id")
        if generation is None:
            # As transformers: without a generation config the model's config is used.
            config = read_optional_config(model_dir / "config.json", StartupError)
            text_config = config.get("text_config")
            generation = config.get("eos_token_id")
            if generation is None and isinstance(text_config, dict):
                generation = text_config.get("eos_token_id")
        eos_token_ids = set(_ids(generation))
        eos_token = token_text(settings.get("eos_token"))
        if eos_token is not None and (own := backend.token_to_id(eos_token)) is not None:
            eos_token_ids.add(own)
        return cls(
            backend,
            eos_token_ids=frozenset(eos_token_ids),
            special_tokens=_special_tokens(settings),
            model_max_length=length_limit(tokenizer_config.get("model_max_length")),
            bos_token=token_text(settings.get("bos_token")) or "",
        )

    def encode(self, text: str, *, truncate: int, add_special_tokens: bool) -> list[int]:
        """Return a prompt's last `truncate` ids, special ones counted; 0: all. As in TGI's shard.

        Raises:
            TypeError: The text has lone surrogates.
            RequestError: The library failed.
        """
        with self._lock:  # truncation is a setting of the backend
            if truncate != self._truncation:
                if truncate > 0:
                    self._backend.enable_truncation(truncate, direction="left")
                else:
                    self._backend.no_truncation()
                self._truncation = truncate
            try:
                ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            except (TypeError, UnicodeError):
                raise
            except BaseException as error:
                raise RequestError(f"the model's tokenizer fails on this text: {reason_of(error)}") from None
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of ids, unknown ones being nothing.

        Raises:
            RequestError: The library failed.
        """
        if skip_special_tokens:
            ids = [number for number in ids if number not in self.special_ids]
        try:
            text: str = self._backend.decode(ids, skip_special_tokens=False)
        except BaseException as error:
            raise RequestError(f"the model's tokenizer fails on these tokens: {reason_of(error)}") from None
        return text

    def to_json(self) -> str:
        with self._lock:
            self._backend.no_truncation()  # else the limit of the last prompt would be in it
            self._truncation = 0
            text: str = self._backend.to_str()
        return text

    def pieces(self) -> dict[int, str]:
        """Return the vocabulary's text of each id."""
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return {token_id: piece for piece, token_id in vocabulary.items()}

    def decode_one(self, token_id: int) -> str:
        """Return one id's text, remembered."""
        text = self._texts.get(token_id)
        if text is None:
            text = self.decode([token_id], skip_special_tokens=False)
            if 0 <= token_id < self.vocab_size:
                self._texts[token_id] = text
        return text

    @cached_property
    def byte_pieces(self) -> BytePieces | None:
        """Return each id's bytes, for byte-level decoders only."""
        kinds = [kind for kind, _ in self._decoder_steps]
        return BytePieces(self._backend) if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]) else None

    @cached_property
    def fallback_bytes(self) -> dict[int, int]:
        """Return the ids of single bytes (`<0xE4>`), if the decoder joins them."""
        if all(kind != "ByteFallback" for kind, _ in self._decoder_steps):
            return {}
        found = {}
        for token, number in self._backend.get_vocab(with_added_tokens=True).items():
            if match := _BYTE_TOKEN.fullmatch(token):
                found[number] = int(match[1], 16)
        return found

    @cached_property
    def known_pieces(self) -> dict[int, str] | None:
        """Return room for tokens' texts, for decoders that add the same text except at the start (sentencepiece)."""
        steps = list(self._decoder_steps)
        if steps and steps[-1][0] == "Strip" and steps[-1][1].get("stop") == 0:
            steps.pop()
        if steps and steps[-1][0] == "Fuse":
            steps.pop()
        return {} if steps and all(kind in ("Replace", "ByteFallback", "Metaspace") for kind, _ in steps) else None

    @cached_property
    def _decoder_steps(self) -> list[tuple[str, dict[str, Any]]]:
        decoder = self._backend.decoder
        if decoder is None:
            return []
        state = json.loads(decoder.__getstate__())
        steps = state["decoders"] if state["type"] == "Sequence" else [state]
        return [(step["type"], step) for step in steps]


class BytePieces(dict[int, tuple[bytes, str | None]]):
    """Each id's bytes, also as text if whole, filled on first use."""

    def __init__(self, backend: _Backend) -> None:
        super().__init__()
        self._backend = backend

    def __missing__(self, token_id: int) -> tuple[bytes, str | None]:
        token = self._backend.id_to_token(token_id)
        data = b"" if token is None else byte_level(token)
        try:
            piece: tuple[bytes, str | None] = (data, data.decode())
        except UnicodeDecodeError:
            piece = (data, None)
        if token is not None:
            self[token_id] = piece
        return piece


def _special_tokens(settings: dict[str, Any]) -> list[str]:
    values = [settings.get(name) for name in NAMED_TOKENS]
    for name in _TOKEN_LISTS:
        more = settings.get(name)
        values.extend(more.values() if isinstance(more, dict) else more if isinstance(more, list) else ())
    return [text for value in values if (text := token_text(value)) is not None]


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [number for number in values if isinstance(number, int) and not isinstance(number, bool)]


def _read_json(path: Path) -> dict[str, Any]:
    return read_optional_object(path, StartupError)
