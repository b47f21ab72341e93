"""Which checkpoints the parity tests hold to transformers, and what one of them consists of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

# Every row: model type, variant. Adding a family means adding its rows.
CASES = [
    ("llama", "plain"),
    ("llama", "biases_tied"),
    ("llama", "llama3"),
    ("llama", "yarn"),
    ("llama", "linear"),
    ("llama", "mha"),
    ("llama", "mqa"),
    ("llama", "odd_vocab"),
    ("llama", "odd_vocab_tied"),
    ("llama", "head_dim"),
    ("mistral", "plain"),
    ("mistral", "no_window"),
    ("qwen2", "plain"),
    ("qwen2", "windows"),
    ("qwen3", "plain"),
    ("qwen3", "windows"),
]


@dataclass(frozen=True)
class Case:
    """A checkpoint and what each of its prompts must give: logits [length, vocab] float32."""

    path: Path
    sequences: list[Tensor]
    logits: list[Tensor]
