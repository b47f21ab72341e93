"""What a step of the engine costs in this process, no server: `python -m benchmarks.engine [--shape 135M]`.

The checkpoints are those of `benchmarks.peers`. A decode step at a batch of 1, 8 and 32 rows with 128 to 192 tokens of
context, a prefill of 8 prompts of 128 and of 2 of 512 tokens, each with its greedy choice: the median and the quickest
of several runs, in milliseconds, and what the loop would give in tokens per second if nothing else took time.

With --compare the same steps beside another configuration, in turns; all shapes and types unless some are named.

With --quantized the steps of int8 and int4 weights beside bfloat16 ones, in turns: weights that are quantized on load
as `--quantize eetq` does, and a gptq checkpoint of groups of 128, made of the same weights at the first run. It prints
a Markdown table and takes a quarter of an hour on two quiet cores; stop everything else first.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path

import torch

from benchmarks.engine import quantized
from benchmarks.engine.compare import Comparison, compare
from benchmarks.engine.steps import Step, cells, clock_of, dtype_of, loaded, timed
from benchmarks.peers.checkpoints import SHAPES
from benchmarks.peers.quantized import BITS
from model_server.runner.runner import Runner

OUT = Path(__file__).parents[1] / "out" / "engine.json"
QUANTIZED_OUT = Path(__file__).parents[1] / "results" / "quantized.json"
DTYPES = ("bfloat16", "float32")
COMPARED_SHAPES = ("135M", "0.5B")
QUANTIZED_SHAPES = ("135M", "0.5B", "1.1B")


def measure(runner: Runner, precision: str, args: argparse.Namespace) -> None:
    clock = clock_of(cpu_time=args.cpu_time)
    for cell in cells(args.rows, prefill=not args.no_prefill):
        step = Step(cell, runner, dtype_of(precision))
        logits = step.forward()
        forwards = timed(step.forward, args.seconds, clock)
        choices = timed(partial(step.choose, logits), args.seconds / 4, clock)
        middle = statistics.median(forwards) + statistics.median(choices)
        print(
            f"{cell.label:14} forward {statistics.median(forwards):8.2f} (min {min(forwards):8.2f}) ms   "
            f"choice {statistics.median(choices):6.2f} ms   {sum(cell.query) * 1000 / middle:9.1f} tok/s",
            flush=True,
        )
        if args.profile == cell.label:
            with torch.profiler.profile() as profile:
                for _ in range(5):
                    step.forward()
            print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))


def settings(words: list[str]) -> dict[str, str]:
    """NAME=VALUE of each word. Raises SystemExit for a word that is none."""
    wrong = [word for word in words if "=" not in word]
    if wrong:
        raise SystemExit(f"{wrong[0]!r} is no NAME=VALUE")
    return dict(word.split("=", 1) for word in words)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=None, help="135M; of a comparison several")
    parser.add_argument("--model", type=Path, help="another checkpoint instead of a shape")
    parser.add_argument(
        "--dtype", choices=(*DTYPES, *BITS), nargs="+", default=None,
        help="bfloat16; with --compare the first two, with --quantized the last two",
    )  # fmt: skip
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each cell, of a comparison for each side")
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument(
        "--cpu-time", action="store_true", help="one thread, CPU time: on a machine that does other work as well"
    )
    parser.add_argument("--attention", default=None)
    parser.add_argument("--profile", help="a cell, such as `decode 8`: print the operators of five of its steps")
    parser.add_argument(
        "--compare", nargs="*", metavar="NAME=VALUE",
        help="beside this process with these variables (TERCET_NATIVE=0 if none is named; PYTHONPATH=OTHER/src for "
        "another version)",
    )  # fmt: skip
    parser.add_argument("--quantized", action="store_true", help="quantized weights beside bfloat16")
    parser.add_argument("--ours", nargs="+", metavar="NAME=VALUE", default=[], help="variables of the first side")
    parser.add_argument("--turns", type=int, default=4, help="of each side in each cell of a comparison")
    parser.add_argument(
        "--out", type=Path, default=None,
        help="the comparison as JSON (benchmarks/out/engine.json; of --quantized benchmarks/results/quantized.json)",
    )  # fmt: skip
    args = parser.parse_args()
    if args.model and (args.quantized or "int4" in (args.dtype or ())):
        parser.error("--quantized and --dtype int4 take a --shape; a quantized checkpoint goes with --dtype bfloat16")
    if args.quantized and (args.compare is not None or args.profile or args.attention):
        parser.error("--quantized goes without --compare, --profile and --attention")
    labels = [cell.label for cell in cells(args.rows, prefill=not args.no_prefill)]
    if args.profile and args.profile not in labels:
        raise SystemExit(f"--profile {args.profile!r}: the cells are {', '.join(labels)}")
    return args


def main() -> None:
    args = options()
    if args.quantized:
        quantized.measure(
            args.shape or QUANTIZED_SHAPES,
            args.dtype or list(BITS),
            cells(args.rows, prefill=not args.no_prefill),
            seconds=args.seconds,
            turns=args.turns,
            cpu_time=args.cpu_time,
            out=args.out or QUANTIZED_OUT,
        )
        return
    if args.compare is not None:
        compare(
            Comparison(
                models=[str(args.model)] if args.model else args.shape or COMPARED_SHAPES,
                dtypes=args.dtype or DTYPES,
                cells=cells(args.rows, prefill=not args.no_prefill),
                ours=settings(args.ours),
                theirs=settings(args.compare or ["TERCET_NATIVE=0"]),
                seconds=args.seconds,
                turns=args.turns,
                cpu_time=args.cpu_time,
            ),
            args.out or OUT,
        )
        return
    for model in [str(args.model)] if args.model else args.shape or ["135M"]:
        for precision in args.dtype or ["bfloat16"]:
            with loaded(model, precision, attention=args.attention, one_thread=args.cpu_time) as runner:
                print(f"{Path(model).name}, {precision}, {torch.get_num_threads()} threads")
                measure(runner, precision, args)


if __name__ == "__main__":
    main()
