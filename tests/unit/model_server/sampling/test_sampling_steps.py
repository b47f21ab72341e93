"""Every step against the scalar reference: what is left of a row and with which log probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import sampling_reference as reference
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.effort import examples

from model_server.sampling import filters, sampler
from model_server.sampling.categorical import weight_bits
from model_server.sampling.filters import Filters, filter_selected, filter_whole
from model_server.sampling.parameters import SamplingParameters
from model_server.sampling.sampler import Sampler

CPU = torch.device("cpu")


def distribution(logits: torch.Tensor, parameters: SamplingParameters, prompt: list[int]) -> dict[int, float]:
    """All that is left, asked for as top tokens."""
    width = logits.shape[1]
    subject = Sampler(width, CPU)
    row = subject.new_row(parameters, prompt, 10, width)
    return dict(subject.sample(logits.clone(), [row]).to_host().top[0])


def check(got: dict[int, float], wanted: reference.Warped) -> None:
    assert wanted.margin > 1e-5, "too close to call"
    # Below 1e-12 of the most likely token both sides may call it zero.
    floor = max(wanted.logprobs.values()) - 25
    assert {i for i, v in got.items() if v > floor} == {i for i, v in wanted.logprobs.items() if v > floor}
    for i, logprob in got.items():
        assert logprob == pytest.approx(wanted.logprobs.get(i, logprob), abs=2e-5)


def rows_of_logits(width: int) -> st.SearchStrategy[list[float]]:
    coarse = st.integers(-24, 24).map(lambda n: n / 4)  # many ties, as from bfloat16
    fine = st.integers(-12000, 12000).map(lambda n: n / 1000)
    return st.one_of(st.lists(kind, min_size=width, max_size=width) for kind in (coarse, fine))


GENERATED = [3, 3, 5, 1]
FILTERS = [
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 4},
    {"top_k": 1000},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"typical_p": 0.2},
    {"typical_p": 0.95},
    {"temperature": 0.7, "top_k": 8, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.9},
    {"top_p": 0.9, "typical_p": 0.5},
]


@pytest.mark.parametrize("values", FILTERS, ids=str)
@given(data=st.data())
@settings(max_examples=examples(10, 100), deadline=None)
def test_filters(values: dict[str, float], data: st.DataObject) -> None:
    x = data.draw(rows_of_logits(17))
    parameters = SamplingParameters(**values)
    wanted = reference.warp(x, parameters)
    assume(wanted.margin > 1e-5)
    check(distribution(torch.tensor([x]), parameters, [0]), wanted)


@pytest.mark.parametrize("values", FILTERS, ids=str)
def test_filters_leave_masked_tokens_masked(values: dict[str, float]) -> None:
    x = torch.tensor([[-math.inf, 2.0, -math.inf, 1.0, 0.5, -math.inf, 1.0]])
    parameters = SamplingParameters(**values)
    got = distribution(x, parameters, [1])
    assert set(got) <= {1, 3, 4, 6}
    check(got, reference.warp(x[0].tolist(), parameters))


PENALTIES = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"frequency_penalty": 1.7},
    {"frequency_penalty": -2.0},
    {"presence_penalty": 0.9},
    {"absolute_frequency_penalty": 0.6},
    {"logit_bias": ((2, 5.0), (9, -100.0), (2, 0.5))},
    {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.8,
        "presence_penalty": 0.3,
        "absolute_frequency_penalty": -0.4,
        "logit_bias": ((3, -1.0),),
        "temperature": 0.6,
        "top_k": 9,
        "top_p": 0.93,
    },
]


@pytest.mark.parametrize("values", PENALTIES, ids=str)
def test_penalties_and_biases_follow_the_history(values: dict[str, float]) -> None:
    """Over several steps, whose choices are forced by a bias so that the history is known."""
    rng = np.random.default_rng(1)
    width, prompt = 14, [7, 1, 7, 2]
    parameters = SamplingParameters(**values)
    subject = Sampler(width, CPU)
    row = subject.new_row(parameters, prompt, 10, width)
    generated: list[int] = []
    for _ in range(8):
        x = rng.normal(0, 3, width).astype(np.float32)
        result = subject.sample(torch.from_numpy(x[None].copy()), [row]).to_host()
        adjusted = reference.adjust(x.tolist(), prompt, generated, parameters)
        check(dict(result.top[0]), reference.warp(adjusted, parameters))
        generated.append(result.ids[0])


def test_a_resumed_row_counts_its_generated_tokens() -> None:
    parameters = SamplingParameters(presence_penalty=1.5, absolute_frequency_penalty=0.5)
    x = torch.linspace(-2, 2, 11)[None]
    subject = Sampler(11, CPU)
    row = subject.new_row(parameters, [4, 6, 9, 9], 10, 11, num_generated=2)
    got = dict(subject.sample(x.clone(), [row]).to_host().top[0])
    check(got, reference.warp(reference.adjust(x[0].tolist(), [4, 6], [9, 9], parameters), parameters))


def test_id_zero_of_padding_is_not_penalised() -> None:
    """TGI pads histories with id 0 and then penalises it."""
    parameters = SamplingParameters(repetition_penalty=2.0, frequency_penalty=1.0)
    subject = Sampler(9, CPU)
    x = torch.linspace(3, 1, 9).repeat(2, 1)
    rows = [subject.new_row(parameters, prompt, 10, 9) for prompt in ([5], [1, 2, 3, 4, 5, 6, 7])]
    top = subject.sample(x.clone(), rows).to_host().top
    for got, prompt in zip(top, ([5], [1, 2, 3, 4, 5, 6, 7]), strict=True):
        check(dict(got), reference.warp(reference.adjust(x[0].tolist(), prompt, [], parameters), parameters))


def test_a_step_of_one_row_leaves_the_others_bit_for_bit() -> None:
    parameters = [
        SamplingParameters(),
        SamplingParameters(repetition_penalty=1.5, frequency_penalty=0.5, logit_bias=((3, 2.0),), watermark=True),
        SamplingParameters(presence_penalty=1.0),
    ]
    subject = Sampler(50, CPU)
    rows = [subject.new_row(p, [1, 2, 3], 10) for p in parameters]
    x = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    given_logits = x.clone()
    subject.sample(given_logits, rows)
    assert torch.equal(given_logits[0], x[0])
    assert torch.equal(given_logits[2], x[2])  # nothing generated yet
    untouched = [i for i in range(50) if i not in (1, 2, 3)]
    assert not torch.equal(given_logits[1, untouched], x[1, untouched])  # the watermark


def test_neutral_values_of_a_shared_step_change_nothing() -> None:
    """A row with only a repetition penalty shares its tensors with rows that have the others."""
    alone = SamplingParameters(repetition_penalty=1.3)
    other = SamplingParameters(frequency_penalty=2.0, presence_penalty=1.0, absolute_frequency_penalty=1.0)
    x = torch.randn(2, 30, generator=torch.Generator().manual_seed(3))
    for _ in range(2):
        single, shared = Sampler(30, CPU), Sampler(30, CPU)
        a, b = x[:1].clone(), x.clone()
        single.sample(a, [single.new_row(alone, [1, 2, 2], 10)])
        shared.sample(b, [shared.new_row(alone, [1, 2, 2], 10), shared.new_row(other, [3] * 9, 10)])
        assert torch.equal(a[0], b[0])


def test_the_order_of_steps() -> None:
    """Penalties, then temperature, then top-k, then top-p: any other order gives another set here."""
    x = [2.0, 1.9, 1.8, 0.0, -1.0]
    parameters = SamplingParameters(logit_bias=((0, -1.5), (3, 1.7)), temperature=0.5, top_k=3, top_p=0.7)
    wanted = reference.warp(reference.adjust(x, [1], [], parameters), parameters)
    check(distribution(torch.tensor([x]), parameters, [1]), wanted)
    assert set(wanted.logprobs) == {1, 2}


def test_watermark_is_torchs_permutation_seeded_by_the_last_token() -> None:
    subject = Sampler(40, CPU, watermark_gamma=0.25, watermark_delta=3.0)
    row = subject.new_row(SamplingParameters(watermark=True), [6, 11], 10, 40)
    last = 11
    for _ in range(3):
        x = torch.randn(1, 40, generator=torch.Generator().manual_seed(last))
        result = subject.sample(x.clone(), [row]).to_host()
        green = torch.randperm(40, generator=torch.Generator().manual_seed(15485863 * last))[:10]
        x[0, green] += 3.0
        assert dict(result.top[0]) == pytest.approx(dict(enumerate(x.log_softmax(1)[0].tolist())), abs=1e-5)
        last = result.ids[0]


TOP_K_KINDS = [
    {"top_k": 5},
    {"top_k": 40, "top_p": 0.1},
    {"top_k": 40, "top_p": 0.3, "min_p": 0.99},
    {"top_k": 40, "top_p": 0.9},
    {"top_k": 7, "min_p": 0.1, "typical_p": 0.7},
]
TOP_P_KINDS = [{"top_p": 0.6}, {"min_p": 0.2}, {"top_p": 0.9, "min_p": 0.01, "temperature": 0.5}]


@pytest.mark.parametrize("kinds", [TOP_K_KINDS, TOP_P_KINDS], ids=["top_k", "top_p"])
@pytest.mark.parametrize("width", [33, 700, 40001])
@pytest.mark.parametrize("spread", [0.25, 2.0, 8.0])
@pytest.mark.parametrize("step", [0.0, 0.125])
def test_selected_candidates_give_what_whole_rows_give(
    kinds: list[dict[str, float]], width: int, spread: float, step: float
) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(len(kinds), width, generator=generator) * spread
    if step:
        x = (x / step).round() * step  # ties
    asked = Filters.of([SamplingParameters(**values) for values in kinds], width, CPU)
    bits = weight_bits(width)
    whole = filter_whole(x, asked, bits)
    selected, enough = filter_selected(x, asked, bits)
    assert selected.columns is not None
    for row in range(len(kinds)):
        if enough[row]:
            dense = torch.full((width,), -math.inf).scatter_(0, selected.columns[row], selected.values[row])
            assert torch.equal(dense, whole.values[row])
    if spread == 8.0 and not step:
        assert enough.all()


def test_top_k_by_partial_selection_equals_top_k_by_sorting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties beyond the k-th value take part in top-p though they are not among the k selected."""
    x = (torch.randn(6, 90, generator=torch.Generator().manual_seed(0)) * 4).round() / 2
    asked = Filters.of([SamplingParameters(top_k=k, top_p=p) for k in (3, 9, 20) for p in (0.5, 0.97)], 90, CPU)
    bits = weight_bits(90)
    partial = filter_whole(x, asked, bits).values
    monkeypatch.setattr(filters, "LARGEST_SELECTION", 0)
    assert torch.equal(filter_whole(x, asked, bits).values, partial)


def test_rows_whose_candidates_run_out_are_computed_whole() -> None:
    """Flat rows among peaked ones, with and without top tokens; equal to each row alone on the whole path."""
    width = 5000
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(5)) * torch.tensor([[8.0], [0.1], [8.0], [0.0]])
    parameters = SamplingParameters(top_p=0.9, seed=11)
    subject = Sampler(width, CPU)
    rows = [subject.new_row(parameters, [1], 5, n) for n in (2, 3, 0, 0)]
    together = subject.sample(x.clone(), rows).to_host()
    for number in range(4):
        alone = Sampler(width, CPU)
        alone._may_look = False
        result = alone.sample(x[number : number + 1].clone(), [alone.new_row(parameters, [1], 5, (2, 3, 0, 0)[number])])
        host = result.to_host()
        assert (host.ids[0], host.logprobs[0], host.top[0]) == (
            together.ids[number],
            together.logprobs[number],
            together.top[number],
        )


def test_extreme_temperatures_do_not_overflow() -> None:
    x = torch.tensor([[100.0, 99.0, -50.0]])
    assert distribution(x, SamplingParameters(temperature=1e-38), [0])[0] == 0.0
    assert distribution(x, SamplingParameters(temperature=1e30), [0]) == pytest.approx(
        dict.fromkeys(range(3), -math.log(3))
    )


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    for width in (100, 128, 6400):
        subject = Sampler(width, CPU)
        x = torch.zeros(3, width)
        x[1, [width - 1, 70, 71]] = 2.0
        x[2, width - 1] = 1.0
        rows = [subject.new_row(SamplingParameters(), [1], 5) for _ in range(3)]
        result = subject.sample(x.clone(), rows).to_host()
        assert result.ids == [0, 70, width - 1]
        assert result.logprobs == pytest.approx(x.log_softmax(1).amax(1).tolist(), abs=1e-5)


def test_top_tokens_of_the_specification() -> None:
    logprobs = torch.tensor([[-1.0, -3.0, -4.0, -2.0, -3.0]])
    for number, ids in ((2, [0, 3]), (3, [0, 3, 1, 4]), (4, [0, 3, 1, 4]), (5, [0, 3, 1, 4, 2]), (9, [0, 3, 1, 4, 2])):
        subject = Sampler(5, CPU)
        row = subject.new_row(SamplingParameters(), [0], 5, number)
        assert [i for i, _ in subject.sample(logprobs.clone(), [row]).to_host().top[0]] == ids


@pytest.mark.parametrize("parameters", [{}, {"seed": 1, "do_sample": True}, {"top_p": 0.99, "do_sample": True}])
def test_ties_of_top_tokens_have_a_bound(parameters: dict[str, float]) -> None:
    """The first ids of equal tokens, as many alone as beside a row that asks for more."""
    width = 5000
    x = torch.zeros(2, width)
    x[:, [7, 4000]] = 1.0
    for numbers in ((3, 3), (3, 20), (1, 5)):
        subject = Sampler(width, CPU)
        rows = [subject.new_row(SamplingParameters(**parameters), [1], 5, number) for number in numbers]
        top = subject.sample(x.clone(), rows).to_host().top
        for found, number in zip(top, numbers, strict=True):
            ids = [token for token, _ in found]
            assert ids[:2] == [7, 4000]
            tied = [] if number == 1 else ids[2:]
            assert len(tied) == (0 if number == 1 else number + 16 - 2)
            assert tied == sorted(tied)
            if not parameters.get("top_p"):
                assert tied[:5] == ([] if number == 1 else [0, 1, 2, 3, 4])


@pytest.mark.parametrize("samples", [False, True])
def test_tokens_of_probability_0_are_no_alternatives(samples: bool) -> None:
    """A repetition penalty near 0 leaves one token, and the rest of the vocabulary tied behind it."""
    width = 32000
    x = torch.randn(2, width, generator=torch.Generator().manual_seed(0))
    x[0, 1] = 9.0
    subject = Sampler(width, CPU)
    rows = [
        subject.new_row(SamplingParameters(repetition_penalty=1e-12, do_sample=samples, seed=3), [1], 5, 5),
        subject.new_row(SamplingParameters(do_sample=samples, seed=3), [1], 5, 5),
    ]
    result = subject.sample(x, rows).to_host()
    assert [token for token, _ in result.top[0]] == [1] == result.ids[:1]
    assert len(result.top[1]) == 5


def test_top_tokens_never_show_what_was_filtered() -> None:
    subject = Sampler(50, CPU)
    rows = [
        subject.new_row(SamplingParameters(top_k=3), [0], 5, 5),
        subject.new_row(SamplingParameters(), [0], 5, 0),
        subject.new_row(SamplingParameters(top_k=4, top_p=0.5), [0], 5, 2),
        subject.new_row(SamplingParameters(), [0], 5, 1),
    ]
    x = torch.arange(50.0).repeat(4, 1) / 10
    top = subject.sample(x, rows).to_host().top
    assert [[i for i, _ in row] for row in top] == [[49, 48, 47], [], [49, 48], [49]]


def test_chunks_of_rows_equal_all_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    width = 3000
    x = torch.randn(7, width, generator=torch.Generator().manual_seed(9)) * 2
    kinds = [{}, {"temperature": 0.7}, {"top_p": 0.8}, {"temperature": 1.1}, {}, {"top_p": 0.7}, {"typical_p": 0.6}]
    results = []
    for elements in (1 << 18, 1):
        monkeypatch.setattr(sampler, "_CACHED_ELEMENTS", elements)
        subject = Sampler(width, CPU)
        rows = [subject.new_row(SamplingParameters(seed=n, **k), [1], 5, 2) for n, k in enumerate(kinds)]
        results.append(subject.sample(x.clone(), rows).to_host())
    assert results[0] == results[1]


@pytest.mark.parametrize("look", [True, False])
def test_top_p_drops_at_the_exact_edge_and_lower_ids_first(look: bool) -> None:
    """Equal tokens: c <= 1 - p goes, and among ties the last ids stay."""
    for top_p, kept in ((0.5, {2, 3}), (0.75, {1, 2, 3}), (0.25, {3}), (0.51, {1, 2, 3}), (1e-9, {3})):
        subject = Sampler(6, CPU)
        subject._may_look = look
        row = subject.new_row(SamplingParameters(top_p=top_p), [0], 5, 6)
        x = torch.tensor([[1.0, 1.0, 1.0, 1.0, -math.inf, -math.inf]])
        assert {i for i, _ in subject.sample(x, [row]).to_host().top[0]} == kept
