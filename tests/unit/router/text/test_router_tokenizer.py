"""The same ids as transformers, truncated as the shard truncates, in workers."""

from __future__ import annotations

import asyncio
import ctypes
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from router_fakes import Router, until
from tokenizers import Tokenizer

from router.errors import StartupError, ValidationError
from router.text.tokenizer import LONG_CHARACTERS, PromptTokenizer

BACKTRACKS = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
TEXTS = [
    "The dog",
    " leading and trailing  ",
    "日本語の文章 é 🙂\n\n\ttabs",
    "<s>literal special</s> tokens",
    "again " * 300,
    "x" * 3000,
]


@pytest.fixture
def prompts(tokenizer: Tokenizer) -> Iterator[PromptTokenizer]:
    made = PromptTokenizer(Tokenizer.from_str(tokenizer.to_str()), num_workers=2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def reference(tokenizer: Tokenizer) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer.to_str()),
        bos_token="<s>",
        eos_token="</s>",
        truncation_side="left",
    )


async def test_a_text_on_which_the_library_fails_is_refused(tokenizer: Tokenizer) -> None:
    """Its regular expressions give up after so many steps: a panic, which is no Exception."""
    state = json.loads(tokenizer.to_str())
    state["pre_tokenizer"] = BACKTRACKS
    prompts = PromptTokenizer(Tokenizer.from_str(json.dumps(state)), num_workers=1)
    words = "tokenizer error: the model's tokenizer fails on this text: .*retry-limit-in-match over"
    try:
        for text in ("x" * 60, "x" * 600):  # in place, and in a worker
            for call in (
                prompts.encode(text, add_special_tokens=True, truncate=5),
                prompts.spans(text, add_special_tokens=True),
                prompts.offsets(text, add_special_tokens=True),
            ):
                with pytest.raises(ValidationError, match=words):
                    await call
        assert await prompts.encode("The dog", add_special_tokens=False, truncate=None)
    finally:
        prompts.close()


@pytest.mark.parametrize("text", TEXTS)
async def test_the_same_ids_as_transformers(prompts: PromptTokenizer, reference: Any, text: str) -> None:
    for special in (True, False):
        expected = reference(text, add_special_tokens=special)["input_ids"]
        assert await prompts.encode(text, add_special_tokens=special, truncate=None) == expected
        for truncate in (1, 2, 3, 7, len(expected) - 1, len(expected), 10_000):
            if truncate < 1:
                continue
            cut = reference(text, add_special_tokens=special, truncation=True, max_length=truncate)["input_ids"]
            got = await prompts.encode(text, add_special_tokens=special, truncate=truncate)
            assert got == cut, (truncate, special)
            assert len(got) <= truncate
        assert await prompts.encode(text, add_special_tokens=special, truncate=None) == expected


async def test_truncation_keeps_the_end_and_the_special_tokens(prompts: PromptTokenizer) -> None:
    text = "The quick brown fox jumps over the lazy dog"
    whole = await prompts.encode(text, add_special_tokens=True, truncate=None)
    assert await prompts.encode(text, add_special_tokens=True, truncate=4) == [whole[0], *whole[-3:]]
    assert await prompts.encode(text, add_special_tokens=False, truncate=3) == whole[-3:]


async def test_workers_do_not_disturb_each_other(prompts: PromptTokenizer) -> None:
    text = "again and again " * 100
    whole = await prompts.encode(text, add_special_tokens=True, truncate=None)
    sizes = [None, 5, 17, None, 100, 1] * 8
    got = await asyncio.gather(*(prompts.encode(text, add_special_tokens=True, truncate=size) for size in sizes))
    assert [len(ids) for ids in got] == [len(whole) if size is None else size for size in sizes]


async def test_a_long_prompt_does_not_hold_up_the_loop(prompts: PromptTokenizer) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 10_000
    encoding = asyncio.ensure_future(prompts.encode(text, add_special_tokens=True, truncate=None))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0)
        turns += 1
    assert len(encoding.result()) > 100_000
    assert turns > 20, "a benchmark watches the 50 ms"


async def test_short_texts_do_not_wait_for_long_ones(prompts: PromptTokenizer) -> None:
    begun, gate = threading.Event(), threading.Event()
    blocking = asyncio.create_task(prompts._lanes.large.run(0, lambda: begun.set() or gate.wait(60)))
    await until(begun.is_set)
    long = asyncio.create_task(prompts.encode("dog " * LONG_CHARACTERS, add_special_tokens=True, truncate=5))
    for text in ("dog " * 100, "dog " * (LONG_CHARACTERS // 4)):
        assert await prompts.encode(text, add_special_tokens=True, truncate=None)
    assert not long.done() and not blocking.done()
    gate.set()
    assert len(await long) == 5


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc alone keeps what is freed")
async def test_memory_of_long_texts_is_given_back(prompts: PromptTokenizer) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 20_000
    idle = asyncio.Event()
    loop = asyncio.get_running_loop()
    lane = prompts._lanes.large
    give_back = lane._after_each
    assert give_back is not None
    peaks: list[int] = []

    def watched() -> None:
        peaks.append(psutil.Process().memory_info().rss)
        give_back()
        peaks.append(psutil.Process().memory_info().rss)
        loop.call_soon_threadsafe(idle.set)

    lane._after_each = watched
    for _ in range(2):  # the first time its worker's tokenizer is made too
        peaks.clear()
        idle.clear()
        await prompts.encode(text, add_special_tokens=True, truncate=5)
        await asyncio.wait_for(idle.wait(), 60)
    before, after = peaks
    assert before - after > len(text) * 20, "a text takes a hundred times its length while it is tokenised"


async def test_the_prompt_length_header_is_the_truncated_length(router: Router) -> None:
    answer = await router.post("/generate", {"inputs": "The dog sleeps again", "parameters": {"truncate": 3}})
    assert answer.headers["x-prompt-tokens"] == "3"
    assert router.scheduler.last.truncate == 3 and router.scheduler.last.input_length == 3
    assert len(router.scheduler.last.input_ids) == 3


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        PromptTokenizer.from_file(path, num_workers=1)
