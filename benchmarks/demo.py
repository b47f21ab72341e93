"""`make bench`: the demo model through the whole server, beside `transformers.generate` on the same weights.

The server is started with the real launcher; transformers runs in this process between the server's repeats, never at
the same time. Both answer the same prompts greedily with the same number of tokens, in the same dtype. transformers has
no server and no continuous batching here: at concurrency n it gets the n prompts as one padded batch, its best case.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.server import Server, closed_cell
from benchmarks.stopping import exit_on_signals
from launcher.bench.results import Cell, median_cell
from wire import demo_model

OUT = Path(__file__).parent / "out" / "demo.json"
TEXT = "the launcher starts a router and one model server for every device that is to run a part of the model"
WORDS = TEXT.split()


def prompt(index: int, num_words: int) -> str:
    """A prompt of its own for every request, about `num_words` tokens long."""
    return f"Story {index}: " + " ".join(WORDS[(index + i) % len(WORDS)] for i in range(num_words))


class Transformers:
    """The peer: one padded batch per call."""

    def __init__(self, dtype: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = demo_model.path()
        self.tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()

    def measure(self, concurrency: int, count: int, num_words: int, new_tokens: int) -> float:
        """Output tokens per second."""
        started = time.perf_counter()
        tokens = 0
        for first in range(0, count, concurrency):
            texts = [prompt(i, num_words) for i in range(first, first + concurrency)]
            inputs = self.tokenizer(texts, return_tensors="pt", padding=True)
            with torch.inference_mode():
                output = self.model.generate(
                    **inputs, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False
                )
            tokens += output.shape[0] * (output.shape[1] - inputs["input_ids"].shape[1])
        return float(tokens / (time.perf_counter() - started))


def copy_bandwidth() -> float:
    """Bytes per second read by a large sum, the floor of a decode step at batch 1."""
    data = torch.ones(64 * 2**20)
    best = 0.0
    for _ in range(5):
        started = time.perf_counter()
        data.sum()
        best = max(best, data.nbytes / (time.perf_counter() - started))
    return best


def show(ours: dict[int, Cell], theirs: dict[int, float], title: str) -> None:
    table = Table(title=title)
    for column in ("concurrency", "output tok/s", "transformers tok/s", "ratio", "TTFT p50/p99 ms", "ITL p50/p99 ms",
                   "errors"):  # fmt: skip
        table.add_column(column, justify="right")
    for concurrency, cell in ours.items():
        peer = theirs[concurrency]
        table.add_row(
            str(concurrency),
            f"{cell.output_tokens_per_s:,.0f}",
            f"{peer:,.0f}",
            f"{cell.output_tokens_per_s / peer:.2f}",
            f"{cell.ttft_p50 * 1e3:.1f} / {cell.ttft_p99 * 1e3:.1f}",
            f"{cell.itl_p50 * 1e3:.2f} / {cell.itl_p99 * 1e3:.2f}",
            str(cell.errors),
        )
    Console(width=120).print(table)


def main() -> None:
    exit_on_signals()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="1,8,32", help="comma-separated")
    parser.add_argument("--prompt-words", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--port", type=int, default=8093)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    levels = [int(c) for c in options.concurrency.split(",")]

    peer = Transformers(options.dtype)
    server = Server(options.port, options.dtype)
    ours: dict[int, list[Cell]] = {c: [] for c in levels}
    theirs: dict[int, list[float]] = {c: [] for c in levels}
    try:
        for repeat in range(options.repeats):
            for level in levels:
                count = max(8, 2 * level)
                # Prompts that no cell before this one has brought into the prefix cache.
                first = 10_000 * repeat + 100 * level
                prompts = [prompt(first + i, options.prompt_words) for i in range(count)]
                ours[level].append(closed_cell(server.url, prompts, level, options.new_tokens))
                theirs[level].append(peer.measure(level, count, options.prompt_words, options.new_tokens))
    finally:
        server.stop()
    best_ours = {c: median_cell(cells) for c, cells in ours.items()}
    best_theirs = {c: median(rates) for c, rates in theirs.items()}
    title = f"demo model, {options.dtype}, {options.prompt_words} words -> {options.new_tokens} tokens"
    show(best_ours, best_theirs, title)
    weights = sum(f.stat().st_size for f in demo_model.path().glob("*.safetensors"))
    bandwidth = copy_bandwidth()
    print(f"launcher to an open port: {server.start_s:.1f} s; read bandwidth {bandwidth / 1e9:.1f} GB/s")
    report = {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "options": {k: str(v) for k, v in vars(options).items() if k != "out"},
        "start_s": server.start_s,
        "read_bandwidth_bytes_per_s": bandwidth,
        "checkpoint_bytes": weights,
        "tercet": [c.as_json() for c in best_ours.values()],
        "transformers_tokens_per_s": best_theirs,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
