"""S1, sampling: choices against float64, distributions, seeds in any company, and rows without usable scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks.gpu.cases.tally import Tally
from benchmarks.gpu.context import Context
from model_server.sampling.parameters import SamplingParameters
from model_server.sampling.sampler import Sampler

VOCABULARIES = (128_256, 151_936, 32_003, 517)
LEAST_P = 1e-4
FILTERS = {
    "top-k": SamplingParameters(do_sample=True, top_k=7, temperature=1.5),
    "top-p": SamplingParameters(do_sample=True, top_p=0.7, temperature=1.2),
    "min-p": SamplingParameters(do_sample=True, min_p=0.1, temperature=1.3),
    "top-k and top-p": SamplingParameters(do_sample=True, top_k=40, top_p=0.8),
}


def run(context: Context) -> None:
    """Every vocabulary, then distributions over a small one."""
    tally = Tally(context, "sampling")
    for vocab in VOCABULARIES[2:] if context.tiny else VOCABULARIES:
        if not context.has_time(5):
            tally.left_out(f"a vocabulary of {vocab}")
            continue
        _greedy(context, tally, vocab)
        _broken_rows(context, tally, vocab)
        _filters(context, tally, vocab)
        _company(context, tally, vocab)
    _distribution(context, tally)
    tally.tell()


def _sample(context: Context, logits: Tensor, parameters: list[SamplingParameters]) -> list[int | None]:
    """One draw for each row; None for a row that failed."""
    sampler = Sampler(logits.shape[1], context.device)
    rows = [sampler.new_row(p, [0], 8) for p in parameters]
    host = sampler.sample(logits.clone(), rows).to_host()
    return [None if failed else i for i, failed in zip(host.ids, host.failed, strict=True)]


def _greedy(context: Context, tally: Tally, vocab: int) -> None:
    """The largest, and of equal ones the first."""
    logits = torch.randn(33, vocab, device=context.device)
    wanted = logits.double().argmax(-1).tolist()
    ties = torch.zeros(3, vocab, device=context.device)
    for row, places in enumerate(([vocab - 1, 5], [vocab // 2, vocab // 2 + 1], [0, vocab - 1])):
        ties[row, places] = 3.0
        wanted.append(min(places))
    found = _sample(context, torch.cat((logits, ties)), [SamplingParameters()] * 36)
    tally.true(f"greedy, {vocab}", found == wanted, f"{sum(a != b for a, b in zip(found, wanted, strict=True))} differ")


def _broken_rows(context: Context, tally: Tally, vocab: int) -> None:
    """NaN, +inf or nothing but -inf fails its own row; the others choose as without it."""
    logits = torch.randn(8, vocab, device=context.device)
    kinds = [SamplingParameters() if i % 2 else SamplingParameters(do_sample=True, seed=i) for i in range(8)]
    clean = _sample(context, logits, kinds)
    logits[1, vocab // 3] = float("nan")
    logits[2, vocab - 1] = float("inf")
    logits[5] = float("-inf")
    found = _sample(context, logits, kinds)
    failed = [i for i, token in enumerate(found) if token is None]
    same = [found[i] == clean[i] for i in (0, 3, 4, 6, 7)]
    tally.true(f"broken rows, {vocab}", failed == [1, 2, 5] and all(same), f"failed {failed}, others {same}")


def _filters(context: Context, tally: Tally, vocab: int) -> None:
    """What is drawn is in the set that float64 leaves, with a margin for rounding at its edge."""
    count = 24
    logits = (torch.randn(1, vocab, device=context.device) * 3).expand(count, vocab)
    for name, parameters in FILTERS.items():
        kinds = [_with_seed(parameters, 100 + i) for i in range(count)]
        found = _sample(context, logits, kinds)
        allowed = _allowed(logits[0].double().cpu(), parameters)
        outside = [token for token in found if token is None or not allowed[token]]
        tally.true(f"{name}, {vocab}", not outside, f"{len(outside)} of {count} outside")


def _allowed(scores: Tensor, parameters: SamplingParameters) -> Tensor:
    """TGI's order: temperature, then top-k, then top-p, min-p on what is left."""
    scores = scores / parameters.temperature
    kept = torch.ones_like(scores, dtype=torch.bool)
    if parameters.top_k:
        kept &= scores >= scores.topk(parameters.top_k).values[-1]
    probabilities = scores.masked_fill(~kept, -math.inf).softmax(0)
    if parameters.top_p < 1.0:
        ordered, order = probabilities.sort(descending=True)
        before = ordered.cumsum(0) - ordered
        kept[order[before > parameters.top_p + 1e-6]] = False
    if parameters.min_p > 0.0:
        kept &= probabilities >= parameters.min_p * probabilities.max() * (1 - 1e-6)
    return kept


def _company(context: Context, tally: Tally, vocab: int) -> None:
    """A seeded row draws the same alone, among others, and at another place."""
    logits = torch.randn(9, vocab, device=context.device) * 2
    kinds = [SamplingParameters(do_sample=True, temperature=1.1, seed=7 * i) for i in range(9)]
    kinds[3] = SamplingParameters()
    kinds[5] = _with_seed(FILTERS["top-k and top-p"], 35)
    together = _sample(context, logits, kinds)
    alone = [_sample(context, logits[i : i + 1], kinds[i : i + 1])[0] for i in range(9)]
    order = [8, 2, 5, 0, 1, 7, 3, 6, 4]
    moved = _sample(context, logits[order], [kinds[i] for i in order])
    passed = together == alone and [together[i] for i in order] == moved
    tally.true(f"seeds in any company, {vocab}", passed, f"{together} / {alone} / {moved}")


def _distribution(context: Context, tally: Tally) -> None:
    """Chi-square of many seeds over a few tokens, at a temperature."""
    rows, tokens, vocab = (400, 12, 64) if context.tiny else (6000, 12, 517)
    scores = torch.full((vocab,), -math.inf)
    scores[torch.randperm(vocab)[:tokens]] = torch.randn(tokens)
    temperature = 1.4
    kinds = [SamplingParameters(do_sample=True, temperature=temperature, seed=context.seed + i) for i in range(rows)]
    found = _sample(context, scores.to(context.device).expand(rows, vocab), kinds)
    wanted = (scores.double() / temperature).softmax(0) * rows
    drawn = torch.bincount(torch.tensor([-1 if t is None else t for t in found]).clamp(min=0), minlength=vocab)
    places = wanted > 0
    statistic = float(((drawn[places] - wanted[places]) ** 2 / wanted[places]).sum())
    p = float(torch.special.gammaincc(torch.tensor((tokens - 1) / 2), torch.tensor(statistic / 2)))
    inside = int(drawn[~places].sum()) == 0 and None not in found
    tally.true("distribution", p > LEAST_P and inside, f"chi-square p {p:.1e}")


def _with_seed(parameters: SamplingParameters, seed: int) -> SamplingParameters:
    return SamplingParameters(
        do_sample=True, temperature=parameters.temperature, top_k=parameters.top_k, top_p=parameters.top_p,
        min_p=parameters.min_p, seed=seed,
    )  # fmt: skip
