"""Texts begin with a space where transformers' AutoTokenizer lets them, whatever tokenizer.json says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.tokenizer_kinds import KINDS

from model_server.errors import StartupError
from model_server.models.families import FAMILIES
from model_server.text.tokenizer import Tokenizer
from model_server.weights.conversion.build_tokenizer import convert
from router.text.tokenizer import PromptTokenizer

TEXTS = ("Hello world", " Hello", "<|endoftext|>Hello", "")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A byte-level tokenizer.json."""
    folder = tmp_path_factory.mktemp("gpt2")
    KINDS["gpt2"](folder)
    convert(folder, folder / "tokenizer.json")
    found: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    return found


def write(folder: Path, source: dict[str, Any], *, stored: bool, model_type: str | None, **settings: Any) -> None:
    pre_tokenizer = source["pre_tokenizer"] | {"add_prefix_space": stored}
    (folder / "tokenizer.json").write_text(json.dumps(source | {"pre_tokenizer": pre_tokenizer}))
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("asked", [True, False, None])
@pytest.mark.parametrize(
    ("named", "model_type"),
    [
        ("GPT2Tokenizer", "gpt2"),
        ("GPT2TokenizerFast", "opt"),
        (None, "gptj"),
        ("GPT2Tokenizer", "llama"),
        ("GPT2TokenizerFast", "granite"),
        ("PreTrainedTokenizerFast", "gpt2"),
        (None, "llama"),
    ],
)
async def test_ids_are_those_of_transformers(
    named: str | None, model_type: str, asked: bool | None, stored: bool, source: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    write(tmp_path, source, stored=stored, model_type=model_type, tokenizer_class=named, add_prefix_space=asked)
    reference: Any = AutoTokenizer.from_pretrained(tmp_path)
    shard = Tokenizer.load(tmp_path)
    router = PromptTokenizer.from_file(tmp_path / "tokenizer.json", num_workers=1)
    try:
        for text in TEXTS:
            want = reference(text).input_ids
            assert shard.encode(text, add_special_tokens=True, truncate=0) == want
            assert await router.encode(text, add_special_tokens=True, truncate=None) == want
    finally:
        router.close()


def test_every_type_is_known_whose_class_transformers_takes_otherwise(source: dict[str, Any], tmp_path: Path) -> None:
    """With the name of GPT-2's class in its files, and without a name."""
    from transformers import CONFIG_MAPPING, AutoTokenizer

    wrong = []
    for model_type in sorted(set(FAMILIES) & set(CONFIG_MAPPING)):
        folder = tmp_path / model_type
        folder.mkdir()
        write(
            folder, source, stored=False, model_type=model_type, tokenizer_class="GPT2Tokenizer", add_prefix_space=True
        )
        want = AutoTokenizer.from_pretrained(folder)("Hello").input_ids
        if Tokenizer.load(folder).encode("Hello", add_special_tokens=True, truncate=0) != want:
            wrong.append(model_type)
    assert wrong == []


def test_what_is_neither_true_nor_false(source: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, source, stored=False, model_type="gpt2", add_prefix_space="yes")
    with pytest.raises(StartupError, match=r"`add_prefix_space` must be true or false, got 'yes'"):
        Tokenizer.load(tmp_path)
