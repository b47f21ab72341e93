"""S10: the first minutes on a card: what Triton needs, and two models whose steps are compared with plain torch."""

from __future__ import annotations

import os
import shutil
import sysconfig
import time
from pathlib import Path

import torch

from benchmarks.gpu.context import Context
from benchmarks.gpu.subjects.drive import Driver, make_engine, random_cache
from benchmarks.gpu.subjects.shapes import TOY_UNTIED, Shape, by_size
from benchmarks.gpu.subjects.synthetic import engine_tokenizer, make_decoder
from model_server.attention.choice import AttentionChoice
from model_server.kernels.availability import refusal

PROMPTS = (5, 33, 70)
TOKENS = 9  # one of the prompt, eight of decode steps


def run(context: Context) -> None:
    """First what is installed: a missing compiler explains all that follows."""
    compilers = [os.environ.get("CC", ""), *("gcc", "cc", "clang")]
    context.note("C compiler", next((found for name in compilers if name and (found := shutil.which(name))), "none"))
    context.note("Python.h", str((Path(sysconfig.get_paths()["include"]) / "Python.h").exists()))
    context.note("CUDA_LAUNCH_BLOCKING", os.environ.get("CUDA_LAUNCH_BLOCKING", "unset"))
    reason = refusal(context.device)
    context.check("Triton's kernels run", reason is None or not context.on_cuda, reason or "")
    small = by_size(context.tiny)[0]
    for shape in dict.fromkeys((TOY_UNTIED, small)):
        _compare(context, shape)


def _compare(context: Context, shape: Shape) -> None:
    """The same ids with the device's backend and with plain torch, in float32; a tie may be cut either way."""
    best, took = _ids(context, shape, None)
    plain, _ = _ids(context, shape, "reference")
    same = sum(a == b for one, other in zip(best, plain, strict=True) for a, b in zip(one, other, strict=True))
    total = len(PROMPTS) * TOKENS
    first = all(one[0] == other[0] for one, other in zip(best, plain, strict=True))
    context.check(f"{shape.name}: first ids as with plain torch", first)
    detail = f"{took:.1f} s with compiling"
    context.figure(f"{shape.name}: ids as with plain torch", same / total, "share", detail=detail)


def _ids(context: Context, shape: Shape, word: str | None) -> tuple[list[list[int]], float]:
    dtype = torch.float32
    backend = AttentionChoice(word, context.device, dtype).for_layers()
    started = time.perf_counter()
    runner = make_decoder(shape, context.device, dtype, attention=backend)
    engine = make_engine(runner, context.device, engine_tokenizer(shape.vocab))
    random_cache(engine, 64 if backend.block_size < 256 else 8, dtype)
    driver = Driver(engine)
    found = driver.generate([driver.request(driver.random_prompt(n), TOKENS) for n in PROMPTS])
    return list(found.values()), time.perf_counter() - started
