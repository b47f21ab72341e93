"""Random-weight checkpoints of real shapes, with a real tokenizer of the shape's vocabulary.

Nobody measures the text: what matters is that every server loads the same files, reads the same number of tokens from
the same prompt and can turn every token into text. So the merges are made up: all pairs, triples and quadruples of
letters until the vocabulary is full.
"""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent.parent / "out" / "models"

# Hub models of these shapes: SmolLM-135M, Qwen2.5-0.5B, TinyLlama-1.1B; the small one is where overhead is everything.
SHAPES: dict[str, dict[str, Any]] = {
    "15M": {
        "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 1024, "vocab_size": 32000,
    },
    "135M": {
        "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152,
    },
    "0.5B": {
        "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936,
    },
    "1.1B": {
        "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32,
        "num_key_value_heads": 4, "intermediate_size": 5632, "vocab_size": 32000, "tie_word_embeddings": False,
    },
}  # fmt: skip


def checkpoint(shape: str, *, vocabulary_of: str | None = None) -> Path:
    """The folder of a shape's checkpoint (bfloat16), made at the first call. vocabulary_of: a shape whose tokenizer it
    has in place of its own."""
    folder = FOLDER / (shape if vocabulary_of is None else f"{shape}-vocabulary-of-{vocabulary_of}")
    if not (folder / "model.safetensors").exists():
        vocabulary = {"vocab_size": SHAPES[vocabulary_of or shape]["vocab_size"]}
        _make(SHAPES[shape] | vocabulary, folder)
    return folder


def num_parameters(shape: str) -> tuple[int, int]:
    """Parameters that a decode step multiplies with, head included, and those of them in the head."""
    s = SHAPES[shape]
    hidden, heads = s["hidden_size"], s["num_attention_heads"]
    kv_width = hidden // heads * s["num_key_value_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * kv_width + 3 * hidden * s["intermediate_size"]
    head = hidden * s["vocab_size"]
    return s["num_hidden_layers"] * layer + head, head


def _make(shape: dict[str, Any], folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {"tie_word_embeddings": True, **shape}
    config = AutoConfig.for_model(
        settings.pop("model_type"), **settings, max_position_embeddings=2048, bos_token_id=None, eos_token_id=0,
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    # Some ids stay free: loaders add special tokens of their own to a family's tokenizer.
    _write_tokenizer(folder, settings["vocab_size"] - 32)


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(["<|end|>", *alphabet])}
    merges = []
    for left, right in _merges():
        if len(vocab) == vocab_size:
            break
        vocab[left + right] = len(vocab)
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _merges() -> Iterator[tuple[str, str]]:
    """Pairs whose halves exist already: letters after letters, with and without a space (Ġ) in front."""
    for length in itertools.count(2):
        for letters in itertools.product(string.ascii_lowercase, repeat=length - 1):
            beginning = "".join(letters)
            for last in string.ascii_lowercase:
                yield beginning, last
        for letters in itertools.product(string.ascii_lowercase, repeat=length - 2):
            beginning = "Ġ" + "".join(letters)
            for last in string.ascii_lowercase:
                yield beginning, last
