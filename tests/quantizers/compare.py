"""A quantizer's checkpoint as this project reads it, against the library's own reading."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path

import torch
from parity.protocol import PagedBatch
from safetensors.torch import load_file
from support.loading import load

from model_server.errors import StartupError

TOLERANCE = 1e-2
"""Of the largest logit. Libraries that decode to float16 or bfloat16 differ by a part of it; most by 3e-6."""


@dataclass(frozen=True)
class Outcome:
    """kind: equal, refused, different, crashed, or not made, where the library does not take its own option."""

    kind: str
    detail: str = ""


def compare(folder: Path) -> Outcome:
    """Compares what a writer left in `folder`: logits at every place, and the tokens that follow prompts greedily."""
    failure = folder / "error.txt"
    if failure.is_file():
        return Outcome("not made", failure.read_text().strip().splitlines()[0][:200])
    expected = load_file(folder / "expected.safetensors")
    tokens, theirs = expected["tokens"], expected["logits"]
    if not theirs.isfinite().all():
        return Outcome("not made", "the library's own reading computes no numbers")
    sequences = list(tokens[:, :-1])
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            runner = load(folder / "model")
            ours = torch.stack(PagedBatch(runner, sequences, 4).step([len(one) for one in sequences]))
    except StartupError as error:
        return Outcome("refused", str(error))
    except Exception as error:
        return Outcome("crashed", f"{type(error).__name__}: {error}"[:200])
    if not ours.isfinite().all():
        return Outcome("different", "no numbers")
    worst = float((ours - theirs).abs().max() / theirs.abs().max())
    if worst > TOLERANCE:
        agree = float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
        return Outcome("different", f"relative error {worst:.1e}, {agree:.0%} of tokens")
    return Outcome("equal", f"relative error {worst:.0e}")
