"""From how many rows on tiles are used: where they are faster, and for all more."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from model_server.cpp.library import usable
from model_server.layers.linear import panel_choice, tile_rows
from model_server.layers.linear.linear import Linear
from model_server.layers.linear.packed import PackedLinear
from model_server.layers.linear.panel_choice import PanelChoice

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(not usable(CPU, torch.bfloat16), reason="needs the C++ operators")


class Amx:
    """Stands for a library with tiles: a product of `rows` takes `tiles[rows]` seconds by tiles, otherwise one."""

    def __init__(self, **tiles: float) -> None:
        self.tiles = {int(name[1:]): seconds for name, seconds in tiles.items()}
        self.tile_rows = 4
        self.runs = 0

    def cpp_set_tile_rows(self, rows: int) -> None:
        self.tile_rows = rows

    def __call__(self, product: Linear, x: Tensor) -> float:
        self.runs += 1
        return self.tiles.get(len(x), 1.0) if len(x) >= self.tile_rows else 1.0


@pytest.fixture
def amx(monkeypatch: pytest.MonkeyPatch) -> Amx:
    made = Amx(r1=1.5, r2=0.5, r4=0.25)
    monkeypatch.setattr(tile_rows, "prepared", lambda: made)
    for module in (tile_rows, panel_choice):
        monkeypatch.setattr(module, "instruction_set", lambda: "amx")
    return made


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({4: 0.5, 2: 0.5, 1: 0.5}, 1),
        ({4: 0.5, 2: 0.5, 1: 1.0}, 2),
        ({4: 0.5, 2: 1.5, 1: 0.5}, 4),  # one row alone would gain, but not two
        ({4: 1.5, 2: 0.5, 1: 0.5}, 8),
    ],
)
def test_the_smallest_number_from_which_tiles_are_faster(times: dict[int, float], chosen: int, amx: Amx) -> None:
    amx.tiles = times
    panels = PackedLinear(torch.zeros(64, 64, dtype=torch.bfloat16), None)
    assert tile_rows.choose(panels, amx) == chosen
    assert amx.tile_rows == chosen


def test_matrices_that_tiles_cannot_take(amx: Amx) -> None:
    assert tile_rows.are_used(PackedLinear(torch.zeros(64, 64, dtype=torch.bfloat16), None))
    assert not tile_rows.are_used(PackedLinear(torch.zeros(64, 48, dtype=torch.bfloat16), None))
    assert not tile_rows.are_used(PackedLinear(torch.zeros(64, 64), None))


def test_other_instruction_sets_have_no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_rows, "instruction_set", lambda: "avx512_bf16")
    assert not tile_rows.are_used(PackedLinear(torch.zeros(64, 64, dtype=torch.bfloat16), None))


def test_the_first_matrix_decides_for_the_model_and_the_log_says_it(amx: Amx, caplog: pytest.LogCaptureFixture) -> None:
    choice = PanelChoice(lambda weight: weight, amx)
    assert choice.takes(torch.zeros(1024, 1024, dtype=torch.bfloat16))
    first = amx.runs
    assert choice.takes(torch.zeros(1024, 2048, dtype=torch.bfloat16))
    assert amx.tile_rows == 2
    assert amx.runs - first < first
    with caplog.at_level(logging.INFO, logger=panel_choice.__name__):
        choice.log()
    assert "C++ operators (amx, tiles from 2 rows), " in caplog.messages[0]
