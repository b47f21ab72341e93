"""Folders of models that come without a tokenizer.json, in each form that transformers can read."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

TEXT = (
    "The quick brown fox jumps over the lazy dog. def main() -> None: return None. "
    "Überraschung, naïve café, 日本語, 한국어, emoji 🙂, numbers 12345.678 and  two spaces.\n"
) * 40


def byte_level_bpe(folder: Path, model_type: str = "gpt2", tokenizer_class: str = "GPT2Tokenizer") -> None:
    """vocab.json and merges.txt."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    tokenizer.model.save(str(folder))
    _write(folder, model_type, tokenizer_class=tokenizer_class, eos_token="<|endoftext|>")


def qwen2(folder: Path) -> None:
    """The same, with another pattern to split by and tokens of its own."""
    byte_level_bpe(folder, "qwen2", "Qwen2Tokenizer")


def word_piece(folder: Path) -> None:
    """vocab.txt."""
    words = sorted({"##" + letter for letter in TEXT.lower() if letter.isalnum()} | set(TEXT.lower().split()))
    letters = sorted({letter for letter in TEXT.lower() if not letter.isspace()})
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys([*letters, *words])]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    _write(folder, "bert", tokenizer_class="BertTokenizer")


def sentencepiece_bpe(folder: Path) -> None:
    """tokenizer.model, as Llama 2 and Mistral have it: bytes for what is unknown."""
    options = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
    (folder / "tokenizer.model").write_bytes(_sentencepiece(**options, remove_extra_whitespaces=False))
    _write(
        folder, "llama", tokenizer_class="LlamaTokenizer", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        add_bos_token=True, add_eos_token=False,
    )  # fmt: skip


def sentencepiece_unigram(folder: Path) -> None:
    """spiece.model, as T5 has it."""
    (folder / "spiece.model").write_bytes(_sentencepiece(model_type="unigram", pad_id=3, bos_id=-1))
    _write(folder, "t5", tokenizer_class="T5Tokenizer", extra_ids=0)


def tiktoken(folder: Path) -> None:
    """tokenizer.model in tiktoken's form, as Llama 3 was released first: a token and its rank on each line."""
    tokens = [bytes([number]) for number in range(256)] + [b" t", b"he", b" the", b"in", b"re", b"an", b"qu"]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (folder / "tokenizer.model").write_text("\n".join(lines) + "\n")
    _write(folder, "llama", tokenizer_class="PreTrainedTokenizerFast")


KINDS: dict[str, Callable[[Path], None]] = {
    "gpt2": byte_level_bpe,
    "qwen2": qwen2,
    "bert": word_piece,
    "llama": sentencepiece_bpe,
    "t5": sentencepiece_unigram,
    "tiktoken": tiktoken,
}


def _sentencepiece(**options: Any) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()), model_writer=model, vocab_size=400, hard_vocab_limit=False,
        minloglevel=2, **options,
    )  # fmt: skip
    return model.getvalue()


def _write(folder: Path, model_type: str, **settings: Any) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
