"""From texts to tokens: prompts, pairs, truncation."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenizers import Encoding, Tokenizer

from router.errors import OverloadedError, StartupError
from router.pooling.errors import PoolingError, empty, invalid, overloaded
from router.text.tokenizer import load_tokenizer
from router.worker import memory
from router.worker.lane import Lanes
from wire.text.tokenizer_failure import reason_of
from wire.tokenizer_file import num_ids

Direction = Literal["left", "right"]

# Up to this length encoding costs the loop about as much as a hop to a thread and back.
_INLINE_CHARACTERS = 400
_LONG_CHARACTERS = 64 * 1024
# No token stands for more characters on average: what follows can be cut off unread.
_MOST_CHARACTERS_OF_A_TOKEN = 250


@dataclass(frozen=True, slots=True)
class Text:
    """A text, pair, or ids, perhaps behind a prompt."""

    first: str | Sequence[int]
    second: str | None = None
    prompt: str = ""

    @property
    def num_characters(self) -> int:
        """Count as TEI's header."""
        return len(self.first) + len(self.second or "")


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text as the shards get it."""

    ids: Sequence[int]
    second_from: int = 0
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """How long texts are cut, at fewer tokens than the model's."""

    truncate: bool
    direction: Direction = "right"
    at: int | None = None


class TextTokenizer:
    """The tokenizer, one per thread for its truncation setting."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        num_workers: int,
        lower_case: bool = False,
        typed: bool = True,
        appended: int | None = None,
    ) -> None:
        ids = frozenset(tokenizer.get_vocab(with_added_tokens=True).values())
        self.vocab_size = num_ids(ids, StartupError)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.max_length = max_length
        self._source = tokenizer.to_str()
        self._on_loop = tokenizer
        self._lower_case = lower_case
        # Pairs have token types; `appended`: an id behind every text.
        self._typed = typed
        self._appended = appended
        self._local = threading.local()
        self._lanes = Lanes(
            "tokenizer", large_from=_LONG_CHARACTERS, num_threads=num_workers, after_large=memory.give_back
        )
        self._prompt_lengths: dict[str, int] = {}

    @classmethod
    def from_file(
        cls,
        path: Path,
        *,
        max_length: int,
        num_workers: int,
        lower_case: bool = False,
        typed: bool = True,
        appended: str | None = None,
        folder: Path | None = None,
    ) -> TextTokenizer:
        """Load a tokenizer of the model in `folder`."""
        tokenizer = load_tokenizer(path, folder)
        token = None if appended is None else tokenizer.token_to_id(appended)
        if token is not None and tokenizer.encode("a").ids[-1:] == [token]:
            token = None
        return cls(
            tokenizer,
            max_length=max_length,
            num_workers=num_workers,
            lower_case=lower_case,
            typed=typed,
            appended=token,
        )

    def close(self) -> None:
        self._lanes.close()

    async def encode(
        self, texts: Sequence[Text], cut: Cut, name: str = "inputs", second_at_most: int | None = None
    ) -> list[Tokens]:
        """Tokenize each text, cutting pairs' second at `second_at_most`.

        Raises:
            PoolingError: One is empty, or too long uncut.
        """
        cost = sum(text.num_characters for text in texts)
        if cost <= _INLINE_CHARACTERS:
            return self._encode(self._on_loop, self._shortened(self._on_loop, texts, second_at_most), cut, name)
        try:
            return await self._lanes.run(
                cost, lambda: self._encode(self._own, self._shortened(self._own, texts, second_at_most), cut, name)
            )
        except OverloadedError as error:
            raise overloaded(error.retry_after_s) from None

    async def spans(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Encoding]:
        """Return tokens with their places in characters."""
        cost = sum(map(len, texts))
        try:
            return await self._lanes.run(cost, lambda: self._spans(texts, add_special_tokens))
        except OverloadedError as error:
            raise overloaded(error.retry_after_s) from None

    async def decode(self, ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """The text of each list of ids."""
        cost = sum(map(len, ids))
        try:
            return await self._lanes.run(cost, lambda: self._decode(ids, skip_special_tokens))
        except OverloadedError as error:
            raise overloaded(error.retry_after_s) from None

    @property
    def _own(self) -> Tokenizer:
        try:
            found: Tokenizer = self._local.tokenizer
        except AttributeError:
            found = self._local.tokenizer = Tokenizer.from_str(self._source)
        return found

    # In a worker, or on the loop for short texts.

    def _encode(self, tokenizer: Tokenizer, texts: Sequence[Text], cut: Cut, name: str) -> list[Tokens]:
        limit = self.max_length if cut.at is None else min(cut.at, self.max_length)
        found: list[Tokens | None] = [None] * len(texts)
        places, inputs = [], []
        for place, text in enumerate(texts):
            if isinstance(text.first, str):
                if not text.first and text.second is None:
                    raise empty(name)
                places.append(place)
                inputs.append(self._input(text, limit, cut))
            else:
                found[place] = self._of_ids(text, cut, limit, name)
        room = limit - (self._appended is not None)
        for place, encoding in zip(places, self._encodings(tokenizer, inputs, room, cut), strict=True):
            found[place] = self._tokens(texts[place], encoding, limit, name)
        return [tokens for tokens in found if tokens is not None]

    def _shortened(self, tokenizer: Tokenizer, texts: Sequence[Text], most: int | None) -> Sequence[Text]:
        """Cut second texts behind `most` tokens."""
        if most is None:
            return texts
        found = []
        for text in texts:
            second = text.second or ""
            (encoding,) = tokenizer.encode_batch(
                [second[: most * _MOST_CHARACTERS_OF_A_TOKEN]], add_special_tokens=False
            )
            end = encoding.offsets[most - 1][1] if len(encoding.ids) > most else len(second)
            found.append(Text(text.first, second[:end], text.prompt))
        return found

    def _input(self, text: Text, limit: int, cut: Cut) -> str | tuple[str, str]:
        assert isinstance(text.first, str)
        first = text.prompt + text.first
        if self._lower_case:
            first = first.lower()
        most = limit * _MOST_CHARACTERS_OF_A_TOKEN
        if cut.truncate and len(first) > most:
            first = first[-most:] if cut.direction == "left" else first[:most]
        if text.second is None:
            return first
        second = text.second.lower() if self._lower_case else text.second
        if cut.truncate and len(second) > most:
            second = second[-most:] if cut.direction == "left" else second[:most]
        return first, second

    def _encodings(
        self, tokenizer: Tokenizer, inputs: list[str | tuple[str, str]], room: int, cut: Cut
    ) -> list[Encoding]:
        if not inputs:
            return []
        if cut.truncate:
            try:
                tokenizer.enable_truncation(room, strategy="longest_first", direction=cut.direction)
            except BaseException:
                raise invalid(f"texts cannot be cut to {room} tokens: the model's own take more") from None
        try:
            encodings: list[Encoding] = tokenizer.encode_batch_fast(inputs, add_special_tokens=True)
        except BaseException as error:
            text = f"tokenizer error {reason_of(error)}"
            raise PoolingError("Tokenizer", text, failure="tokenization") from None
        finally:
            if cut.truncate:
                tokenizer.no_truncation()
        return encodings

    def _tokens(self, text: Text, encoding: Encoding, limit: int, name: str) -> Tokens:
        ids = list(encoding.ids)
        if self._appended is not None:
            ids.append(self._appended)
        if len(ids) > limit:
            raise _too_long(limit, len(ids), name)
        if not ids:
            raise empty(name)
        second_from = 0
        if text.second is not None and self._typed:
            types = encoding.type_ids
            second_from = types.index(1) if 1 in types else 0
        prompt = self._prompt_length(text.prompt) if text.prompt else 0
        return Tokens(ids, second_from, min(prompt, len(ids) - 1))

    def _of_ids(self, text: Text, cut: Cut, limit: int, name: str) -> Tokens:
        """Take ids as they are, behind a prompt's."""
        assert not isinstance(text.first, str)
        ids = list(text.first)
        if not ids:
            raise empty(name)
        unknown = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if unknown is not None:
            raise invalid(f"token id {unknown} is not in the vocabulary", param=name)
        if len(ids) > limit:
            if not cut.truncate:
                raise _too_long(limit, len(ids), name)
            ids = ids[-limit:] if cut.direction == "left" else ids[:limit]
        return Tokens(ids)

    def _prompt_length(self, prompt: str) -> int:
        """Count a prompt's tokens, as sentence-transformers."""
        if prompt not in self._prompt_lengths:
            (encoding,) = self._own.encode_batch([prompt.lower() if self._lower_case else prompt])
            ends_special = bool(encoding.special_tokens_mask) and encoding.special_tokens_mask[-1] == 1
            self._prompt_lengths[prompt] = len(encoding.ids) - ends_special
        return self._prompt_lengths[prompt]

    def _spans(self, texts: Sequence[str], add_special_tokens: bool) -> list[Encoding]:
        try:
            found: list[Encoding] = self._own.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        except BaseException as error:
            text = f"tokenizer error {reason_of(error)}"
            raise PoolingError("Tokenizer", text, failure="tokenization") from None
        return found

    def _decode(self, ids: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        try:
            found: list[str] = self._own.decode_batch([list(i) for i in ids], skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            text = f"tokenizer error {reason_of(error)}"
            raise PoolingError("Tokenizer", text, failure="tokenization") from None
        return found


def _too_long(limit: int, length: int, name: str) -> PoolingError:
    text = f"`{name}` must have less than {limit} tokens. Given: {length}"
    return invalid(text, param=name, code="context_length_exceeded")


class Prompts:
    """Texts before others, by name and default."""

    def __init__(self, named: Mapping[str, str], default: str = "") -> None:
        self.named = named
        self.default = default

    def of(self, name: str | None) -> str:
        """Return a named prompt, if known."""
        if name is None:
            return self.default
        if name not in self.named:
            known = ", ".join(sorted(self.named)) or "none"
            raise invalid(f"`prompt_name` is `{name[:100]}`, but the model's prompts are: {known}", param="prompt_name")
        return self.named[name]
