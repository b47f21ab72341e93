"""Prompts of tokens that stand for those of a log without texts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import orjson

from launcher.bench.prompts import WORDS
from launcher.bench.replay_log import Hashed
from launcher.http_stream import BadAnswerError, Connection


class MadeUpPrompts:
    """Prompts with the lengths of those that a log has numbers of, and that begin alike where those do."""

    def __init__(self, vocabulary: Sequence[int], seed: int) -> None:
        """vocabulary: Ids to draw from."""
        self._vocabulary = vocabulary
        self._seed = seed
        self._blocks: dict[int, list[int]] = {}
        # What follows a block, of the prompt that ended there: the next turn of a conversation begins with it.
        self._ends: dict[int | None, list[int]] = {}

    def ids(self, prompt: Hashed) -> list[int]:
        """Return its tokens; prompts must be asked for in the order of their arrival."""
        ids: list[int] = []
        before: int | None = None
        for number in prompt.hash_ids:
            size = min(prompt.block, prompt.num_tokens - len(ids))
            if size <= 0:
                break
            block = self._blocks.get(number)
            if block is None:
                known = self._ends.get(before, [])[: max(prompt.cached_tokens - len(ids), 0)]
                block = (known + self._drawn(number, prompt.block))[:size]
                self._blocks[number] = block
            ids += block[:size]
            if size < prompt.block:
                self._ends[before] = block[:size]
            before = number
        return ids + self._drawn(-1, prompt.num_tokens - len(ids))

    def _drawn(self, number: int, count: int) -> list[int]:
        return random.Random(f"{self._seed}/{number}").choices(self._vocabulary, k=max(count, 0))


async def vocabulary_of(connection: Connection, tokenizer: str | None) -> list[int]:
    """Return ids of common words, by a `tokenizer.json` or by the server. Raises ValueError, OSError."""
    text = " ".join(WORDS)
    if tokenizer is not None:
        from tokenizers import Tokenizer

        try:
            return sorted(set(Tokenizer.from_file(tokenizer).encode(text, add_special_tokens=False).ids))
        except Exception as error:
            raise ValueError(f"--tokenizer {tokenizer}: {error}") from None
    try:
        parts = [part async for part in connection.post("/tokenize", orjson.dumps({"inputs": text}))]
        tokens = orjson.loads(b"".join(parts))
        return sorted({token["id"] for token in tokens if token["stop"] > token["start"]})
    except (BadAnswerError, orjson.JSONDecodeError, LookupError, TypeError):
        raise ValueError("the server has no /tokenize of TGI's; give a --tokenizer to make up prompts") from None
