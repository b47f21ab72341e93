"""Tokenizers of GGUF files: ids as sentencepiece gives them, words as the named patterns divide them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from support.tokenizer_kinds import TEXT, sentencepiece_bpe

from model_server.errors import StartupError
from model_server.weights.gguf.tokenizer import tokenizer_config_of, tokenizer_of

FILE = Path("model.gguf")
SAMPLES = (
    "Hello, world!", "the quick brown fox", " two  spaces\n\nand 日本語 🙂", "", " ", "naïve\tcafé 123",
    *TEXT.splitlines()[:2],
)  # fmt: skip
BYTES = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]


def of(**fields: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def byte_pairs(**fields: Any) -> dict[str, Any]:
    tokens = [*BYTES, "Ġt", "he", "Ġthe", "<|end|>", "<own>"]
    kinds = [1] * (len(tokens) - 2) + [3, 4]
    merges = ["Ġ t", "h e", "Ġt he"]
    found = of(model="gpt2", tokens=tokens, merges=merges, token_type=kinds, **{"pre": "gpt-2", **fields})
    return {name: value for name, value in found.items() if value is not None}


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> tuple[sentencepiece.SentencePieceProcessor, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("pieces")
    sentencepiece_bpe(folder)
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    numbers = range(model.get_piece_size())
    kinds = [2 if model.is_unknown(n) else 3 if model.is_control(n) else 6 if model.is_byte(n) else 1 for n in numbers]
    return model, of(
        model="llama", tokens=[model.id_to_piece(n) for n in numbers], scores=[model.get_score(n) for n in numbers],
        token_type=kinds, bos_token_id=model.bos_id(), eos_token_id=model.eos_id(), unknown_token_id=model.unk_id(),
    )  # fmt: skip


def test_ids_are_sentencepiece_s(pieces: tuple[sentencepiece.SentencePieceProcessor, dict[str, Any]]) -> None:
    model, metadata = pieces
    tokenizer = tokenizer_of(metadata, FILE)
    for text in SAMPLES:
        expected = model.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False).ids == expected
        assert tokenizer.encode(text).ids == [model.bos_id(), *expected]
        assert tokenizer.decode(expected) == text
    plain = tokenizer_of({**metadata, "tokenizer.ggml.add_bos_token": False}, FILE)
    assert plain.encode("the fox").ids == model.encode("the fox")
    with_end = tokenizer_of({**metadata, "tokenizer.ggml.add_eos_token": True}, FILE)
    assert with_end.encode("the fox").ids == [model.bos_id(), *model.encode("the fox"), model.eos_id()]


def test_texts_need_not_begin_with_a_space(
    pieces: tuple[sentencepiece.SentencePieceProcessor, dict[str, Any]],
) -> None:
    _, metadata = pieces
    tokenizer = tokenizer_of({**metadata, "tokenizer.ggml.add_space_prefix": False}, FILE)
    assert not tokenizer.encode("the", add_special_tokens=False).tokens[0].startswith("▁")
    assert tokenizer.decode(tokenizer.encode(" the").ids) == " the"


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["It", "'s", "Ġ12345", "ĊĊĠ", "Ġend", "!"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "45", "ĊĊ", "Ġ", "Ġend", "!"]),
        ("qwen2", ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "ĊĊ", "Ġ", "Ġend", "!"]),
        ("smollm", ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "ĊĊĠ", "Ġend", "!"]),
    ],
)
def test_words_are_divided_by_the_pattern(pre: str, words: list[str]) -> None:
    tokenizer = tokenizer_of(byte_pairs(pre=pre), FILE)
    assert [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str("It's 12345\n\n  end!")] == words


def test_byte_pairs_and_tokens_of_their_own() -> None:
    tokenizer = tokenizer_of(byte_pairs(), FILE)
    assert tokenizer.encode(" the t<|end|><own>").tokens == ["Ġthe", "Ġt", "<|end|>", "<own>"]
    assert tokenizer.decode(tokenizer.encode(" thé<|end|><own>").ids) == " thé<own>"
    end = tokenizer.token_to_id("<|end|>")
    assert end is not None
    begun = tokenizer_of(byte_pairs(bos_token_id=end, add_bos_token=True), FILE)
    assert begun.encode(" the").ids == [end, *tokenizer.encode(" the").ids]


def test_ids_that_only_the_embedding_has_have_no_text(
    pieces: tuple[sentencepiece.SentencePieceProcessor, dict[str, Any]],
) -> None:
    """Converters fill the vocabulary up to the rows of the embedding with texts that they make up."""
    for metadata in (byte_pairs(), pieces[1]):
        count = len(metadata["tokenizer.ggml.tokens"])
        filled = of(
            tokens=[*metadata["tokenizer.ggml.tokens"], f"[PAD{count}]", f"[PAD{count + 1}]", "[PAD]"],
            token_type=[*metadata["tokenizer.ggml.token_type"], 5, 5, 5],
            **{"scores": [*metadata["tokenizer.ggml.scores"], 0.0, 0.0, 0.0]} if metadata is pieces[1] else {},
        )
        own, tokenizer = tokenizer_of(metadata, FILE), tokenizer_of({**metadata, **filled}, FILE)
        assert tokenizer.get_vocab() == {**own.get_vocab(), "[PAD]": count + 2}
        assert tokenizer.decode([count]) == "" and tokenizer.encode("[PAD]the").ids == own.encode("[PAD]the").ids


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_an_architecture_with_one_pattern_need_not_name_it(architecture: str) -> None:
    silent = tokenizer_of({"general.architecture": architecture, **byte_pairs(pre=None)}, FILE)
    assert silent.to_str() == tokenizer_of(byte_pairs(pre="qwen2"), FILE).to_str()


def test_named_tokens_and_the_template() -> None:
    metadata = byte_pairs(bos_token_id=0, eos_token_id=len(BYTES) + 3, padding_token_id=10**9)
    found = tokenizer_config_of({**metadata, "tokenizer.chat_template": "{{ messages }}"})
    assert found == {"bos_token": "!", "eos_token": "<|end|>", "chat_template": "{{ messages }}"}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (byte_pairs(pre="joyai"), "divides words by the pattern 'joyai', which is not served; served are llama-bpe"),
        (byte_pairs(pre=None), "lacks the metadata `tokenizer.ggml.pre`, which says how texts are divided into words"),
        (of(model="bert", tokens=["a"]), "a tokenizer of the kind 'bert'; served are 'gpt2' and 'llama'"),
        (of(model="gpt2"), "has no usable `tokenizer.ggml.tokens`"),
        (of(model="gpt2", tokens=["a"], pre="qwen2", merges=["a b"]), "merges tokens that its vocabulary lacks"),
        (of(model="llama", tokens=["a", "b"], scores=[0.0]), "has 2 tokens and 1 scores"),
    ],
)
def test_what_is_refused(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError) as caught:
        tokenizer_of(metadata, FILE)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_piece_of_many_letters_is_refused_before_it_is_divided(
    pieces: tuple[sentencepiece.SentencePieceProcessor, dict[str, Any]],
) -> None:
    _, metadata = pieces
    tokens = list(metadata["tokenizer.ggml.tokens"])
    tokens[-1] = "a" * 60_000
    with pytest.raises(StartupError, match="has a piece of 60000 characters; pieces of up to 512 are served"):
        tokenizer_of({**metadata, "tokenizer.ggml.tokens": tokens}, FILE)
