"""What a freshly loaded model must show before it serves: transformers' own logits."""

# Two random sequences, a prefill and four decode steps of both together, compared with each sequence computed alone, in
# full and without a cache. Wrong models were measured 0.25 to 1.4 off (relative to the largest logit), right ones 1e-6.

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model_server.adapters.rows import BASE, CurrentRows, UniformRows, adapter_rows
from model_server.attention.metadata import AttentionMetadata
from model_server.distributed.group import ProcessGroup
from model_server.memory.kv_cache import KvCache
from model_server.models.hf.encoder_decoder import EncoderDecoderRunner
from model_server.models.hf.paged import TransformersRunner
from model_server.models.hf.stateful import StatefulRunner
from model_server.runner.cuda_graphs import GraphedRunner
from model_server.runner.graph_capture import GraphCapture
from model_server.runner.runner import ModelInputs, RequestState, Runner
from wire.decoder_blocks import most_between

# Batch sizes to capture for the check of CUDA graphs: for as many logits as the prefill has, and for decode steps.
GRAPH_SIZES = (64, 2)

# Tokens of the two sequences, and how many of them the prefill has.
LENGTHS = (24, 17)
PREFILLED = (20, 13)

# A window that both sequences outgrow within their prefill, and what configs and modules call windows.
NARROW = 11
WINDOW_FIELDS = ("sliding_window", "attention_window_size", "window_size")

# Logits of tokens that a model never chooses: Chameleon gives those of images the least number of the type.
# The least of float16 is -65504.
MASKED = -6e4


@dataclass(frozen=True, slots=True)
class Verdict:
    """The largest relative error of a row, and whether the model may serve so."""

    error: float
    passed: bool


def check_paged(runner: TransformersRunner, dtype: torch.dtype, device: torch.device) -> Verdict:
    """Compare with transformers' eager attention and experts."""
    sequences = _sequences(runner.model.config, runner.vocab_size, device)
    served = run(runner, sequences, dtype, device)
    with runner.given_back() as model:
        expected = [alone(model, s) for s in sequences]
    return compare(served, expected, 1e-4, dtype)


def check_encoder_decoder(runner: EncoderDecoderRunner, dtype: torch.dtype, device: torch.device) -> Verdict:
    """Compare with transformers, each sequence alone."""
    sequences = _sequences(runner.model.config, runner.vocab_size, device)
    served = run(runner, sequences, dtype, device)
    assert runner.traits.decoder_prefix is not None
    expected = _translations(runner.model, sequences, runner.traits.decoder_prefix)
    return compare([s[p - 1 :] for s, p in zip(served, PREFILLED, strict=True)], expected, 1e-4, dtype)


def check_adapted(
    runner: TransformersRunner, current: CurrentRows, dtype: torch.dtype, device: torch.device
) -> Verdict:
    """Compare a sequence with the first adapter beside one without, each with itself alone."""
    sequences = _sequences(runner.model.config, runner.vocab_size, device)
    numbers = (0, BASE)
    served = run(runner, sequences, dtype, device, numbers=numbers)
    expected = []
    with runner.given_back() as model:
        for number, sequence in zip(numbers, sequences, strict=True):
            current.rows = None if number == BASE else UniformRows(number, device)
            expected.append(alone(model, sequence))
    current.rows = None
    return compare(served, expected, 1e-4, dtype)


def check_captured(
    runner: TransformersRunner, capture: GraphCapture, dtype: torch.dtype, device: torch.device, world: ProcessGroup
) -> bool:
    """Whether captured steps replay equally; all ranks together."""
    # Modelling code may decide on the host what a graph repeats as it was, so a capture without an error is not enough.
    sequences = _sequences(runner.model.config, runner.vocab_size, device)
    expected = run(runner, sequences, dtype, device)
    graphed = GraphedRunner(runner, GRAPH_SIZES, capture)
    try:
        served = run(
            graphed, sequences, dtype, device, prepare=lambda cache: graphed.capture(cache, max(LENGTHS), world)
        )
        return graphed.captured_sizes != () and compare(served, expected, 1e-4, dtype).passed
    finally:
        graphed.release()


def check_stateful(runner: StatefulRunner, dtype: torch.dtype, device: torch.device) -> Verdict:
    """Compare with one full forward, more loosely: recurrences sum in another order.

    Windows that requests can outgrow are tried narrower than the sequences, too.
    """
    verdict = _check_state(runner, dtype, device)
    if not verdict.passed:
        return verdict
    with narrow_windows(runner.model, runner.max_positions) as are_narrow:
        return _check_state(runner, dtype, device) if are_narrow else verdict


@contextmanager
def narrow_windows(model: Any, max_positions: int | None) -> Iterator[bool]:
    """Make windows below `max_positions` shorter than the sequences; yield whether there are some."""
    config = model.config
    places = {id(one): one for one in (config, config.get_text_config(decoder=True), *model.modules())}.values()
    windows = [
        (place, name, value)
        for place in places
        for name in WINDOW_FIELDS
        if _outgrown(value := getattr(place, name, None), max_positions)
    ]
    for place, name, _ in windows:
        setattr(place, name, NARROW)
    try:
        yield bool(windows)
    finally:
        for place, name, value in windows:
            setattr(place, name, value)


def _outgrown(window: Any, max_positions: int | None) -> bool:
    """Whether it is a window longer than the narrow one that a sequence can be longer than."""
    return type(window) is int and window > NARROW and (max_positions is None or window < max_positions)


def _check_state(runner: StatefulRunner, dtype: torch.dtype, device: torch.device) -> Verdict:
    """Compare once; where a full forward gives other results than `generate`, with the steps of each sequence alone."""
    sequences = _sequences(runner.model.config, runner.vocab_size, device)
    served = run(runner, sequences, dtype, device)
    if runner.one_by_one:
        skipped = [0 if runner.traits.decoder_prefix is None else prompt - 1 for prompt in PREFILLED]
        steps = [run(runner, [s], dtype, device, [n])[0] for s, n in zip(sequences, PREFILLED, strict=True)]
        together, apart = ([s[n:] for s, n in zip(all_, skipped, strict=True)] for all_ in (served, steps))
        return compare(together, apart, 2e-3, dtype)
    if runner.traits.decoder_prefix is None:
        return compare(served, [alone(runner.model, s, **runner.of_text(s)) for s in sequences], 2e-3, dtype)
    expected = _translations(runner.model, sequences, runner.traits.decoder_prefix)
    return compare([s[p - 1 :] for s, p in zip(served, PREFILLED, strict=True)], expected, 2e-3, dtype)


def _sequences(config: Any, vocab_size: int, device: torch.device) -> list[Tensor]:
    """Make random ids without the padding token, which some models do not count."""
    generator = torch.Generator().manual_seed(0)
    padding = getattr(config.get_text_config(decoder=True), "pad_token_id", None)
    sequences = []
    for length in LENGTHS:
        ids = torch.randint(0, vocab_size, (length,), generator=generator)
        if isinstance(padding, int):
            ids[ids == padding] = (padding + 1) % vocab_size
        sequences.append(ids.to(device))
    return sequences


def run(
    runner: Runner,
    sequences: Sequence[Tensor],
    dtype: torch.dtype,
    device: torch.device,
    prefilled: Sequence[int] = PREFILLED,
    prepare: Callable[[KvCache], object] = lambda cache: None,
    numbers: Sequence[int] | None = None,
) -> list[Tensor]:
    """Return each token's logits, computed as by the engine: a prefill, then decode steps together.

    Args:
        prepare: Called with the cache first.
        numbers: Of the sequences' adapters, if any.
    """
    # Blocks alternate between the sequences, and what has not been written is NaN.
    block_size = runner.traits.block_size
    between = most_between(runner.traits.prefix_length, block_size)
    widths = [-(-(len(s) + between) // block_size) for s in sequences]
    count = len(sequences)
    tables = torch.arange(1, 1 + count * max(widths), dtype=torch.int32, device=device).view(-1, count).T.contiguous()
    cache = KvCache(runner.kv_shapes, 1 + tables.numel(), block_size, dtype, device)
    for rows in cache.rows:
        rows.fill_(float("nan"))
    prepare(cache)
    states = [RequestState(n) for n in prefilled]
    parts: list[list[Tensor]] = [[] for _ in sequences]
    spans = [(0, n) for n in prefilled]
    while True:
        taking = [i for i, (first, last) in enumerate(spans) if last > first]
        if not taking:
            return [torch.cat(p) for p in parts]
        inputs = _inputs([sequences[i] for i in taking], [spans[i] for i in taking], tables[taking], block_size)
        inputs = replace(inputs, states=tuple(states[i] for i in taking))
        if numbers is not None:
            of_rows = np.repeat([numbers[i] for i in taking], [spans[i][1] - spans[i][0] for i in taking])
            inputs = replace(inputs, adapters=adapter_rows(of_rows, None, device))
        logits = runner.forward(inputs, cache)
        parted: Sequence[Tensor] = torch.split(logits, [spans[i][1] - spans[i][0] for i in taking])
        for i, rows in zip(taking, parted, strict=True):
            parts[i].append(rows.clone())  # those of a replay hold until the next one
        spans = [(last, min(last + 1, len(s))) for (_, last), s in zip(spans, sequences, strict=True)]


def _inputs(
    sequences: Sequence[Tensor], spans: Sequence[tuple[int, int]], tables: Tensor, block_size: int
) -> ModelInputs:
    device = tables.device
    positions = [torch.arange(first, last, device=device) for first, last in spans]
    slots = [tables[i, p // block_size].long() * block_size + p % block_size for i, p in enumerate(positions)]
    lengths = [last - first for first, last in spans]
    cumulative = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    ends = [last for _, last in spans]
    metadata = AttentionMetadata(
        slots=torch.cat(slots),
        block_tables=tables,
        cu_seqlens_q=torch.tensor(cumulative, dtype=torch.int32, device=device),
        kv_lengths=torch.tensor(ends, dtype=torch.int32, device=device),
        query_lengths_host=tuple(lengths),
        kv_lengths_host=tuple(ends),
    )
    ids = torch.cat([s[first:last] for s, (first, last) in zip(sequences, spans, strict=True)])
    # Logits of all rows: a step with prompts names them, as the engine's does.
    rows = None if metadata.is_decode else torch.arange(len(ids), device=device)
    return ModelInputs(ids, torch.cat(positions), metadata, rows)


def alone(model: Any, sequence: Tensor, **arguments: Any) -> Tensor:
    """Return logits [n, vocab] of one forward without a cache."""
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    logits: Tensor = model(input_ids=sequence.unsqueeze(0), return_dict=True, **options, **arguments).logits[0]
    return logits.float()


def translated(model: Any, prompt: Tensor, prefix: tuple[int, ...], generated: Tensor) -> Tensor:
    """Return an encoder-decoder's logits from the prefix's end on, without a cache."""
    start = torch.tensor(prefix, dtype=generated.dtype, device=generated.device)
    logits: Tensor = model(
        input_ids=prompt.unsqueeze(0),
        decoder_input_ids=torch.cat([start, generated]).unsqueeze(0),
        use_cache=False,
        return_dict=True,
    ).logits[0]
    return logits[len(prefix) - 1 :].float()


def _translations(model: Any, sequences: Sequence[Tensor], prefix: tuple[int, ...]) -> list[Tensor]:
    """Return what is `translated` of each sequence."""
    return [translated(model, s[:n], prefix, s[n:]) for s, n in zip(sequences, PREFILLED, strict=True)]


def compare(served: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float, dtype: torch.dtype) -> Verdict:
    """Compare rows, relative to the largest logit; in 16 bits, where experts nearly tie, nine in ten are enough.

    Masked logits must be masked on both sides, and count neither as errors nor for the scale.
    """
    errors = []
    for got, want in zip(served, expected, strict=True):
        masked = want <= MASKED
        scale = want.masked_fill(masked, 0).abs().max().clamp(min=1e-30)
        differences = (got - want).masked_fill(masked, 0).abs()
        differences = differences.masked_fill((masked != (got <= MASKED)) | masked.all(-1, keepdim=True), float("inf"))
        errors.append((differences.amax(-1) / scale).nan_to_num(float("inf")))
    error = torch.cat(errors)
    if dtype == torch.float32:
        return Verdict(float(error.max()), bool((error <= tolerance).all()))
    return Verdict(float(error.max()), float((error <= max(5e-2, 40 * tolerance)).float().mean()) >= 0.9)
