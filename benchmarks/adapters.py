"""What LoRA adapters cost in a decode: `python -m benchmarks.adapters [--shape 135M 0.5B]`.

Eight adapters of rank 16 are loaded with the model: on all linear layers or, with `--layers few`, on queries and values
alone, which PEFT adapts where nothing is said. A decode step in which the rows of a batch have them in turn, and one
with the same adapter for all, beside the base model's step of the same batch: in turns in one process, forward and
greedy choice, without a server. The share of the base model's tokens per second that is left is that of the quickest
steps; the medians are written too. The result goes to `benchmarks/results/adapters.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from benchmarks.engine.steps import Step, cells, clock_of, dtype_of, loaded, timed
from benchmarks.peers.checkpoints import SHAPES
from benchmarks.peers.machine import processor
from model_server.adapters.rows import BASE
from model_server.cpp.library import instruction_set, usable

OUT = Path(__file__).parent / "results" / "adapters.json"
FOLDER = Path(__file__).parent / "out" / "adapters"
NUMBER, RANK = 8, 16
ALL, FEW = "all", "few"
# What PEFT adapts of models like these where an adapter's author says nothing.
_FEW = ("self_attn.q_proj", "self_attn.v_proj")


@dataclass(frozen=True)
class Result:
    """Milliseconds of a step: the quickest and the median one, of the base model and with adapters."""

    shape: str
    dtype: str
    rows: int
    adapters: str
    base_ms: float
    adapters_ms: float
    base_median_ms: float
    adapters_median_ms: float

    @property
    def kept(self) -> float:
        """The share of the base model's tokens per second."""
        return self.base_ms / self.adapters_ms


def adapter_folders(shape: str, layers: str) -> Mapping[str, Path]:
    """Random adapters of a shape, by their names; made at the first call. layers: ALL linear ones or a FEW."""
    folders = {f"adapter-{i}": FOLDER / f"{shape}-{layers}" / str(i) for i in range(NUMBER)}
    for seed, folder in enumerate(folders.values()):
        if not (folder / "adapter_model.safetensors").exists():
            _make(shape, layers, seed, folder)
    return folders


def _make(shape: str, layers: str, seed: int, folder: Path) -> None:
    settings = SHAPES[shape]
    hidden, inner, heads = settings["hidden_size"], settings["intermediate_size"], settings["num_attention_heads"]
    keys = hidden // heads * settings["num_key_value_heads"]
    modules = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden, keys)}
    modules |= {"self_attn.v_proj": (hidden, keys), "self_attn.o_proj": (hidden, hidden)}
    modules |= {"mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner), "mlp.down_proj": (inner, hidden)}
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(settings["num_hidden_layers"]):
        for module, (inputs, outputs) in modules.items():
            if layers == FEW and module not in _FEW:
                continue
            for letter, size in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                key = f"base_model.model.model.layers.{layer}.{module}.lora_{letter}.weight"
                tensors[key] = (torch.randn(size, generator=generator) * 0.02).bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def measure(shape: str, args: argparse.Namespace) -> list[Result]:
    clock, dtype = clock_of(cpu_time=args.cpu_time), dtype_of(args.dtype)
    found: list[Result] = []
    folders = adapter_folders(shape, args.layers)
    with loaded(shape, args.dtype, one_thread=args.cpu_time, adapters=folders) as runner:
        for cell in cells(args.rows, prefill=False):
            rows = len(cell.query)
            kinds = {"none": [BASE] * rows, "mixed": [i % NUMBER for i in range(rows)], "one": [0] * rows}
            steps = {name: Step(cell, runner, dtype, numbers) for name, numbers in kinds.items()}
            times: dict[str, list[float]] = {name: [] for name in kinds}
            for _ in range(args.turns):
                for name, step in steps.items():
                    times[name] += timed(partial(_run, step), args.seconds / args.turns, clock, least=1)
            base = times.pop("none")
            for name, own in times.items():
                middles = statistics.median(base), statistics.median(own)
                found.append(Result(shape, args.dtype, rows, name, min(base), min(own), *middles))
    return found


def _run(step: Step) -> None:
    step.choose(step.forward())


def _table(results: list[Result]) -> Table:
    table = Table(title=f"{processor()}; {torch.get_num_threads()} threads")
    for column in ("shape", "rows", "adapters", "base, ms", "with, ms", "tokens/s kept", "of medians"):
        table.add_column(column, justify="right")
    for r in results:
        medians = r.base_median_ms / r.adapters_median_ms
        times = f"{r.base_ms:.2f}", f"{r.adapters_ms:.2f}", f"{r.kept:.3f}", f"{medians:.3f}"
        table.add_row(r.shape, str(r.rows), r.adapters, *times)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["135M", "0.5B"])
    parser.add_argument("--layers", choices=(ALL, FEW), default=ALL)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--seconds", type=float, default=6.0, help="for each step, in turns")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--cpu-time", action="store_true", help="one thread, CPU time: on a machine that is not quiet")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    results = [result for shape in args.shape for result in measure(shape, args)]
    Console(width=100).print(_table(results))
    operators = instruction_set() if usable(torch.device("cpu"), dtype_of(args.dtype)) else None
    report = {
        "processor": processor(),
        "instruction_set": operators,
        "threads": torch.get_num_threads(),
        "time": "cpu" if args.cpu_time else "wall",
        "rank": RANK,
        "layers": args.layers,
        "number": NUMBER,
        "steps": [asdict(r) | {"kept": round(r.kept, 4)} for r in results],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
