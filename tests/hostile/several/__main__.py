"""`make soak-models HOURS=1`: random load over several models until the time is over, and a report.

Ends with 1 at the first thing that is not as it should be, or if the launcher or the front has grown by more than 5 %
since the first ten minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import traceback
from pathlib import Path

from hostile.report import Report, commit
from hostile.rounds import Outcome
from hostile.several.load import RandomLoad
from hostile.several.served import served

_ROUND_S = 100.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak-models", description=__doc__)
    parser.add_argument("--hours", type=float, default=0.25, help="at least one round is done")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, default=Path("build/soak-models-report.md"), help="where it is written")
    asked = parser.parse_args()
    report = Report(commit=commit(), seed=asked.seed)
    log = asked.report.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with served() as running:
        try:
            load = RandomLoad(running, asked.seed)
            until = time.monotonic() + 3600 * asked.hours
            while report.num_rounds == 0 or time.monotonic() < until:
                begin = time.monotonic()
                seen = asyncio.run(load(_ROUND_S))
                outcome = Outcome("random load", time.monotonic() - begin, seen, load.memory())
                report.add(outcome)
                print(report.line(outcome), flush=True)
                report.end_round()
        except BaseException as error:
            report.fault = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        log.write_text(running.server.log())
    asked.report.write_text(report.text())
    print(report.text())
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
