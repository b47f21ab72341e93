"""Which way a matrix is multiplied on a CPU: by what was measured, and for certain where nothing is."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from model_server.cpp.library import instruction_set, usable
from model_server.layers.linear import factory, panel_choice
from model_server.layers.linear.factory import LinearFactory
from model_server.layers.linear.linear import Linear
from model_server.layers.linear.onednn import OneDnnLinear, Packer, weight_packer
from model_server.layers.linear.packed import PackedLinear
from model_server.layers.linear.panel_choice import MARGIN, ROWS, SMALLEST_MEASURED, PanelChoice, processor_time
from model_server.memory import huge_pages
from model_server.quantization.forms import Plain

CPU = torch.device("cpu")
LARGE = torch.zeros(1024, 1024)


@pytest.fixture
def packer() -> Packer:
    found = weight_packer(CPU, torch.float32)
    if found is None or not usable(CPU, torch.float32):
        pytest.skip("needs the C++ operators and oneDNN's packed product")
    return found


class Times:
    """Products in panels take `ours` seconds for each number of rows, oneDNN's one second; the first of each more."""

    def __init__(self, *ours: float) -> None:
        self.ours = dict(zip(ROWS, ours * (len(ROWS) // len(ours)), strict=True))
        self.seen: list[tuple[type, int, int]] = []

    def __call__(self, product: Linear, x: Tensor) -> float:
        call = (type(product), x.shape[0], torch.get_num_threads())
        first = call not in self.seen
        self.seen.append(call)
        return 1000.0 * first + (self.ours[x.shape[0]] if isinstance(product, PackedLinear) else 1.0)


@pytest.mark.parametrize(
    ("ours", "panels"),
    [
        ((1.0,), True),
        ((MARGIN - 0.01,), True),  # a little slower: still one call for all blocks
        ((MARGIN + 0.01,), False),
        ((0.5, 0.5, 2.0, 2.0), True),
        ((0.5, 2.0, 1.5, 5.0), False),
    ],
)
def test_the_mean_over_numbers_of_rows_decides(packer: Packer, ours: tuple[float, ...], panels: bool) -> None:
    assert PanelChoice(packer, Times(*ours)).takes(LARGE) is panels


def test_products_are_measured_in_turns_on_one_thread(packer: Packer) -> None:
    before, times = torch.get_num_threads(), Times(1.0)
    PanelChoice(packer, times).takes(LARGE)
    assert torch.get_num_threads() == before
    assert [call for call in times.seen if call[1] == 8] == [(PackedLinear, 8, 1), (OneDnnLinear, 8, 1)] * 4


def test_a_run_that_was_disturbed_does_not_count(packer: Packer) -> None:
    times = Times(1.0)
    disturbed = iter([0.0, 0.0, 50.0, 0.0, 0.0, 0.0, 50.0, 0.0] * len(ROWS))
    assert PanelChoice(packer, lambda product, x: times(product, x) + next(disturbed)).takes(LARGE)


@pytest.mark.parametrize("coarse", [(PackedLinear,), (OneDnnLinear,), (PackedLinear, OneDnnLinear)])
def test_a_clock_that_is_too_coarse_leaves_panels(packer: Packer, coarse: tuple[type, ...]) -> None:
    assert PanelChoice(packer, lambda product, x: 0.0 if isinstance(product, coarse) else 1.0).takes(LARGE)


def test_what_onednn_gets_is_in_memory_once(packer: Packer) -> None:
    assert PanelChoice(packer, Times(2.0)).takes(torch.zeros(512, 512))
    smallest = torch.zeros(SMALLEST_MEASURED // 300 + 1, 300)
    assert not PanelChoice(packer, Times(2.0)).takes(smallest)
    assert OneDnnLinear(smallest, None, packer)._unpacked is None


def test_each_shape_is_measured_once_and_small_ones_never(packer: Packer) -> None:
    times = Times(2.0)
    choice = PanelChoice(packer, times)
    assert choice.takes(torch.zeros(SMALLEST_MEASURED // 512 - 1, 512))
    assert times.seen == []
    assert not choice.takes(LARGE)
    once = len(times.seen)
    assert not choice.takes(LARGE)
    assert not choice.takes(torch.zeros(4096, 1024))  # of a larger one the same part is measured
    assert len(times.seen) == once
    assert not choice.takes(torch.zeros(1024, 2048))
    assert len(times.seen) == 2 * once


def test_without_a_packer_all_go_into_panels() -> None:
    def never(product: Linear, x: Tensor) -> float:
        raise AssertionError

    assert PanelChoice(None, never).takes(LARGE)


@pytest.mark.parametrize(
    ("ours", "told"),
    [
        ((0.5,), "C++ operators ({}), 2.0 times as fast as oneDNN (shapes: 2)"),
        ((2.0,), "oneDNN for 2 of 2 shapes, 2.0 times as fast as C++ operators ({})"),
    ],
)
def test_one_line_tells_what_was_chosen(
    packer: Packer, ours: tuple[float, ...], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    choice = PanelChoice(packer, Times(*ours))
    with caplog.at_level(logging.INFO, logger=panel_choice.__name__):
        choice.log()
        assert caplog.messages == []  # nothing was measured
        choice.takes(LARGE)
        choice.takes(torch.zeros(512, 2048))
        choice.log()
    assert caplog.messages == ["Matrix products: " + told.format(instruction_set())]


def test_the_clock_counts_the_product_alone(packer: Packer) -> None:
    assert 0 < processor_time(PackedLinear(torch.zeros(64, 64), None), torch.zeros(8, 64)) < 60


def test_measured_matrices_take_none_of_the_memory_that_stays(packer: Packer) -> None:
    before = huge_pages.WEIGHTS._chunk, huge_pages.WEIGHTS._next
    PanelChoice(packer, Times(2.0)).takes(LARGE)
    assert (huge_pages.WEIGHTS._chunk, huge_pages.WEIGHTS._next) == before


@pytest.mark.parametrize(
    ("switch", "num_ranks", "kind"),
    [
        (None, 1, OneDnnLinear),
        ("1", 1, PackedLinear),  # as asked
        (None, 2, PackedLinear),  # ranks must choose alike
    ],
)
def test_who_measures(
    packer: Packer, switch: str | None, num_ranks: int, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TERCET_NATIVE", raising=False)
    if switch is not None:
        monkeypatch.setenv("TERCET_NATIVE", switch)
    monkeypatch.setattr(factory, "PanelChoice", lambda packer: PanelChoice(packer, Times(2.0)))
    linears = LinearFactory(CPU, torch.float32, num_ranks=num_ranks)
    assert type(linears.make(Plain(LARGE))) is kind
    assert type(linears.make(Plain(torch.zeros(16, 16)))) is PackedLinear
