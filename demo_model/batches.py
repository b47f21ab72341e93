"""Turns documents into batches: token ids, and how much each token counts in the loss.

Documents of similar length share a batch, so that there is no packing, no leaking from one document into the next and
hardly any padding; every document starts at position 0, as it does in the server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from demo_model import corpus, tokenizer
from demo_model.phrases import Document

MICRO_TOKENS = 2048
LONGEST = 2048
PROMPT_WEIGHT = 0.1  # the questions of users are not what the model should spend its parameters on


@dataclass(frozen=True)
class Batch:
    """Rows of one micro-batch, padded at the right."""

    ids: torch.Tensor  # [rows, length] int64
    weights: torch.Tensor  # [rows, length] float32; of each token as a target

    @property
    def num_tokens(self) -> int:
        """All positions, padding included: what the processor has to work for."""
        return self.ids.numel()


class Encoder:
    """Encodes documents with the shipped tokenizer files."""

    def __init__(self, folder: Path = tokenizer.PACKAGE) -> None:
        self._tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._template: str = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))["chat_template"]
        self._assistant = tokenizer.SPECIAL.index(tokenizer.ASSISTANT)
        self._end = tokenizer.SPECIAL.index(tokenizer.END)

    def text(self, document: Document) -> str:
        """The document as the model sees it, special tokens written out."""
        if document.text is not None:
            return f"{tokenizer.BOS}{document.text}{tokenizer.END}"
        rendered: Any = render_jinja_template(
            conversations=[list(document.messages)],
            tools=list(document.tools) or None,
            chat_template=self._template,
            bos_token=tokenizer.BOS,
            eos_token=tokenizer.END,
        )[0]
        return str(rendered[0])

    def rows(self, documents: list[Document]) -> list[tuple[list[int], list[float]]]:
        """Ids and weights of each document."""
        encoded = self._tokenizer.encode_batch_fast([self.text(d) for d in documents], add_special_tokens=False)
        return [
            (e.ids[:LONGEST], self._weights(e.ids[:LONGEST], raw=d.text is not None))
            for d, e in zip(documents, encoded, strict=True)
        ]

    def _weights(self, ids: list[int], *, raw: bool) -> list[float]:
        if raw:
            return [1.0] * len(ids)
        weights, answering = [], False
        for token in ids:
            weights.append(1.0 if answering else PROMPT_WEIGHT)
            if token == self._assistant:
                answering = True
            elif token == self._end:
                answering = False
        return weights


def part(encoder: Encoder, seed: int) -> list[Batch]:
    """One part of the corpus as shuffled micro-batches."""
    rng = Random(seed)
    rows = encoder.rows(list(corpus.generate(seed)))
    rng.shuffle(rows)
    rows.sort(key=lambda row: len(row[0]))
    batches: list[Batch] = []
    group: list[tuple[list[int], list[float]]] = []
    for row in rows:
        if group and (len(group) + 1) * len(row[0]) > MICRO_TOKENS:
            batches.append(_padded(group))
            group = []
        group.append(row)
    batches.append(_padded(group))
    rng.shuffle(batches)
    return batches


def stream(encoder: Encoder, step: int, micro_steps: int) -> Iterator[list[Batch]]:
    """The micro-batches of each step from the given step on; the same step always gets the same ones."""
    skip, seed = step * micro_steps, 0
    pending: list[Batch] = []
    while True:
        batches = part(encoder, seed)
        seed += 1
        if skip >= len(batches):
            skip -= len(batches)
            continue
        pending += batches[skip:]
        skip = 0
        while len(pending) >= micro_steps:
            yield pending[:micro_steps]
            pending = pending[micro_steps:]


def _padded(group: list[tuple[list[int], list[float]]]) -> Batch:
    pad = tokenizer.SPECIAL.index(tokenizer.PAD)
    length = max(len(ids) for ids, _ in group)
    ids = torch.full((len(group), length), pad, dtype=torch.long)
    weights = torch.zeros((len(group), length))
    for index, (row, weight) in enumerate(group):
        ids[index, : len(row)] = torch.tensor(row)
        weights[index, : len(row)] = torch.tensor(weight)
    return Batch(ids, weights)
