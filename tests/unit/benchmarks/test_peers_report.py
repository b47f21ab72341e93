"""The table beside other servers: what counts as a server's best, and the floor it is held to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import report
from benchmarks.peers.checkpoints import num_parameters

RATES = {"1": 1e9, "8": 1e10, "32": 5e10, "512": 1e11}
SLOW = {rows: rate / 10 for rows, rate in RATES.items()}
CELL = {"errors": 0, "ttft_p50": 0.1, "output_tokens_per_s": 10.0, "num_requests": 6}
NAME = "128->64 c=1"


def machine(bfloat16: dict[str, float] = SLOW, read: float = 2e10) -> dict[str, Any]:
    flops = {"float32": {"plain": RATES, "packed": {}}, "bfloat16": {"plain": bfloat16, "packed": {}}}
    about = {"processor": "a processor", "cores": 2, "torch": "2"}
    return about | {"read_bytes_per_s": read, "copy_bytes_per_s": 1e10, "flop_per_s": flops}


def run(
    precision: str = "bfloat16", repeat: int = 0, name: str = NAME, peer: str = "tercet", **cell: object
) -> dict[str, Any]:
    return {"peer": peer, "version": "1", "shape": "135M", "precision": precision, "repeat": repeat,
            "machine": machine(), "cells": {name: CELL | cell}}  # fmt: skip


def best(*runs: dict[str, Any]) -> report.Entry:
    found = report.best({"runs": list(runs)}, "tercet", "135M", NAME)
    assert found is not None
    return found


@pytest.mark.parametrize("rates", [SLOW, RATES], ids=["no instructions", "instructions"])
def test_bfloat16_may_be_multiplied_as_float32(rates: dict[str, float]) -> None:
    total, head = num_parameters("135M")
    prefill = 8 * 2 * ((total - head) * 128 + head) / 1e11
    step = max(2 * total / 2e10, 2 * total * 8 / 1e11)
    expected = 8 * 64 / (prefill + 63 * step)
    assert report.roofline(machine(rates), "135M", "128->64 c=8", "bfloat16") == pytest.approx(expected)


def test_the_floor_of_few_rows_is_the_bandwidth_not_what_a_library_makes_of_it() -> None:
    total, head = num_parameters("135M")
    for rows in (1, 4):
        prefill = rows * 2 * ((total - head) * 128 + head) / 1e11
        expected = rows * 64 / (prefill + 63 * 2 * total / 2e10)
        assert report.roofline(machine(), "135M", f"128->64 c={rows}", "bfloat16") == pytest.approx(expected)


def test_many_rows_are_held_to_the_rate_of_products() -> None:
    total, head = num_parameters("135M")
    expected = 32 * 64 / (32 * 2 * ((total - head) * 128 + head) / 1e11 + 63 * 2 * total * 32 / 1e11)
    assert report.roofline(machine(), "135M", "128->64 c=32", "bfloat16") == pytest.approx(expected)


def test_the_better_precision_counts() -> None:
    found = best(
        *(run("float32", i, output_tokens_per_s=rate) for i, rate in enumerate((10.0, 30.0, 20.0))),
        run("bfloat16", output_tokens_per_s=15.0),
    )
    assert (found.rate, found.precision, found.repeats) == (20.0, "float32", 3)


def test_the_best_look_at_the_machine_is_its_limit() -> None:
    slow, fast = run(repeat=0), run(repeat=1)
    slow["machine"], fast["machine"] = machine(RATES, read=1e10), machine(SLOW, read=4e10)
    expected = 10.0 / report.roofline(machine(RATES, read=4e10), "135M", NAME, "bfloat16")
    assert best(slow, fast).of_roofline == pytest.approx(expected)
    assert slow["machine"]["read_bytes_per_s"] == 1e10  # what was measured stays
    old = run()
    del old["machine"]
    found = report.best({"runs": [old], "machine": machine()}, "tercet", "135M", NAME)
    assert found is not None and found.of_roofline == pytest.approx(best(run()).of_roofline)


def test_what_went_wrong_or_was_disturbed_does_not_count_and_is_named(tmp_path: Path) -> None:
    runs = [
        run(repeat=0),
        run(repeat=1, output_tokens_per_s=99.0, errors=2),
        run(repeat=2, output_tokens_per_s=99.0, other_cores=0.4),
        run(repeat=3, short_requests=1),
    ]
    assert (best(*runs).rate, best(*runs).repeats) == (10.0, 2)
    report.write({"runs": runs}, tmp_path / "peers.json")
    text = (tmp_path / "peers.md").read_text()
    assert f"Left out: tercet, 135M, bfloat16, repeat 2, {NAME}: 2 errors." in text
    assert f"Left out: tercet, 135M, bfloat16, repeat 3, {NAME}: other processes used 0.40 cores." in text
    assert f"Answers that ended early: tercet, 135M, bfloat16, repeat 4, {NAME}: 1 of 6." in text
    assert f"| 135M | {NAME} | 10.0 bfloat16 (2) |" in text


def test_cells_are_in_the_order_of_their_numbers_whatever_was_measured_first() -> None:
    runs = [run(name=name) for name in ("512->16 c=1", "128->64 c=32", "128->64 c=8")]
    assert [row[1] for row in report.lines({"runs": runs})[1]] == ["128->64 c=8", "128->64 c=32", "512->16 c=1"]


def test_quantized_weights_have_rows_of_their_own_and_a_ratio_to_each_peer(tmp_path: Path) -> None:
    runs = [
        run("int4", output_tokens_per_s=30.0),
        run("int8", output_tokens_per_s=20.0),
        run("bfloat16", output_tokens_per_s=12.0),
        run("int8", peer="llama.cpp", output_tokens_per_s=16.0),
        run("int4", peer="openvino", output_tokens_per_s=15.0),
        run("int4-float32", peer="openvino", output_tokens_per_s=20.0),
    ]
    head, rows = report.lines({"runs": runs})
    assert head[:7] == ["shape", "cell", "tercet", "llama.cpp", "openvino", "tercet / llama.cpp", "tercet / openvino"]
    assert [row[:7] for row in rows] == [
        ["135M", NAME, "12.0 bfloat16 (1)", "–", "–", "–", "–"],
        ["135M, int8", NAME, "20.0 int8 (1)", "16.0 int8 (1)", "–", "1.25", "–"],
        ["135M, int4", NAME, "30.0 int4 (1)", "–", "20.0 int4-float32 (1)", "–", "1.50"],
    ]
    report.write({"runs": runs}, tmp_path / "quantized.json")
    assert "Q4_K_M" in (tmp_path / "quantized.md").read_text()
    report.write({"runs": runs[2:3]}, tmp_path / "peers.json")
    assert "Q4_K_M" not in (tmp_path / "peers.md").read_text()
    report.write({"runs": [run("q8_0"), run("q8_0", peer="llama.cpp")]}, tmp_path / "gguf.json")
    written = (tmp_path / "gguf.md").read_text()
    assert "the same GGUF file" in written and "eetq" not in written


def test_the_floor_of_quantized_weights_reads_the_head_as_it_is() -> None:
    total, head = num_parameters("135M")
    prefill = 2 * ((total - head) * 128 + head) / 1e11
    for precision, num_bytes in (("int8", 1.0), ("int4", (4 + 20 / 128) / 8)):
        expected = 64 / (prefill + 63 * ((total - head) * num_bytes + 2 * head) / 2e10)
        assert report.roofline(machine(), "135M", NAME, precision) == pytest.approx(expected)
    in_gguf = 64 / (prefill + 63 * total * (8.5 / 8) / 2e10)
    assert report.roofline(machine(), "135M", NAME, "q8_0") == pytest.approx(in_gguf)
