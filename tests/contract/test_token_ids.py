"""Router and shard tokenise the same prompt on their own (`generate.v3` carries no ids): they must agree, and with
transformers, for any text, truncation and choice of special tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import write_tokenizer
from transformers import AutoTokenizer

from model_server.errors import StartupError as ShardError
from model_server.text.tokenizer import Tokenizer
from router.errors import StartupError as RouterError
from router.text import model_files
from router.text.tokenizer import PromptTokenizer
from wire import demo_model

TEXTS = (
    "Hello",
    " leading and trailing ",
    "naïve café, 日本語 and an emoji 🙂🙂",
    "</s> in the middle <s> of text",
    "line\nbreaks\r\n\tand tabs, 12345 + 67890 = ?",
    "word " * 300,
)


@pytest.fixture(scope="module", params=["tiny", "demo"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "demo":
        return demo_model.path()
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("truncate", [None, 2, 5, 64])
async def test_router_shard_and_transformers_agree(folder: Path, special: bool, truncate: int | None) -> None:
    router = PromptTokenizer.from_file(folder / "tokenizer.json", num_workers=1)
    shard = Tokenizer.load(folder)
    reference: Any = AutoTokenizer.from_pretrained(folder, truncation_side="left")
    try:
        for text in TEXTS:
            cut = {"truncation": True, "max_length": truncate} if truncate else {}
            want = reference(text, add_special_tokens=special, **cut).input_ids
            assert await router.encode(text, add_special_tokens=special, truncate=truncate) == want
            assert shard.encode(text, add_special_tokens=special, truncate=truncate or 0) == want
    finally:
        router.close()


def _token(content: str, **flags: bool) -> dict[str, Any]:
    return {"content": content, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False, **flags}


BESIDE: dict[str, dict[str, dict[str, Any]]] = {
    "by id": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                "514": _token("<|tool|>", special=False, lstrip=True),
                "513": _token("<|end|>", special=True),
                "0": _token("<s>", special=True),
            },
            "eos_token": "<|end|>",
        }
    },
    "a file of their own": {
        "added_tokens.json": {"<|tool|>": 514, "<|end|>": 513},
        "special_tokens_map.json": {"eos_token": _token("<|end|>")},
        "tokenizer_config.json": {"eos_token": None},
    },
    "extra": {"tokenizer_config.json": {"extra_special_tokens": ["<|end|>", "<|tool|>"], "eos_token": "<|end|>"}},
    "additional": {"tokenizer_config.json": {"additional_special_tokens": ["<|tool|>"], "eos_token": "<|end|>"}},
    "named": {
        "tokenizer_config.json": {
            "extra_special_tokens": {"image_token": "<|tool|>"}, "pad_token": "[PAD]", "eos_token": "<|end|>"
        }
    },
    "named, and a list": {
        "tokenizer_config.json": {
            "extra_special_tokens": {"eoi_token": "<|end|>"}, "additional_special_tokens": ["<|tool|>"],
            "eos_token": "<|end|>",
        }
    },
    "named for a type": {
        "tokenizer_config.json": {"model_specific_special_tokens": {"a": "<|tool|>"}, "eos_token": "<|end|>"}
    },
    "a map that says something else": {
        "special_tokens_map.json": {"eos_token": _token("<|end|>"), "image_token": "<|tool|>"},
        "tokenizer_config.json": {"eos_token": "</s>"},
    },
    "a map with other lists": {
        "special_tokens_map.json": {"additional_special_tokens": ["[PAD]"], "extra_special_tokens": ["<|end|>"]},
        "tokenizer_config.json": {"additional_special_tokens": ["<|tool|>"], "eos_token": "<|end|>"},
    },
    "a map beside tokens by id": {
        "special_tokens_map.json": {"eos_token": "<|tool|>", "additional_special_tokens": ["[PAD]"]},
        "tokenizer_config.json": {"added_tokens_decoder": {"513": _token("<|end|>")}, "eos_token": "<|end|>"},
    },
    "a word of the vocabulary": {"tokenizer_config.json": {"eos_token": "ing", "extra_special_tokens": ["<|end|>"]}},
}  # fmt: skip


@pytest.mark.parametrize("beside", BESIDE)
async def test_tokens_that_only_the_configs_name(beside: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    for name, fields in BESIDE[beside].items():
        file = tmp_path / name
        before = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({k: v for k, v in (before | fields).items() if v is not None}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 600}))
    reference: Any = AutoTokenizer.from_pretrained(tmp_path)
    router, shard = PromptTokenizer.from_file(tmp_path / "tokenizer.json", num_workers=1), Tokenizer.load(tmp_path)
    try:
        for text in ("a<|end|>b  <|tool|> [PAD] coming", "<|end|>", "</s>", *TEXTS):
            want = reference(text).input_ids
            assert await router.encode(text, add_special_tokens=True, truncate=None) == want
            assert shard.encode(text, add_special_tokens=True, truncate=0) == want
            assert shard.decode(want, skip_special_tokens=True) == reference.decode(want, skip_special_tokens=True)
    finally:
        router.close()
    assert reference.eos_token_id in shard.eos_token_ids
    assert model_files.load(str(tmp_path), revision=None).named_tokens["eos_token"] == reference.eos_token
    assert router.vocab_size == shard.vocab_size == len(reference)


async def test_a_token_without_an_embedding_stays_a_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"extra_special_tokens": ["<|a|>", "<|b|>"]}))
    plain = Tokenizer.load(tmp_path)
    assert len(plain.encode("<|a|><|b|>", truncate=0, add_special_tokens=False)) == 2
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": plain.vocab_size - 1}))
    cut = Tokenizer.load(tmp_path)
    assert cut.vocab_size == plain.vocab_size - 1
    assert len(cut.encode("<|a|><|b|>", truncate=0, add_special_tokens=False)) > 2


def test_what_is_no_token_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    before = json.loads(file.read_text())
    for fields, sentence in (
        ({"added_tokens_decoder": []}, "`added_tokens_decoder` must be an object of tokens by their ids"),
        ({"added_tokens_decoder": {"9": "x"}}, "`added_tokens_decoder` holds 'x', which is not a token"),
        ({"split_special_tokens": True}, "`split_special_tokens` is not served; remove it, or set it to false"),
    ):
        file.write_text(json.dumps(before | fields))
        with pytest.raises(ShardError, match=re.escape(f"{file}: {sentence}")):
            Tokenizer.load(tmp_path)
        with pytest.raises(RouterError, match=re.escape(f"{file}: {sentence}")):
            PromptTokenizer.from_file(tmp_path / "tokenizer.json", num_workers=1)
