"""Reading the tokenizer and what the configs say of its tokens."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from model_server.errors import RequestError, StartupError
from model_server.text.tokenizer import Tokenizer
from wire.text.tokenizer_failure import reason_of

VOCABULARY = {"<s>": 0, "</s>": 1, "<unk>": 2, "a": 3, "b": 4, "c": 5, "ab": 6, "<pad>": 7}


def backend() -> Backend:
    tokenizer = Backend(models.BPE(VOCABULARY, [("a", "b")], unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("<|end|>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write(folder: Path, **files: dict[str, Any]) -> Path:
    backend().save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, set()),
        ({"generation_config": {"eos_token_id": 5}}, {5}),
        ({"generation_config": {"eos_token_id": [5, 9]}}, {5, 9}),
        ({"generation_config": {"eos_token_id": 5}, "tokenizer_config": {"eos_token": "</s>"}}, {1, 5}),
        ({"tokenizer_config": {"eos_token": {"content": "</s>"}}}, {1}),
        ({"special_tokens_map": {"eos_token": "</s>"}}, {1}),
        ({"special_tokens_map": {"eos_token": "</s>"}, "tokenizer_config": {"eos_token": "<|end|>"}}, {1}),
        (
            {
                "special_tokens_map": {"eos_token": "</s>"},
                "tokenizer_config": {"eos_token": "<|end|>", "added_tokens_decoder": {}},
            },
            {9},
        ),
        ({"tokenizer_config": {"eos_token": "absent"}}, {10}),  # behind those of the file
        ({"tokenizer_config": {"eos_token": "absent"}, "config": {"vocab_size": 10}}, set()),
        ({"config": {"eos_token_id": 4}}, {4}),
        ({"config": {"text_config": {"eos_token_id": [4]}}}, {4}),
        ({"config": {"eos_token_id": 4}, "generation_config": {"eos_token_id": [5]}}, {5}),
        ({"config": {"eos_token_id": None}, "generation_config": {"eos_token_id": None}}, set()),
    ],
)
def test_end_tokens_are_a_union(files: dict[str, dict[str, Any]], wanted: set[int], tmp_path: Path) -> None:
    assert Tokenizer.load(write(tmp_path, **files)).eos_token_ids == wanted


def test_special_ids_come_from_the_file_and_from_the_configs(tmp_path: Path) -> None:
    flagged = {0, 1, 9}
    assert Tokenizer.load(write(tmp_path)).special_ids == flagged
    settings = {"unk_token": "<unk>", "additional_special_tokens": ["<tool>", {"content": "c"}], "pad_token": None}
    assert Tokenizer.load(write(tmp_path, tokenizer_config=settings)).special_ids == flagged | {2, 8, 5}
    settings = {"extra_special_tokens": {"image_token": "b"}, "pad_token": {"content": "<pad>"}}
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer.load(write(tmp_path, special_tokens_map=settings)).special_ids >= flagged | {7}


@pytest.mark.parametrize(
    ("value", "wanted"), [(4096, 4096), (4096.0, 4096), (int(1e30), None), (1e30, None), (None, None), ("x", None)]
)
def test_model_max_length(value: object, wanted: int | None, tmp_path: Path) -> None:
    assert Tokenizer.load(write(tmp_path, tokenizer_config={"model_max_length": value})).model_max_length == wanted


def test_without_configs(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path))
    assert tokenizer.model_max_length is None
    assert tokenizer.vocab_size == 10


def test_missing_and_broken_files_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(StartupError, match="cannot load the tokenizer") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)
    write(tmp_path)
    for content in ("{", "[1]", "\xff"):
        (tmp_path / "generation_config.json").write_bytes(content.encode("latin-1"))
        with pytest.raises(
            StartupError, match=r"generation_config\.json (is not valid JSON|does not hold a JSON object)"
        ) as caught:
            Tokenizer.load(tmp_path)
        assert "\n" not in str(caught.value)


def test_truncation_keeps_the_end_and_the_special_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path))
    text = "abcba"  # ab c b a
    assert tokenizer.encode(text, truncate=0, add_special_tokens=True) == [0, 6, 5, 4, 3, 1]
    assert tokenizer.encode(text, truncate=6, add_special_tokens=True) == [0, 6, 5, 4, 3, 1]
    assert tokenizer.encode(text, truncate=4, add_special_tokens=True) == [0, 4, 3, 1]
    assert tokenizer.encode(text, truncate=3, add_special_tokens=False) == [5, 4, 3]
    assert tokenizer.encode(text, truncate=0, add_special_tokens=False) == [6, 5, 4, 3]
    assert tokenizer.encode("", truncate=5, add_special_tokens=True) == [0, 1]


def test_the_files_own_truncation_and_padding_are_off(tmp_path: Path) -> None:
    source = backend()
    source.enable_truncation(3)
    source.enable_padding(length=20, pad_id=7, pad_token="<pad>")
    source.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode("abcba", truncate=0, add_special_tokens=False) == [6, 5, 4, 3]


def test_threads_do_not_see_each_others_truncation() -> None:
    tokenizer = Tokenizer(backend())
    wrong = []

    def work(limit: int) -> None:
        for _ in range(300):
            if len(tokenizer.encode("abc" * 10, truncate=limit, add_special_tokens=True)) != limit:
                wrong.append(limit)

    threads = [threading.Thread(target=work, args=(limit,)) for limit in (4, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_decode_with_and_without_special_tokens() -> None:
    tokenizer = Tokenizer(backend(), special_tokens=["<unk>"])
    ids = [0, 3, 8, 2, 4, 9, 1]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>a<tool><unk>b<|end|></s>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>b"
    assert tokenizer.decode([3, 1000, 4], skip_special_tokens=False) == "ab"
    assert [tokenizer.decode_one(token_id) for token_id in (9, 9, 3, 1000)] == ["<|end|>", "<|end|>", "a", ""]


def test_lone_surrogates_are_a_type_error() -> None:
    with pytest.raises(TypeError):
        Tokenizer(backend()).encode("\ud800", truncate=0, add_special_tokens=True)


def test_kinds_of_decoders() -> None:
    def of(decoder: Any) -> Tokenizer:
        source = Backend(models.BPE({"<0x41>": 0, "<0xzz>": 1, "a": 2}, []))
        source.pre_tokenizer = pre_tokenizers.Metaspace()
        if decoder is not None:
            source.decoder = decoder
        return Tokenizer(source)

    llama = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    table: list[tuple[Any, bool, bool, bool]] = [
        # decoder; byte-level, byte fallback, pieces that can be remembered
        (None, False, False, False),
        (decoders.ByteLevel(), True, False, False),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]), True, False, False),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]), False, False, False),
        (decoders.Sequence(llama), False, True, True),
        (decoders.Sequence(llama[:3]), False, True, True),
        (decoders.Sequence([*llama[:3], decoders.Strip(" ", 0, 1)]), False, True, False),
        (decoders.Metaspace(), False, False, True),
        (decoders.WordPiece(), False, False, False),
        (decoders.BPEDecoder(), False, False, False),
    ]
    for decoder, byte_level, fallback, remembered in table:
        tokenizer = of(decoder)
        assert (tokenizer.byte_pieces is not None) is byte_level
        assert tokenizer.fallback_bytes == ({0: 0x41} if fallback else {})
        assert (tokenizer.known_pieces is not None) is remembered


def test_what_makes_the_library_fail_is_the_requests_failure() -> None:
    """Its regular expressions give up after so many steps: a panic, which is no Exception."""
    failing = backend()
    failing.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    tokenizer = Tokenizer(failing)
    with pytest.raises(RequestError, match=r"the model's tokenizer fails on this text: .*retry-limit-in-match over"):
        tokenizer.encode("x" * 60, truncate=0, add_special_tokens=True)
    assert tokenizer.encode("ab", truncate=0, add_special_tokens=False) == [6]


def test_interrupts_are_not_the_librarys() -> None:
    with pytest.raises(KeyboardInterrupt):
        reason_of(KeyboardInterrupt())
    assert reason_of(Exception("two\nlines")) == "two lines"
