"""The table beside other servers: what counts as a server's best, and the floor it is held to."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.peers import report
from benchmarks.peers.checkpoints import num_parameters

RATES = {"1": 1e9, "8": 1e10, "32": 5e10, "512": 1e11}
SLOW = {rows: rate / 10 for rows, rate in RATES.items()}


def results(bfloat16: dict[str, float]) -> dict[str, Any]:
    flops = {"float32": {"plain": RATES, "packed": {}}, "bfloat16": {"plain": bfloat16, "packed": {}}}
    return {"machine": {"read_bytes_per_s": 2e10, "flop_per_s": flops}, "runs": []}


@pytest.mark.parametrize("rates", [SLOW, RATES], ids=["no instructions", "instructions"])
def test_bfloat16_may_be_multiplied_as_float32(rates: dict[str, float]) -> None:
    total, head = num_parameters("135M")
    prefill = 8 * 2 * ((total - head) * 128 + head) / 1e11
    step = max(2 * total / 2e10, 2 * total * 8 / 1e10)
    expected = 8 * 64 / (prefill + 63 * step)
    assert report.roofline(results(rates), "135M", "128->64 c=8", "bfloat16") == pytest.approx(expected)


def test_the_floor_of_one_row_is_the_bandwidth_not_what_a_library_makes_of_it() -> None:
    total, head = num_parameters("135M")
    prefill = 2 * ((total - head) * 128 + head) / 1e11
    expected = 64 / (prefill + 63 * 2 * total / 2e10)
    assert report.roofline(results(SLOW), "135M", "128->64 c=1", "bfloat16") == pytest.approx(expected)


def test_the_better_precision_counts() -> None:
    cell = {"errors": 0, "ttft_p50": 0.1, "ttft_p99": 0.2, "tpot_p50": 0.01}
    found = results(RATES)
    for precision, rates in (("float32", (10.0, 30.0, 20.0)), ("bfloat16", (15.0,))):
        for repeat, rate in enumerate(rates):
            found["runs"].append(
                {"peer": "tercet", "shape": "135M", "precision": precision, "repeat": repeat,
                 "cells": {"128->64 c=1": {**cell, "output_tokens_per_s": rate}}}
            )  # fmt: skip
    best = report.best(found, "tercet", "135M", "128->64 c=1")
    assert best is not None
    assert best[:2] == (20.0, "float32")


def test_cells_are_in_the_order_of_their_numbers_whatever_was_measured_first() -> None:
    cell = {"errors": 0, "ttft_p50": 0.1, "ttft_p99": 0.2, "tpot_p50": 0.01, "output_tokens_per_s": 10.0}
    found = results(RATES)
    for repeat, names in enumerate((("512->16 c=1",), ("128->64 c=32", "128->64 c=8"))):
        cells = dict.fromkeys(names, cell)
        found["runs"].append(
            {"peer": "tercet", "shape": "135M", "precision": "float32", "repeat": repeat, "cells": cells}
        )
    assert [row[1] for row in report.lines(found)[1]] == ["128->64 c=8", "128->64 c=32", "512->16 c=1"]
