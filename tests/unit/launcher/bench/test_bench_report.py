from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from launcher.bench.chart import Chart, svg
from launcher.bench.prompts import PromptMaker
from launcher.bench.report import prepare, row, write
from launcher.bench.results import RequestTimes, median_cell, percentile, summarise


def times(first: float, gaps: list[float]) -> RequestTimes:
    return RequestTimes(first, first + sum(gaps), gaps, len(gaps) + 1, 10)


def test_a_cell_sums_up_its_requests() -> None:
    cell = summarise("x", [times(0.1, [0.01, 0.03]), times(0.3, [0.02, 0.02])], ["broke"], 2.0, 3)
    assert cell.output_tokens_per_s == pytest.approx(3.0)
    assert cell.requests_per_s == pytest.approx(1.0)
    assert (cell.ttft_p50, cell.ttft_p99) == (pytest.approx(0.1), pytest.approx(0.3))
    assert cell.itl_p50 == pytest.approx(0.02)
    assert cell.tpot_p50 == pytest.approx(0.02)
    assert (cell.errors, cell.first_error, cell.prompt_tokens) == (1, "broke", 10)


def test_what_was_never_answered_has_no_latency_rather_than_the_best(tmp_path: Path) -> None:
    cell = summarise("x", [], ["broke"], 1.0, 3)
    assert (cell.output_tokens_per_s, cell.prompt_tokens) == (0.0, None)
    assert row(cell)[3:6] == ("– / –", "– / –", "–")
    write(tmp_path, "t", {}, [cell])
    assert json.loads((tmp_path / "bench.json").read_text())["cells"][0]["ttft_p50"] is None
    assert "nan" not in (tmp_path / "bench.svg").read_text()


def test_percentiles_are_values_that_were_seen() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    hundred = [float(n) for n in range(1, 101)]
    assert [percentile(hundred, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert (percentile(hundred[:64], 0.99), percentile(hundred[:16], 0.5)) == (64.0, 8.0)


def test_repeats_are_summed_up_figure_by_figure() -> None:
    numbers = ((9, 0.3), (1, 0.1), (5, 0.5), (0, 0.0))
    cells = [summarise("x", [times(first, [0.1] * n)] * (n > 0), ["e"] * (n == 1), 1.0, 1) for n, first in numbers]
    together = median_cell(cells)
    assert together.output_tokens_per_s == 4.0
    assert together.ttft_p50 == pytest.approx(0.3)  # of the three that have one
    assert (together.repeats, together.num_requests) == ([10.0, 2.0, 6.0, 0.0], 3)
    assert (together.errors, together.first_error) == (1, "e")
    assert median_cell(cells[:2]).output_tokens_per_s == 6.0


def test_the_report_is_written_three_times(tmp_path: Path) -> None:
    cell = summarise("8 clients", [times(0.1, [0.01])], [], 1.0, 3)
    prepare(tmp_path / "new")
    write(tmp_path / "new", "A <server> & co", {"options": {"prompt": 1}}, [cell])
    report = json.loads((tmp_path / "new" / "bench.json").read_text())
    assert report["cells"][0]["output_tokens_per_s"] == 2.0
    assert "| 8 clients | 2.0 | 1.00 |" in (tmp_path / "new" / "bench.md").read_text()
    ElementTree.fromstring((tmp_path / "new" / "bench.svg").read_text())


def test_bars_are_as_long_as_their_numbers() -> None:
    drawn = ElementTree.fromstring(svg([Chart("t", ["a", "b"], {"x": [2.0, 1.0], "y": [None, 0.0]})]))
    bars = list(drawn.iter("{http://www.w3.org/2000/svg}rect"))[1:]  # the first is the ground
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert widths == [420.0, 210.0, 0.0]


def test_a_prompt_is_cut_to_the_token() -> None:
    def words(text: str) -> list[tuple[int, int]]:
        ends = [i for i, c in enumerate(text + " ") if c == " "]
        return list(zip([0, *(e + 1 for e in ends)], ends, strict=False))

    maker = PromptMaker(12, 7, cut=words)
    assert len(maker.prompt(0).split()) == 12
    assert maker.prompt(0) == maker.prompt(0) != maker.prompt(1)


def test_without_a_tokenizer_the_measured_ratio_decides() -> None:
    assert len(PromptMaker(30, 0, cut=None, tokens_per_word=1.5).prompt(3).split()) == 20
