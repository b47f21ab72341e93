"""A tokenizer.json made of other files gives router, shard and transformers the same ids."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from support.tokenizer_kinds import KINDS

from model_server.text.tokenizer import Tokenizer
from model_server.weights.conversion import build_tokenizer as convert_tokenizer
from model_server.weights.conversion.build_tokenizer import Refused, convert
from router.text.tokenizer import PromptTokenizer

TEXTS = (
    "Hello",
    " leading and trailing ",
    "naïve café, 日本語, 한국어 and an emoji 🙂🙂, 12345.678",
    "line\nbreaks\r\n\tand tabs,  two spaces",
    "<s> in </s> the <|endoftext|> middle [SEP] of <unk> text",
    "word " * 50,
)


@pytest.fixture(params=sorted(KINDS))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    KINDS[request.param](tmp_path)
    return tmp_path


async def test_same_ids(folder: Path) -> None:
    from transformers import AutoTokenizer

    reference: Any = AutoTokenizer.from_pretrained(folder)
    convert(folder, folder / "tokenizer.json")
    router, shard = PromptTokenizer.from_file(folder / "tokenizer.json", num_workers=1), Tokenizer.load(folder)
    try:
        for text in TEXTS:
            for special in (True, False):
                want = reference(text, add_special_tokens=special).input_ids
                assert await router.encode(text, add_special_tokens=special, truncate=None) == want
                assert shard.encode(text, add_special_tokens=special, truncate=0) == want
                assert shard.decode(want, skip_special_tokens=False) == reference.backend_tokenizer.decode(want, False)
    finally:
        router.close()


def test_ids_are_those_of_sentencepiece(tmp_path: Path) -> None:
    """What transformers makes of the file, against the library whose format it is."""
    import sentencepiece

    KINDS["llama"](tmp_path)
    convert(tmp_path, tmp_path / "tokenizer.json")
    shard = Tokenizer.load(tmp_path)
    original = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    for text in ("Hello, world!", "naïve café, 日本語 and 🙂", "The quick brown fox jumps over the lazy dog."):
        assert shard.encode(text, truncate=0, add_special_tokens=False) == original.encode(text)
        assert shard.encode(text, truncate=0, add_special_tokens=True) == [original.bos_id(), *original.encode(text)]


def test_ids_that_would_differ_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import pre_tokenizers

    KINDS["gpt2"](tmp_path)
    right = convert_tokenizer._backend_of

    def wrong(tokenizer: Any) -> Any:
        backend = type(right(tokenizer)).from_str(right(tokenizer).to_str())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        return backend

    monkeypatch.setattr(convert_tokenizer, "_backend_of", wrong)
    with pytest.raises(Refused, match=r"no equal tokenizer.json: ids differ for 'Hello, world!'"):
        convert(tmp_path, tmp_path / "tokenizer.json")


@pytest.mark.parametrize(("content", "package"), [(b"\x0a\x0e\x0a", "sentencepiece"), (b"IQ== 0\n", "tiktoken")])
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, package: str
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Refused, match=f"`pip install {package}`"):
        convert(tmp_path, tmp_path / "tokenizer.json")


def test_code_of_the_repository_is_not_run(tmp_path: Path) -> None:
    KINDS["gpt2"](tmp_path)
    trace = tmp_path / "trace"
    (tmp_path / "tokenization_x.py").write_text(f"open({str(trace)!r}, 'w')")
    names = {"tokenizer_class": "X", "auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x_unknown"}))
    with pytest.raises(Refused, match="is code of its repository, which is not run"):
        convert(tmp_path, tmp_path / "tokenizer.json")
    assert not trace.exists()


def test_garbage_is_refused_in_one_line(tmp_path: Path) -> None:
    KINDS["gpt2"](tmp_path)
    (tmp_path / "vocab.json").write_text("[1, 2")
    with pytest.raises(Refused, match=r"cannot be made a tokenizer.json: ") as caught:
        convert(tmp_path, tmp_path / "tokenizer.json")
    assert "\n" not in str(caught.value)


def test_a_device_among_the_sources_is_refused_before_transformers_reads_it(tmp_path: Path) -> None:
    KINDS["gpt2"](tmp_path)
    (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
    (tmp_path / "tokenizer_config.json").symlink_to("/dev/zero")
    with pytest.raises(convert_tokenizer.Refused, match=r"tokenizer_config\.json is not a regular file"):
        convert(tmp_path, tmp_path / "tokenizer.json")
