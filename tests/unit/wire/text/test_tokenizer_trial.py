"""A tokenizer.json that takes what no tokenizer needs is refused before any process that serves reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from launcher.errors import ArgumentValidation
from launcher.planning.preflight import check_tokenizer
from model_server.errors import StartupError as ShardStartupError
from model_server.text.tokenizer import Tokenizer
from router.errors import StartupError as RouterStartupError
from router.text.tokenizer import PromptTokenizer
from wire import demo_model, tokenizer_file

State = dict[str, Any]


@pytest.fixture
def changed(tmp_path: Path) -> Callable[[Callable[[State], object]], Path]:
    def write(change: Callable[[State], object]) -> Path:
        state = json.loads((Path(demo_model.path()) / "tokenizer.json").read_text())
        change(state)
        (tmp_path / "tokenizer.json").write_text(json.dumps(state))
        return tmp_path

    return write


def replacing(pattern: dict[str, str], content: str, times: int) -> State:
    step = {"type": "Replace", "pattern": pattern, "content": content}
    return {"type": "Sequence", "normalizers": [step] * times}


def test_a_pipe_in_its_place_is_named_and_not_missed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(ArgumentValidation, match=r"tokenizer\.json is not a regular file$"):
        check_tokenizer(tmp_path)


def test_the_demo_model_and_a_normalizer_like_llamas_pass(changed: Callable[..., Path]) -> None:
    check_tokenizer(Path(demo_model.path()))
    check_tokenizer(None)
    llamas = replacing({"String": " "}, "\u2581", 1)
    check_tokenizer(changed(lambda state: state.update(normalizer=llamas)))


@pytest.mark.parametrize(
    ("pattern", "content", "times"),
    [({"String": "zq\u4e86"}, "zq\u4e86" * 2, 40), ({"String": "a"}, "aa", 8), ({"Regex": "."}, "a" * 10, 2)],
    ids=["without end", "much", "by an expression"],
)
@pytest.mark.long
def test_a_normalizer_that_grows_its_text_is_refused(
    changed: Callable[..., Path], pattern: dict[str, str], content: str, times: int
) -> None:
    growing = replacing(pattern, content, times)
    folder = changed(lambda state: state.update(normalizer=growing))
    with pytest.raises(
        ArgumentValidation, match=r"tokenizer\.json(: its normalizer makes \d+ bytes of| takes more memory or time)"
    ) as caught:
        check_tokenizer(folder)
    assert "\n" not in str(caught.value)


def test_a_vocabulary_without_an_unknown_token_passes(tmp_path: Path) -> None:
    """Texts beyond it are refused one by one."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"e4": 0, "e5": 1}))
    with pytest.raises(Exception, match="UNK"):
        words.encode("two words")
    words.save(str(tmp_path / "tokenizer.json"))
    check_tokenizer(tmp_path)


def test_an_id_far_above_the_vocabulary_is_refused_by_every_process(changed: Callable[..., Path]) -> None:
    folder = changed(lambda state: state["model"]["vocab"].update(faraway=2**31 - 1))
    words = r"the tokenizer has a token with the id 2147483647, but only \d+ tokens"
    with pytest.raises(ArgumentValidation, match=words):
        check_tokenizer(folder)
    with pytest.raises(RouterStartupError, match=words):
        PromptTokenizer.from_file(folder / "tokenizer.json", num_workers=1)
    with pytest.raises(ShardStartupError, match=words):
        Tokenizer.load(folder)


@pytest.mark.parametrize("content", ["{}", "[", '{"model": ' + "[" * 10_000])
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ArgumentValidation, match=r"tokenizer\.json cannot be used: "):
        check_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("ids", "count"),
    [((), 0), (range(10), 10), ((0, 1, 200_000), 200_001), ([*range(10**6), 2 * 10**6 - 1], 2 * 10**6)],
)
def test_vocabularies_may_have_gaps(ids: Any, count: int) -> None:
    assert tokenizer_file.num_ids(ids, ValueError) == count
