"""One rank of the tensor-parallel test, as a process: `python -m parity.tp_worker RANK WORLD PORT JOBS_FILE`.

JOBS_FILE holds {name: (checkpoint, sequences)}; the logits of each job are written beside it, of FLOAT8_JOBS those over
a cache in float8 too. Imports the product only.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from parity.protocol import CPU, run_protocol
from support.loading import load

from model_server.distributed.group import ProcessGroup, connect
from model_server.errors import FatalError

E4M3 = torch.float8_e4m3fn
# KV heads that are divided, and one that every rank has.
FLOAT8_JOBS = ("llama-mha", "llama-mqa")


def main(rank: int, world_size: int, port: int, jobs_file: Path) -> None:
    torch.set_num_threads(1)
    group = connect(rank, world_size, CPU, port=port, timeout_s=60)
    group.on_lost(lambda message: None)  # the ranks end one by one, and some still write their results
    results = {}
    for name, (path, sequences) in torch.load(jobs_file).items():
        runner = load(Path(path), group=group)
        results[name] = {"logits": run_protocol(runner, sequences, 4), "kv_heads": runner.kv_shapes[0].num_kv_heads}
        if name in FLOAT8_JOBS:
            stored = load(Path(path), group=group, cache_dtype=E4M3)
            results[name]["float8"] = run_protocol(stored, sequences, 4, E4M3)
    half = torch.full((3,), 1.5 + rank, dtype=torch.bfloat16)
    facts = {
        "smallest": group.all_reduce_min(10 - rank),
        "half sum": group.all_reduce(half).tolist(),
        "gathered": group.all_gather_last(torch.full((2, 1), float(rank))).tolist(),
    }
    group.barrier()
    if rank == 0:
        facts["lost"] = lose_the_others(group)
    torch.save({"jobs": results, **facts}, jobs_file.with_name(f"rank{rank}of{world_size}.pt"))
    if rank != 0:
        os._exit(0)  # as if killed: the group is not taken down
    group.close()


def lose_the_others(group: ProcessGroup) -> str:
    """The other ranks end without a word: what the next collective says."""
    try:
        group.all_reduce(torch.ones(1))
    except FatalError as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
