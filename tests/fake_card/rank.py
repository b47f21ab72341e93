"""One rank of a model on the stand-in card, as a process: rank.py RANK WORLD STAGES PORT CHECKPOINT.

Leaves what it said, and what the stand-in saw, beside the checkpoint.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from engines import answers_of, make_engine, small_sizes
from stand_in import numbers, queued
from stand_in.counters import counts, faults

from model_server.device import enter, resolve_device
from model_server.distributed.group import connect
from model_server.distributed.layout import Layout
from model_server.shard import release_ranks

MEET_LIMIT_S = 600.0


def main(rank: int, world: int, stages: int, port: int, checkpoint: Path) -> None:
    numbers.install()
    device = resolve_device(rank, world)
    group = connect(rank, world, device, port=port, timeout_s=MEET_LIMIT_S, one_shot=stages == 1)
    group.on_lost(lambda message: None)  # the ranks end one by one
    layout = Layout.of(rank, world, num_stages=stages)
    with enter(device), small_sizes():
        engine, runner = make_engine(checkpoint, device, torch.float32, group=group, layout=layout)
        answers = answers_of(engine)
        torch.cuda.synchronize(device)
    torch.save(answers, checkpoint / f"answers{rank}.pt")
    seen = {"faults": faults(counts()), "errors": queued.errors, "sizes": getattr(runner, "captured_sizes", ())}
    (checkpoint / f"seen{rank}.json").write_text(json.dumps(seen))
    group.barrier()
    release_ranks(runner, group, orderly=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]), Path(sys.argv[5]))
