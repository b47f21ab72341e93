"""Prompts of a wanted length, each with its own beginning, so that no prefix cache answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import orjson

from launcher.bench.apis import Api, Usage
from launcher.http_stream import BadAnswerError, Connection, event_object

# Short common English words: a token or two each in any vocabulary.
WORDS = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system",
    "program", "question", "work", "government", "number", "night", "point", "home", "water", "room", "mother",
    "area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business",
    "issue", "side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end",
    "member", "law", "car", "city", "community", "name", "president", "team", "minute", "idea", "body", "information",
]  # fmt: skip

# How many words are sent to find out how many tokens a word has.
_TRIAL_WORDS = 256

# Offsets [start, stop) of a text's tokens, without special ones.
Offsets = Callable[[str], list[tuple[int, int]]]


class PromptMaker:
    """cut: where a text's tokens end, if that is known; otherwise `tokens_per_word` is an estimate."""

    def __init__(self, num_tokens: int, seed: int, *, cut: Offsets | None, tokens_per_word: float = 1.0) -> None:
        self._num_tokens = num_tokens
        self._seed = seed
        self._cut = cut
        self._tokens_per_word = tokens_per_word

    def prompt(self, number: int) -> str:
        """Prompt `number` of this run; the same for the same seed."""
        chosen = random.Random(f"{self._seed}/{number}")
        if self._cut is None:
            return " ".join(chosen.choices(WORDS, k=max(1, round(self._num_tokens / self._tokens_per_word))))
        text = " ".join(chosen.choices(WORDS, k=self._num_tokens))
        offsets = self._cut(text)
        return text[: offsets[self._num_tokens - 1][1]] if len(offsets) >= self._num_tokens else text


def offsets_of(path: str) -> Offsets:
    """Offsets by a `tokenizer.json`. Raises ValueError if it cannot be read."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:
        raise ValueError(f"--tokenizer {path}: {error}") from None

    def cut(text: str) -> list[tuple[int, int]]:
        return list(tokenizer.encode(text, add_special_tokens=False).offsets)

    return cut


async def measured_tokens_per_word(connection: Connection, api: Api) -> float:
    """How many tokens a word of ours has on average, by what the server counts. Raises BadAnswerError, OSError."""
    words = " ".join(random.Random(0).choices(WORDS, k=_TRIAL_WORDS))
    counted = await _tokenize(connection, words)
    if counted is None:
        usage = Usage()
        async with aclosing(connection.events(api.path, orjson.dumps(api.body(words, 1)))) as answer:
            async for events in answer:
                for event in events:
                    api.read(event_object(event), usage)
        counted = usage.prompt_tokens
    if not counted:
        raise BadAnswerError("the server does not say how many tokens a prompt has; give a --tokenizer")
    return counted / _TRIAL_WORDS


async def _tokenize(connection: Connection, text: str) -> int | None:
    """TGI's /tokenize, which answers with a list of tokens; None where there is no such route."""
    try:
        body = orjson.dumps({"inputs": text})
        answer: Any = orjson.loads(b"".join([part async for part in connection.post("/tokenize", body)]))
    except (BadAnswerError, orjson.JSONDecodeError):
        return None
    return len(answer) if isinstance(answer, list) else None
