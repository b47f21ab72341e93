"""Counts, truncates and shows tokens in worker threads, by the shard's own tokenizer.json and truncation."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tokenizers import Encoding, Tokenizer

from router.errors import StartupError, ValidationError
from router.text.spans import TokenSpans
from router.text.token_bound import token_bound
from router.text.token_bytes import TokenBytes
from router.worker import memory
from router.worker.lane import Lanes
from wire.model_files import read_tokenizer
from wire.text.added_tokens import add_tokens
from wire.text.prefix_space import set_prefix_space
from wire.text.tokenizer_failure import reason_of
from wire.tokenizer_file import num_ids

# Up to this length encoding costs the loop about as much (1 us a character) as a hop to a thread and back (60-90 us of
# the loop's time), and saves the wait for the thread.
_INLINE_CHARACTERS = 100
# Longer texts, which take from some hundredths of a second to some seconds each, are queued apart from the others.
LONG_CHARACTERS = 32 * 1024
_CHARACTERS_OF_AN_ID = 4
# A character whose tokens do not complete it waits for this many more of them before it is shown as it is.
_MOST_UNFINISHED = 8


def load_tokenizer(path: Path, folder: Path | None) -> Tokenizer:
    """Read a tokenizer.json, with further tokens of the model in `folder`."""
    folder = path.parent if folder is None else folder
    try:
        tokenizer = Tokenizer.from_str(read_tokenizer(path, StartupError))
        set_prefix_space(tokenizer, folder, StartupError)
        add_tokens(tokenizer, folder, StartupError)
    except StartupError:
        raise
    except BaseException as error:
        raise StartupError(f"cannot load the tokenizer {path}: {reason_of(error)}") from None
    return tokenizer


class PromptTokenizer:
    """The tokenizer, one per worker for its truncation setting, one for texts beyond LONG_CHARACTERS."""

    def __init__(self, tokenizer: Tokenizer, *, num_workers: int) -> None:
        # There are gaps in some vocabularies. Looked at first: what follows takes time and memory for each id.
        ids = frozenset(tokenizer.get_vocab(with_added_tokens=True).values())
        self.vocab_size = num_ids(ids, StartupError)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._on_loop = tokenizer
        self._source = tokenizer.to_str()
        added = tokenizer.get_added_tokens_decoder()
        self.added_tokens = {token.content: number for number, token in added.items()}
        self.special_tokens = frozenset(token.content for token in added.values() if token.special)
        self._per_thread = threading.local()
        self._lanes = Lanes(
            "tokenizer", large_from=LONG_CHARACTERS, num_threads=num_workers, after_large=memory.give_back
        )
        self._ids_with_gaps = None if len(ids) == self.vocab_size else ids
        self.token_bytes = TokenBytes(tokenizer)
        self._bound = token_bound(tokenizer)

    @classmethod
    def from_file(cls, path: Path, *, num_workers: int, folder: Path | None = None) -> PromptTokenizer:
        """Load a tokenizer of the model in `folder`."""
        return cls(load_tokenizer(path, folder), num_workers=num_workers)

    async def encode(
        self, text: str, *, add_special_tokens: bool, truncate: int | None, parse_special: bool = True
    ) -> list[int]:
        """Return a prompt's last `truncate` ids.

        Args:
            parse_special: Special tokens in the text are tokens, else text.
        """
        if len(text) <= _INLINE_CHARACTERS and parse_special:
            return _ids(self._on_loop, text, add_special_tokens, truncate)
        return await self._lanes.run(
            len(text), partial(self._encode, text, add_special_tokens, truncate, parse_special)
        )

    def fewest_tokens(self, text: str) -> int:
        """Bound a text's tokens from below; 0: unknown."""
        return self._bound.fewest_tokens(text) if self._bound is not None else 0

    def first_unknown(self, ids: Sequence[int]) -> int | None:
        """Return the first unknown id."""
        if self._ids_with_gaps is None:
            return next((i for i in ids if not 0 <= i < self.vocab_size), None)
        return next((i for i in ids if i not in self._ids_with_gaps), None)

    async def spans(self, text: str, *, add_special_tokens: bool) -> TokenSpans:
        return await self._lanes.run(len(text), partial(self._spans, text, add_special_tokens))

    async def offsets(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return where tokens begin, in characters; special ones at 0."""
        return await self._lanes.run(len(text), partial(self._offsets, text, add_special_tokens))

    def name_of(self, token_id: int) -> str:
        """Return a token as the vocabulary writes it."""
        return self._on_loop.id_to_token(token_id) or ""

    async def text_of(self, ids: Sequence[int]) -> str:
        """Return ids' text, special tokens included."""
        return await self._lanes.run(_CHARACTERS_OF_AN_ID * len(ids), partial(self._decode, list(ids)))

    async def offsets_of_ids(self, ids: Sequence[int]) -> list[int]:
        """Return where tokens begin in `text_of(ids)`."""
        return await self._lanes.run(_CHARACTERS_OF_AN_ID * len(ids), partial(self._offsets_of_ids, list(ids)))

    def close(self) -> None:
        self._lanes.close()

    @property
    def _tokenizer(self) -> Tokenizer:
        try:
            tokenizer: Tokenizer = self._per_thread.tokenizer
        except AttributeError:
            tokenizer = self._per_thread.tokenizer = Tokenizer.from_str(self._source)
        return tokenizer

    # In a worker.

    def _encode(self, text: str, add_special_tokens: bool, truncate: int | None, parse_special: bool) -> list[int]:
        tokenizer = self._tokenizer
        tokenizer.encode_special_tokens = not parse_special
        try:
            return _ids(tokenizer, text, add_special_tokens, truncate)
        finally:
            tokenizer.encode_special_tokens = False

    def _spans(self, text: str, add_special_tokens: bool) -> TokenSpans:
        return TokenSpans(text, self._encoding(text, add_special_tokens))

    def _offsets(self, text: str, add_special_tokens: bool) -> list[int]:
        return [start for start, _ in self._encoding(text, add_special_tokens).offsets]

    def _offsets_of_ids(self, ids: list[int]) -> list[int]:
        """Decode a few tokens at a time, since texts depend on those before."""
        offsets: list[int] = []
        position = first = shown = 0
        for number in range(1, len(ids) + 1):
            offsets.append(position)
            before, after = self._decode(ids[first:shown]), self._decode(ids[first:number])
            if (len(after) > len(before) and not after.endswith("\ufffd")) or number - shown > _MOST_UNFINISHED:
                position += max(len(after) - len(before), 0)
                first, shown = shown, number
        return offsets

    def _encoding(self, text: str, add_special_tokens: bool) -> Encoding:
        try:
            encodings: list[Encoding] = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        except BaseException as error:
            raise _refusal(error) from None
        return encodings[0]

    def _decode(self, ids: list[int]) -> str:
        try:
            (text,) = self._tokenizer.decode_batch([ids], skip_special_tokens=False)
        except BaseException as error:
            raise _refusal(error) from None
        return str(text)


def _refusal(error: BaseException) -> ValidationError:
    return ValidationError(f"tokenizer error: the model's tokenizer fails on this text: {reason_of(error)}")


def _ids(tokenizer: Tokenizer, text: str, add_special_tokens: bool, truncate: int | None) -> list[int]:
    # The batch calls let go of the interpreter while they work, `encode` was seen to keep it for seconds; the fast one
    # leaves out the offsets.
    if truncate is not None:
        tokenizer.enable_truncation(truncate, direction="left")
    try:
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except BaseException as error:
        raise _refusal(error) from None
    finally:
        if truncate is not None:
            tokenizer.no_truncation()
    ids: list[int] = encoding.ids
    return ids
