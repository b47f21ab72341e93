"""Two runs side by side."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from launcher.bench import report
from launcher.bench.command import run_bench
from launcher.bench.compare import Comparison
from launcher.bench.config import BenchConfig
from launcher.bench.results import Cell
from launcher.bench.run import Run
from wire.cli.parsing import parse

CELL = Cell(
    load="1 client", output_tokens_per_s=100.0, requests_per_s=1.0, ttft_p50=0.02, ttft_p99=0.04, itl_p50=0.001,
    itl_p99=0.002, tpot_p50=0.001, tpot_p99=0.002, num_requests=16, short_requests=0, prompt_tokens=64.0, errors=0,
    repeats=[100.0],
)  # fmt: skip


def cell(load: str = "1 client", **figures: object) -> Cell:
    return dataclasses.replace(CELL, load=load, **figures)  # type: ignore[arg-type]


def run(*cells: Cell, machine: str = "EPYC", model: str = "m", server: str = "s", **options: object) -> Run:
    given = {"url": "http://h", "prompt": 64, "output": 32, "label": "", "api": "auto", **options}
    return Run(options=given, cells=list(cells or [CELL]), machine=machine, model=model, server=server, command="c")


def test_each_load_has_both_figures_and_their_ratio() -> None:
    faster = cell(output_tokens_per_s=150.0, ttft_p50=0.01, ttft_p99=0.05, tpot_p50=math.nan)
    assert Comparison(run(), run(faster)).rows() == [
        ("1 client", "100 → 150 (1.50)", "20.0 → 10.0 (0.50)", "40.0 → 50.0 (1.25)", "1.00 → – (–)",
         "2.00 → 2.00 (1.00)"),
    ]  # fmt: skip
    [stopped] = Comparison(run(cell(output_tokens_per_s=0.0)), run()).rows()
    assert stopped[1] == "0.00 → 100 (–)"


def test_what_two_runs_of_the_same_have_in_common_is_not_listed() -> None:
    assert Comparison(run(server="old"), run(server="new")).differences() == []


@pytest.mark.parametrize(
    ("b", "line"),
    [
        (run(machine="Xeon"), "Not the same machine: EPYC (A), Xeon (B)."),
        (run(machine=""), "Not the same machine: EPYC (A), unknown (B)."),
        (run(model="n"), "Not the same model: m (A), n (B)."),
        (run(prompt=128), "Not the same --prompt: 64 (A), 128 (B)."),
        (run(output=8), "Not the same --output: 32 (A), 8 (B)."),
        (run(temperature=0.5), "Not the same --temperature: unset (A), 0.5 (B)."),
        (run(cell(prompt_tokens=80.0)), "Not the same prompts, in tokens as the servers count them: 64 (A), 80 (B)."),
        (run(CELL, cell("8 clients"), cell("9 clients")), "Only in B: 8 clients, 9 clients."),
    ],
)
def test_what_makes_figures_not_comparable_is_named(b: Run, line: str) -> None:
    both = Comparison(run(), b)
    assert both.differences() == [line]
    assert line in both.notes() and line in both.markdown()
    assert line in list(ElementTree.fromstring(both.chart()).itertext())


def test_counts_that_are_unknown_or_almost_equal_are_no_difference() -> None:
    for tokens in (None, 66.0):
        assert Comparison(run(), run(cell(prompt_tokens=tokens))).differences() == []


@pytest.mark.parametrize(("repeats", "mark"), [([104.0, 106.0], ""), ([99.0, 104.0], "≈"), ([104.0], "")])
def test_a_difference_that_may_be_chance_is_marked(repeats: list[float], mark: str) -> None:
    a, b = run(cell(repeats=[98.0, 100.0])), run(cell(output_tokens_per_s=104.0, repeats=repeats))
    both = Comparison(a, b)
    assert both.rows()[0][1] == f"100 → 104 ({mark}1.04)"
    assert ("≈:" in both.notes()[0]) == bool(mark)
    assert any("Measured once" in note for note in both.notes()) == (len(repeats) == 1)


def written(folder: Path, measured: Run) -> Path:
    report.prepare(folder)
    report.write(folder, measured)
    return folder / "bench.json"


def config(tmp_path: Path, compare: str, *more: str) -> BenchConfig:
    return parse(BenchConfig, ["--compare", compare, "--out", str(tmp_path / "out"), *more], {})


def test_two_files_are_compared_without_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = written(tmp_path / "a", run()), written(tmp_path / "b", run(cell(output_tokens_per_s=50.0)))
    assert run_bench(config(tmp_path, f"{a},{b}")) == 0
    said = capsys.readouterr()
    assert "| 1 client | 100 → 50.0 (0.50) |" in said.out
    assert said.err == f"Chart: {tmp_path}/out/compare.svg (table: compare.md)\n"
    assert (tmp_path / "out" / "compare.md").read_text().startswith(said.out)
    drawn = list(ElementTree.fromstring((tmp_path / "out" / "compare.svg").read_text()).itertext())
    assert {"A median", "A 99th percentile", "B median", "B 99th percentile"} <= set(drawn)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["compare.md", "compare.svg"]


@pytest.mark.parametrize(
    ("compare", "more", "error"),
    [
        ("a.json,b.json,c.json", [], "--compare takes one bench.json, to compare this run with it, or two"),
        ("a.json,b.json", ["--prompt", "1", "--no-ignore-eos"],
         "--compare with two files measures nothing: leave out --prompt, --ignore-eos"),
        ("nowhere.json", [], "--compare nowhere.json: No such file or directory"),
        ("a.json,a.json", [], "--compare a.json is not a bench.json of launcher bench"),
        ("out/bench.json", [], "--compare out/bench.json would be overwritten by this run: choose another --out"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    compare: str, more: list[str], error: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text("{}")
    assert run_bench(config(tmp_path, compare, *more)) == 1
    assert capsys.readouterr() == ("", f"Error: {error}\n")
    assert not (tmp_path / "out").exists()


def test_runs_without_a_common_load_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = written(tmp_path / "a", run()), written(tmp_path / "b", run(cell("8 clients")))
    assert run_bench(config(tmp_path, f"{a},{b}")) == 1
    assert capsys.readouterr().err == (
        "Error: --compare: the runs have no load in common: 1 client (A), 8 clients (B)\n"
    )


@pytest.mark.parametrize("status", [0, 130])
def test_a_run_is_compared_with_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    faster = run(cell(output_tokens_per_s=200.0))
    monkeypatch.setattr("launcher.bench.command._measured", lambda *_: (faster, status))
    assert run_bench(config(tmp_path, str(written(tmp_path / "a", run())))) == status
    said = capsys.readouterr()
    assert "| 1 client | 200.0 |" in said.out and "| 1 client | 100 → 200 (2.00) |" in said.out
    assert [line.split(" (")[0] for line in said.err.splitlines()] == [
        f"Chart: {tmp_path}/out/bench.svg", f"Chart: {tmp_path}/out/compare.svg",
    ]  # fmt: skip
