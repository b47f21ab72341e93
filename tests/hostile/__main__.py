"""`make soak HOURS=1`: rounds of every attack on one server until the time is over, and a report.

Ends with 1 at the first thing that is not as it should be, or if the router or the shard has grown by more than 5 %
since the first ten minutes.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from pathlib import Path

from hostile.report import Report, commit
from hostile.rounds import Rounds, Sizes
from hostile.target import target, vision_target

SIZES = Sizes(
    bodies=6000,
    raw=400,
    leaving=600,
    grpc=300,
    workers=4,
    overload=400,
    mixed_seconds=50,
    launches=1,
    folders=2,
    grammars=24,
    silent_tls=600,
    responses=150,
    heads=40,
)
PICTURES = Sizes(pictures=500, image_servers=24)


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=0.25, help="at least one round is done")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, default=Path("build/soak-report.md"), help="where the report is written")
    asked = parser.parse_args()
    report = Report(commit=commit(), seed=asked.seed)
    try:
        with target() as attacked, vision_target() as seeing:
            rounds = [
                Rounds(attacked, asked.seed, SIZES),
                Rounds(seeing, asked.seed, PICTURES, prefix="vision "),
            ]
            until = time.monotonic() + 3600 * asked.hours
            while report.num_rounds == 0 or time.monotonic() < until:
                for outcome in (outcome for one in rounds for outcome in one.one()):
                    report.add(outcome)
                    print(report.line(outcome), flush=True)
                report.end_round()
    except Exception as error:
        report.fault = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    asked.report.parent.mkdir(parents=True, exist_ok=True)
    asked.report.write_text(report.text())
    print(report.text())
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
