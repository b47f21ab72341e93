from __future__ import annotations

import io
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from launcher.bench.live import table_of
from launcher.bench.prompts import PromptMaker
from launcher.bench.report import chart, markdown, prepare, row, write
from launcher.bench.results import Cell, RequestTimes, median_cell, percentile, summarise
from launcher.bench.run import Run, read_run

OPTIONS = {"url": "http://127.0.0.1:1", "prompt": 10, "output": 3, "label": ""}


def run_of(*cells: Cell, **facts: str) -> Run:
    return Run(options=OPTIONS, cells=list(cells), **facts)


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
    assert row(cell)[3:] == ("– / –", "– / –", "– / –", "0, 1 failed")
    write(tmp_path, run_of(cell))
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


def test_a_run_is_written_three_times_with_what_a_reader_must_know(tmp_path: Path) -> None:
    cell = summarise("8 clients", [times(0.1, [0.02])], [], 1.0, 2)
    command = "launcher bench --label '<x> & co'"
    run = run_of(cell, model="<a>&b", server="s 1", machine="m", measured_at="now", tool="t", command=command)
    prepare(tmp_path / "new")
    write(tmp_path / "new", run)
    report = json.loads((tmp_path / "new" / "bench.json").read_text())
    assert report["cells"][0]["output_tokens_per_s"] == 2.0
    written = (tmp_path / "new" / "bench.md").read_text()
    assert "| 8 clients | 2.0 | 1.00 | 100 / 100 | 20.0 / 20.0 | 20.0 / 20.0 | 1 |" in written
    drawn = " ".join(ElementTree.fromstring((tmp_path / "new" / "bench.svg").read_text()).itertext())
    for text in (written, drawn):
        for fact in ("<a>&b on s 1: prompt 10, output 3 tokens", "Machine: m. Measured now by t.", command):
            assert fact in text
    for word in ("labels: clients", "time to first token, ms", "output tokens/s", "median", "99th percentile"):
        assert word in drawn
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["bench.json", "bench.md", "bench.svg"]


def test_points_are_labelled_with_what_differs_between_loads() -> None:
    def words(*loads: str) -> list[str]:
        run = run_of(*(summarise(load, [times(0.1, [0.01])], [], 1.0, 2) for load in loads))
        return list(ElementTree.fromstring(chart("h", {"": run}, [])).itertext())

    closed, rates, mixed = (
        words("1 client", "8 clients"),
        words("0.5 requests/s", "2 requests/s"),
        words("1 client", "2 requests/s"),
    )
    assert {"1", "8", "labels: clients"} <= set(closed)
    assert {"0.5", "2", "labels: requests/s"} <= set(rates)
    assert {"1 client", "2 requests/s"} <= set(mixed) and not any("labels" in word for word in mixed)


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    cells = [summarise("1 client", [times(0.1, [0.01])], [], 1.0, 2), summarise("8 clients", [], ["e"], 1.0, 2)]
    run = run_of(*cells, model="m", server="s", machine="c", measured_at="d", tool="t", command="x")
    write(tmp_path, run)
    again = read_run(tmp_path / "bench.json")
    assert markdown(again) == markdown(run)
    assert again.as_json() == run.as_json()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"cells": [], "options": {}}', '{"cells": [{}], "options": {}}', "\xff"]
)
def test_what_is_no_report_of_a_run_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"other\.json is not a bench\.json of launcher bench$"):
        read_run(file)
    with pytest.raises(ValueError, match=r"nowhere: No such file or directory$"):
        read_run(tmp_path / "nowhere")


def test_a_label_names_the_server_in_its_place() -> None:
    labelled = Run(options=OPTIONS | {"label": "two GPUs"}, model="m", server="s")
    assert (labelled.name, run_of(server="s").name, run_of().name) == ("m on two GPUs", "s", OPTIONS["url"])


def test_a_prompt_is_cut_to_the_token() -> None:
    def words(text: str) -> list[tuple[int, int]]:
        ends = [i for i, c in enumerate(text + " ") if c == " "]
        return list(zip([0, *(e + 1 for e in ends)], ends, strict=False))

    maker = PromptMaker(12, 7, cut=words)
    assert len(maker.prompt(0).split()) == 12
    assert maker.prompt(0) == maker.prompt(0) != maker.prompt(1)


def test_without_a_tokenizer_the_measured_ratio_decides() -> None:
    assert len(PromptMaker(30, 0, cut=None, tokens_per_word=1.5).prompt(3).split()) == 20


def test_a_terminal_of_80_columns_shows_one_line_for_each_load() -> None:
    cell = summarise("128 clients", [times(12.3456, [0.8765] * 63)] * 1536, ["e"] * 12, 0.5, 64)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table_of(run_of(cell, cell, model="m")))
    lines = console.export_text().splitlines()
    assert sum("128 clients" in line and "1536, 12 failed" in line for line in lines) == 2
    assert len(lines) <= 8 and "…" not in "".join(lines)
