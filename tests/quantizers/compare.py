"""A quantizer's checkpoint as this project reads it, against the library's own reading."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import torch
from parity.protocol import PagedBatch
from quantizers.outcomes import Case
from safetensors import SafetensorError
from safetensors.torch import load_file
from support.loading import load

from model_server.errors import StartupError

TOLERANCE = 1e-2
"""Of the largest logit. Libraries that decode to float16 or bfloat16 differ by a part of it; most by 3e-6."""


def compare(folder: Path) -> Case:
    """Compares what a writer left in `folder`: logits at every place, and the tokens that follow prompts greedily."""
    kind, detail = _compared(folder)
    return Case(folder.name, kind, detail)


def _compared(folder: Path) -> tuple[str, str]:
    failure = folder / "error.txt"
    if failure.is_file():
        return "not made", failure.read_text().strip().splitlines()[0][:200]
    try:
        expected = load_file(folder / "expected.safetensors")
    except (OSError, SafetensorError):
        return "crashed", "its writer ended before it was whole"
    tokens, theirs = expected["tokens"], expected["logits"]
    if not theirs.isfinite().all():
        return "not made", "the library's own reading computes no numbers"
    sequences = list(tokens[:, :-1])
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            runner = load(folder / "model")
            ours = torch.stack(PagedBatch(runner, sequences, 4).step([len(one) for one in sequences]))
    except StartupError as error:
        return "refused", str(error)
    except Exception as error:
        return "crashed", f"{type(error).__name__}: {error}"[:200]
    if not ours.isfinite().all():
        return "different", "no numbers"
    worst = float((ours - theirs).abs().max() / theirs.abs().max())
    if worst > TOLERANCE:
        agree = float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
        return "different", f"relative error {worst:.1e}, {agree:.0%} of tokens"
    return "equal", f"relative error {worst:.0e}"
