"""`python -m benchmarks.gpu --stages S0,S1,S2 --budget 600 --out DIR`: see README.md beside this file.

Finished stages of an earlier run in DIR are kept: repeat the command to run the rest. `--device cpu --tiny` runs the
stages at toy sizes, to prove that they run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.gpu import report as table
from benchmarks.gpu.first_hour import LIMIT_S, PARTS, QUARTER, run_part
from benchmarks.gpu.measuring.environment import describe
from benchmarks.gpu.running import Report, Run, run_stages
from benchmarks.gpu.stages.table import BY_NAME, STAGES

OUT = Path(__file__).parents[1] / "out" / "gpu"


def main() -> int:
    """Returns 1 if a check failed or a stage did not finish. A missed bar is a result, not a failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", help="comma-separated; unset: all, or those that measure --model")
    parser.add_argument("--budget", type=float, default=1500.0, help="seconds for all of them")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--fresh", action="store_true", help="run finished stages again")
    parser.add_argument("--model", help="folder or hub id of a model to measure instead of the shapes without files")
    parser.add_argument("--git-state", help="what the header says of the code where there is no repository")
    parser.add_argument("--seed", type=int, help="of random inputs; unset: another one in every run")
    parser.add_argument(
        "--first-hour", type=int, nargs="?", const=0, choices=range(len(PARTS) + 1), metavar="PART",
        help="the next unfinished part of the first hour on a card, or this one; ten minutes at most",
    )  # fmt: skip
    parser.add_argument(
        "--first-quarter", action="store_true",
        help="the first quarter of an hour on a card, in one command of at most ten minutes, what is fast first",
    )  # fmt: skip
    options = parser.parse_args()
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu needs --tiny: the sizes are a GPU's")
    model = None if options.model is None else model_folder(options.model)
    names = [s.name for s in STAGES if s.for_model or model is None]
    if options.stages is not None:
        names = options.stages.split(",")
    if unknown := [n for n in names if n not in BY_NAME]:
        parser.error(f"no such stage: {', '.join(unknown)}")
    if model is not None and (other := [n for n in names if not BY_NAME[n].for_model]):
        parser.error(f"--model: {', '.join(other)} measure no model of yours")

    header = describe(options.device, options.git_state) | {"tiny": options.tiny, "model": options.model}
    if options.first_hour is not None:
        run = Run(options.device, options.tiny, model, options.seed)
        return run_part(options.out, options.first_hour or None, run, header)
    if options.first_quarter:
        options.out, options.budget = options.out / "first-quarter", min(options.budget, LIMIT_S)
        if options.stages is None:
            names = [*QUARTER]
    report = Report(options.out / "report.json", header, fresh=options.fresh)
    run_stages(names, Run(options.device, options.tiny, model, options.seed), report, options.budget)
    whole = table.text(report)
    report.path.with_name("table.txt").write_text(whole + "\n")
    summary = table.counts(report)
    print(whole)
    print(f"{summary['failed']} checks failed, {summary['missed']} bars not met; unfinished: {summary['unfinished']}")
    print(f"written to {report.path}")
    return int(bool(summary["failed"] or summary["unfinished"]))


def model_folder(model: str) -> Path:
    """The folder of a model; of one from the hub, where it is downloaded to.

    Raises SystemExit if it is neither.
    """
    if (path := Path(model)).is_dir():
        return path.resolve()
    if model == "demo":
        from wire import demo_model

        return demo_model.path()
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja", "tokenizer*"]))


if __name__ == "__main__":
    sys.exit(main())
