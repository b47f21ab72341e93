"""Sampling kernels in Triton's interpreter against the rules of `sampling.categorical` and `sampling.filters`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from model_server.kernels.sampling import sampling
from model_server.kernels.sampling.sampling import SampledRows
from model_server.sampling.categorical import sample_columns, uniforms, weight_bits, weights
from model_server.sampling.filters import Filters, filter_whole, shifted
from model_server.sampling.parameters import SamplingParameters

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def where(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` takes its tensors there; references are computed on the CPU."""
    monkeypatch.setattr(f"{__name__}.DEVICE", device)


DEVICE = CPU


def taken(
    rows: Sequence[int], parameters: Sequence[SamplingParameters], counts: Sequence[int], vocab: int
) -> SampledRows:
    """Rows and their parameters, already in the order greedy, unfiltered, filtered."""
    kinds = [0 if not p.samples else 2 if p.filters else 1 for p in parameters]
    assert kinds == sorted(kinds)
    columns = {
        "rows": torch.tensor(rows, dtype=torch.int32),
        "seeds": torch.from_numpy(np.array([p.seed for p in parameters], dtype=np.uint64).view(np.int64)),
        "counts": torch.tensor(counts, dtype=torch.int64),
        "temperature": torch.tensor([p.temperature for p in parameters], dtype=torch.float32),
        "top_k": torch.tensor([min(p.top_k, vocab) or vocab for p in parameters], dtype=torch.int32),
        "dropped": torch.tensor([1.0 - p.top_p if p.top_p < 1.0 else -1.0 for p in parameters], dtype=torch.float64),
        "min_p": torch.tensor([math.log(p.min_p) if p.min_p else -math.inf for p in parameters], dtype=torch.float32),
    }
    on_device = {name: column.to(DEVICE) for name, column in columns.items()}
    return SampledRows(**on_device, num_greedy=kinds.count(0), num_unfiltered=kinds.count(1))


def run(logits: Tensor, parameters: Sequence[SamplingParameters], counts: Sequence[int] | None = None) -> Tensor:
    """Ids, logprobs, failed of all rows: [3, n] float64."""
    logits = logits.to(DEVICE)
    num = len(parameters)
    counts = [0] * num if counts is None else counts
    ids = torch.full((num,), -7, dtype=torch.int64, device=DEVICE)
    packed = torch.full((3, num), math.nan, dtype=torch.float64, device=DEVICE)
    rows = taken(range(num), parameters, counts, logits.shape[1])
    before = logits.clone()
    sampling.sample(logits, rows, weight_bits(logits.shape[1]), ids, packed)
    assert torch.equal(logits.nan_to_num(nan=7.5), before.nan_to_num(nan=7.5))
    assert torch.equal(ids.double(), packed[0])
    drawn = [0 if number < rows.num_greedy else 1 for number in range(num)]
    assert (rows.counts.cpu() - torch.tensor(counts)).tolist() == drawn
    return packed.cpu()


def expected(logits: Tensor, parameters: SamplingParameters, count: int = 0) -> tuple[int, float]:
    """One drawn row by plain torch."""
    bits = weight_bits(logits.shape[0])
    filters = Filters.of([parameters], logits.shape[0], CPU)
    row = logits[None]
    values = filter_whole(row, filters, bits).values if parameters.filters else shifted(row, filters.temperature)[0]
    number = uniforms(np.array([parameters.seed], np.uint64), np.array([count], np.uint64))
    column, total = sample_columns(weights(values, bits), torch.from_numpy(number)[:, None])
    logprob = values[0, int(column)].double() - (total.double().log() - bits * math.log(2.0))
    return int(column), float(logprob)


def noise(num: int, vocab: int, scale: float = 2.0, seed: int = 0) -> Tensor:
    return torch.randn(num, vocab, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("vocab", [3, 1024, 1025, 5000])
def test_greedy_rows(vocab: int) -> None:
    logits = noise(4, vocab)
    logits[1, :] = -math.inf
    logits[1, vocab - 1] = -3.0
    packed = run(logits, [SamplingParameters()] * 4)
    assert packed[0].tolist() == logits.argmax(1).tolist()
    wanted = logits.double().log_softmax(1).amax(1)
    torch.testing.assert_close(packed[1], wanted, rtol=1e-5, atol=1e-5)
    assert packed[2].tolist() == [0.0] * 4


@pytest.mark.parametrize("ids", [(5, 6), (1023, 1024), (7, 2500), (0, 2999)])
def test_ties_take_the_lowest_id(ids: tuple[int, int]) -> None:
    logits = noise(1, 3000)
    logits[0, list(ids)] = 100.0
    assert run(logits, [SamplingParameters()])[0].tolist() == [ids[0]]


MANY = [
    SamplingParameters(do_sample=True),
    SamplingParameters(temperature=0.3),
    SamplingParameters(temperature=3.0),
    SamplingParameters(do_sample=True, top_k=1),
    SamplingParameters(do_sample=True, top_k=7),
    SamplingParameters(top_k=50, temperature=0.7),
    SamplingParameters(top_k=5000, temperature=1.3),
    SamplingParameters(top_p=0.5),
    SamplingParameters(top_p=0.95, temperature=0.6),
    SamplingParameters(top_p=0.999, temperature=4.0),
    SamplingParameters(top_p=0.001),
    SamplingParameters(min_p=0.1),
    SamplingParameters(min_p=0.0001, temperature=2.0),
    SamplingParameters(top_k=40, top_p=0.9, min_p=0.05, temperature=0.8),
    SamplingParameters(top_k=20, top_p=0.3),
    SamplingParameters(top_p=0.8, min_p=0.2),
]


def seeded(parameters: SamplingParameters, seed: int) -> SamplingParameters:
    return replace(parameters, seed=seed)


@pytest.mark.parametrize(("vocab", "coarse"), [(5, False), (3001, False), (3001, True)])
def test_draws_are_those_of_plain_torch(vocab: int, coarse: bool) -> None:
    """Every kind of row; with `coarse`, logits of few different values, so that thresholds fall among ties."""
    for turn in range(1):
        parameters = [seeded(p, (2**64 - 1) // (number + 1 + 16 * turn)) for number, p in enumerate(MANY)]
        logits = noise(len(parameters), vocab, seed=turn)
        if coarse:
            logits = logits.round()
        counts = [turn * 100 + number for number in range(len(parameters))]
        packed = run(logits, parameters, counts)
        for number, row in enumerate(parameters):
            token, logprob = expected(logits[number], row, counts[number])
            assert packed[0, number] == token, (row, turn)
            assert packed[1, number] == pytest.approx(logprob, abs=2e-5)
        assert packed[2].tolist() == [0.0] * len(parameters)


def test_rows_with_too_many_candidates_are_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_CAPACITY", 16)
    test_draws_are_those_of_plain_torch(2500, coarse=True)


def test_masked_rows() -> None:
    """All but a few logits are -inf, as behind a grammar: fewer than top-k are left."""
    parameters = [seeded(p, number) for number, p in enumerate(MANY) if number % 3 == 0]
    logits = torch.full((len(parameters), 2100), -math.inf)
    logits[:, [3, 1500, 2099]] = noise(len(parameters), 3)
    packed = run(logits, parameters)
    for number, row in enumerate(parameters):
        assert packed[0, number] == expected(logits[number], row)[0]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=str)
def test_an_unusable_row_fails_alone(poison: float) -> None:
    kinds = [SamplingParameters(), SamplingParameters(do_sample=True), SamplingParameters(top_k=9, top_p=0.9)]
    parameters = [seeded(kind, 5) for kind in kinds for _ in range(2)]
    logits = noise(6, 2500)
    clean = run(logits, parameters)
    if poison == -math.inf:
        logits[::2] = poison
    else:
        logits[::2, 1777] = poison
    packed = run(logits, parameters)
    assert packed[2].tolist() == [1.0, 0.0] * 3
    assert packed[:2, ::2].tolist() == [[0.0] * 3] * 2
    assert torch.equal(packed[:, 1::2], clean[:, 1::2])


def test_a_seed_gives_the_same_tokens_in_any_batch() -> None:
    vocab = 2300
    parameters = [SamplingParameters(), *(seeded(p, 40 + number) for number, p in enumerate(MANY))]
    logits = noise(len(parameters), vocab)
    together = run(logits, parameters)
    for number, row in list(enumerate(parameters))[::3]:
        alone = run(logits[number : number + 1].clone(), [row])
        assert torch.equal(alone[:, 0], together[:, number])


def test_rows_are_taken_by_index_and_others_left_alone() -> None:
    vocab = 1100
    logits = noise(6, vocab)
    rows = [4, 0, 2]
    parameters = [
        SamplingParameters(),
        SamplingParameters(do_sample=True, seed=3),
        SamplingParameters(top_p=0.5, seed=4),
    ]
    ids = torch.full((6,), -7, dtype=torch.int64, device=DEVICE)
    packed = torch.full((3, 6), -7.0, dtype=torch.float64, device=DEVICE)
    sampling.sample(logits.to(DEVICE), taken(rows, parameters, [0] * 3, vocab), weight_bits(vocab), ids, packed)
    assert ids[4] == logits[4].argmax()
    assert ids[0] == expected(logits[0], parameters[1])[0]
    assert ids[2] == expected(logits[2], parameters[2])[0]
    assert ids[[1, 3, 5]].tolist() == [-7] * 3
    assert (packed[:, [1, 3, 5]] == -7).all()


@pytest.mark.parametrize(
    ("parameters", "num"),
    [(SamplingParameters(temperature=1.5), 300), (SamplingParameters(top_k=4, temperature=3.0), 50)],
)
def test_the_empirical_distribution(parameters: SamplingParameters, num: int) -> None:
    """Chi-square over many seeds of one row; the bound is the quantile of 1 - 1e-4."""
    vocab = 12
    row = noise(1, vocab, seed=3)
    rows = [seeded(parameters, seed) for seed in range(num)]
    packed = run(row.expand(num, -1).contiguous(), rows)
    filters = Filters.of([parameters], vocab, CPU)
    values = filter_whole(row, filters, weight_bits(vocab)).values[0]
    shares = values.double().softmax(0)
    counts = torch.bincount(packed[0].long(), minlength=vocab).double()
    possible = shares > 0
    assert (counts[~possible] == 0).all()
    statistic = ((counts - num * shares) ** 2 / (num * shares))[possible].sum()
    degrees = int(possible.sum()) - 1
    # Wilson and Hilferty's approximation of the quantile; 3.719 is the normal one.
    bound = degrees * (1 - 2 / (9 * degrees) + 3.719 * math.sqrt(2 / (9 * degrees))) ** 3
    assert statistic < bound


def test_the_distribution_is_float64_softmax() -> None:
    """Logprobs of drawn tokens against a reference that knows nothing of fixed point."""
    logits = noise(8, 2000)
    rows = [SamplingParameters(temperature=0.9, seed=seed) for seed in range(8)]
    packed = run(logits, rows)
    wanted = (logits.double() / 0.9).log_softmax(1).gather(1, packed[0].long()[:, None])[:, 0]
    torch.testing.assert_close(packed[1], wanted, rtol=1e-5, atol=1e-5)
