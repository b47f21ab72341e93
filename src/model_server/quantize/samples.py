"""Token ids for calibration, and others for perplexity."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from model_server.errors import StartupError
from model_server.quantize.layers import Writer
from model_server.quantize.progress import writing
from model_server.text.tokenizer import Tokenizer
from wire.text.counting import counted

logger = logging.getLogger(__name__)

WRITTEN_LENGTH = 512  # tokens of a sample that the model writes itself
# At once: samples whose keys and values take so many bytes, but not fewer or more than so many.
_WRITTEN_BYTES, _FEWEST_WRITTEN, _MOST_WRITTEN = 2**30, 16, 64
_MOST_HELD_OUT = 8


@dataclass(frozen=True, slots=True)
class Samples:
    """Calibration [count, length] and held-out [some, length] int64, disjoint if possible."""

    calibration: Tensor
    held_out: Tensor


def from_file(path: Path, tokenizer: Tokenizer, *, count: int, length: int, seed: int) -> Samples:
    """Cut windows of `length` tokens at random starts, from text or JSON lines with `text`."""
    texts = (tokenizer.encode(text, truncate=0, add_special_tokens=True) for text in _texts(path))
    ids = torch.tensor([number for text in texts for number in text])
    if len(ids) < length:
        raise StartupError(
            f"--calibration {path} has {counted(len(ids), 'token')}, fewer than a sample of --sequence-length {length}"
        )
    kept_back = max(len(ids) // 10, length)
    first, last = (ids, ids) if len(ids) < 2 * length else (ids[:-kept_back], ids[-kept_back:])
    generator = torch.Generator().manual_seed(seed)

    def windows(source: Tensor, number: int) -> Tensor:
        starts = torch.randint(0, len(source) - length + 1, (number,), generator=generator).tolist()
        return torch.stack([source[start : start + length] for start in starts])

    return Samples(windows(first, count), windows(last, _num_held_out(count)))


def kept(path: Path, make: Callable[[], Samples]) -> Samples:
    """Read the samples in `path`, or make and keep them."""
    if not path.exists():
        samples = make()
        draft = path.with_suffix(".draft")
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({"calibration": samples.calibration, "held_out": samples.held_out}, draft)
            os.replace(draft, path)
    try:
        return Samples(**load_file(path))
    except (SafetensorError, OSError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise StartupError(
            f"{path} is damaged ({reason}): remove it, or start from the beginning with --no-resume"
        ) from error


def written(writer: Writer, tokenizer: Tokenizer, begin: int | None, *, count: int, seed: int) -> Samples:
    """Let the model write samples of `WRITTEN_LENGTH` tokens.

    Args:
        begin: The token that begins a text; None: any one.
    """
    logger.info("No --calibration: the model writes %s of %d tokens", counted(count, "sample"), WRITTEN_LENGTH)
    generator = torch.Generator().manual_seed(seed)
    total = count + _num_held_out(count)
    at_once = writer.rows_within(_WRITTEN_BYTES, WRITTEN_LENGTH)
    at_once = min(max(at_once, _FEWEST_WRITTEN), _MOST_WRITTEN)
    parts, done = [], 0
    # Parts of equal size: a step of a few rows takes as long as one of many.
    for part in torch.arange(total).chunk(-(-total // at_once)):
        starts = torch.randint(0, tokenizer.vocab_size, part.shape, generator=generator)
        if begin is not None:
            starts.fill_(begin)
        parts.append(writer.write(starts, WRITTEN_LENGTH, never=sorted(tokenizer.eos_token_ids), generator=generator))
        done += len(part)
        logger.info("The model has written %d of %s", done, counted(total, "sample"))
    ids = torch.cat(parts)
    return Samples(ids[:count].clone(), ids[count:].clone())


def _num_held_out(count: int) -> int:
    return max(1, min(_MOST_HELD_OUT, count // 8))


def _texts(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise StartupError(f"--calibration {path} cannot be read: {error}") from error
    if path.suffix not in (".jsonl", ".json"):
        return [text]
    texts = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)["text"]
            found.encode()  # no lone surrogates
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            text = f"--calibration {path}, line {number}: an object with a string `text` is expected"
            raise StartupError(text) from error
        texts.append(found)
    return texts
