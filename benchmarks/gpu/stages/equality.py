"""S3: the same tokens as transformers, and the same tokens whichever way they are computed."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.cases.attention_alone import make_metadata, scattered
from benchmarks.gpu.context import Context
from benchmarks.gpu.subjects.drive import Driver, make_engine
from benchmarks.gpu.subjects.graph_hooks import capture, graphed
from benchmarks.gpu.subjects.shapes import SMALL, TOY_UNTIED, Shape, by_size
from benchmarks.gpu.subjects.synthetic import make_decoder, make_transformers
from model_server.attention.choice import AttentionChoice
from model_server.memory.kv_cache import KvCache
from model_server.models.decoder.decoder import Decoder
from model_server.runner.runner import ModelInputs

# Of transformers' own error in bfloat16, both against float32 with the same weights: what random weights make of
# rounding depends on the shape (3 % and 9 % on an H200).
LOGIT_ERROR = 1.25
# How much rarer ours may choose the token that float32 chooses.
CHOICES = 0.02


def run(context: Context) -> None:
    """Small models in float32 by their ids, large ones in bfloat16 by their logits."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    small = TOY_UNTIED if context.tiny else SMALL
    _against_generate(context, small)
    _ways(context, small)
    for shape in by_size(context.tiny)[:2]:
        if not context.has_time(25):
            context.skip(f"{shape.name}: logits against transformers", "no time left")
            continue
        _teacher_forced(context, shape)
        gc.collect()
        if context.on_cuda:
            torch.cuda.empty_cache()


def _against_generate(context: Context, shape: Shape) -> None:
    """Ragged prompts, greedy, float32: the ids of transformers' `generate` on the same weights."""
    count, new_tokens, longest = (4, 6, 12) if context.tiny else (64, 64, 200)
    driver = _float32_driver(context, shape, tokens=count * (longest + new_tokens + 64))
    generator = torch.Generator().manual_seed(context.seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    prompts = [driver.random_prompt(n) for n in lengths]
    ours = list(driver.generate([driver.request(p, new_tokens) for p in prompts]).values())
    peer = make_transformers(shape, context.device, torch.float32, attn_implementation="eager")
    theirs = _generate(peer, prompts, new_tokens, context.device)
    equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
    context.check(
        f"{shape.name} float32: ids of {count} prompts x {new_tokens} equal transformers' generate",
        equal == count,
        f"{equal} of {count}" + _first_difference(ours, theirs),
    )


def _generate(model: Any, prompts: list[list[int]], new_tokens: int, device: torch.device) -> list[list[int]]:
    """Padded on the left, as transformers wants a batch."""
    width = max(len(p) for p in prompts)
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    output = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    found: list[list[int]] = output[:, width:].tolist()
    return found


def _first_difference(ours: list[list[int]], theirs: list[list[int]]) -> str:
    for row, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            place = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
            return f"; row {row} differs first at token {place}"
    return ""


def _ways(context: Context, shape: Shape) -> None:
    """One shot, in chunks, after a prefix hit, in a graph, alone and among 32: the same ids in float32."""
    new_tokens, length = (6, 40) if context.tiny else (32, 600)
    rows = 4 if context.tiny else 32
    driver = _float32_driver(context, shape, tokens=(rows + 2) * (length + new_tokens + 128))
    prompts = [driver.random_prompt(length - i) for i in range(rows)]

    def ids(requests: list[Any]) -> list[list[int]]:
        return list(driver.generate(requests).values())

    whole = ids([driver.request(p, new_tokens) for p in prompts])
    for name, way in _other_ways(driver, prompts, new_tokens).items():
        driver.engine.clear(None)
        driver.blocks.reset()
        found = way()
        expected = whole[: len(found)]
        context.check(f"float32: {name}", found == expected, _first_difference(found, expected))
    driver.engine.runner = graphed(driver.engine.runner, context.device, (1, 8, 16, rows))
    if not capture(driver.engine, length + new_tokens + 64):
        context.skip("float32: graph as eager", "no CUDA graphs on this device")
        return
    driver.engine.clear(None)
    driver.blocks.reset()
    found = ids([driver.request(p, new_tokens) for p in prompts])
    context.check("float32: graph as eager", found == whole, _first_difference(found, whole))


def _other_ways(driver: Driver, prompts: list[list[int]], new_tokens: int) -> dict[str, Callable[[], list[list[int]]]]:
    size, session = driver.engine.options.block_size, driver.engine.session

    def chunked() -> list[list[int]]:
        driver.engine.start(dataclasses.replace(session, max_prefill_tokens=max(16, len(prompts[0]) // 3)))
        try:
            requests = [driver.request(p, new_tokens, chunk=max(1, len(p) // 4)) for p in prompts[:3]]
            return list(driver.generate(requests).values())
        finally:
            driver.engine.start(session)

    def hit() -> list[list[int]]:
        """The first blocks are those of a request that went before, and hold what it wrote."""
        prompt = prompts[0]
        shared = (len(prompt) - 1) // size * size
        if shared == 0:
            raise RuntimeError("the prompt is shorter than a block")
        first = driver.request(prompt[:shared] + driver.random_prompt(3), 2)
        driver.generate([first])
        own = driver.blocks.take(len(prompt) - shared + new_tokens)
        blocks = np.concatenate([first.blocks[: shared // size], own])
        second = driver.request(prompt, new_tokens, cached=shared, blocks=blocks)
        return list(driver.generate([second]).values())

    def alone() -> list[list[int]]:
        found = []
        for prompt in prompts[:3]:
            driver.blocks.reset()
            found += driver.generate([driver.request(prompt, new_tokens)]).values()
        return found

    return {"chunks as one shot": chunked, "prefix hit as miss": hit, f"alone as among {len(prompts)}": alone}


def _float32_driver(context: Context, shape: Shape, tokens: int) -> Driver:
    """A cache full of NaN: what is read without having been written shows."""
    backend = AttentionChoice(None, context.device, torch.float32).for_layers()
    runner = make_decoder(shape, context.device, torch.float32, attention=backend)
    engine = make_engine(runner, context.device)
    blocks = -(-tokens // backend.block_size) + 64
    cache = KvCache(runner.kv_shapes, blocks, backend.block_size, torch.float32, context.device)
    for rows in cache.rows:
        rows.fill_(float("nan"))
    engine.set_cache(cache)
    return Driver(engine, seed=context.seed)


def _teacher_forced(context: Context, shape: Shape) -> None:
    """The same tokens to both, in the type that is served."""
    dtype = torch.bfloat16
    lengths = [9, 17, 5] if context.tiny else [300, 257, 64, 511]
    prompts = [torch.randint(2, shape.vocab, (n,)) for n in lengths]
    runner = make_decoder(shape, context.device, dtype)
    ours = _logits(runner, prompts, dtype, context.device)
    del runner
    gc.collect()
    peer = make_transformers(shape, context.device, dtype, attn_implementation="sdpa")
    theirs = [peer(p[None].to(context.device)).logits[0].float() for p in prompts]
    peer = peer.float()
    exact = torch.cat([peer(p[None].to(context.device)).logits[0] for p in prompts])
    name = f"{shape.name} bfloat16: logits against transformers"
    own, others = (_error(torch.cat(found), exact) for found in (ours, theirs))
    context.check(name, own < LOGIT_ERROR * others, f"error against float32 {own:.2e}, transformers' {others:.2e}")
    chosen = exact.argmax(-1)
    ours_right, right = (float((torch.cat(found).argmax(-1) == chosen).float().mean()) for found in (ours, theirs))
    context.check(
        f"{name}: float32's choices", ours_right > right - CHOICES, f"{ours_right:.3f}, transformers' {right:.3f}"
    )


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def _logits(runner: Decoder, prompts: list[Tensor], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """All logits of all prompts, in one forward."""
    size = AttentionChoice(None, device, dtype).for_layers().block_size
    counts = [-(-len(p) // size) for p in prompts]
    cache = KvCache(runner.kv_shapes, sum(counts) + 1, size, dtype, device)
    inputs = ModelInputs(
        input_ids=torch.cat(prompts).to(device),
        positions=torch.cat([torch.arange(len(p)) for p in prompts]).to(device),
        attention=make_metadata(scattered(counts), [(0, len(p)) for p in prompts], size, device),
        logit_rows=None,
    )
    return list(runner.forward(inputs, cache).float().split([len(p) for p in prompts]))
