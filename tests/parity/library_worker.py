"""One rank that loads model types by the load-time choice: `python -m parity.library_worker RANK WORLD PORT JOBS_FILE`.

JOBS_FILE holds {model type: (checkpoint, sequences)}; per type the logits, or the sentence that refuses it, are written
beside it.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from parity.library import run_whole
from parity.protocol import CPU, run_protocol
from support.loading import load

from model_server.distributed.group import connect
from model_server.errors import StartupError


def main(rank: int, world_size: int, port: int, jobs_file: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    group = connect(rank, world_size, CPU, port=port, timeout_s=60)
    group.on_lost(lambda message: None)  # the ranks end one by one
    results: dict[str, object] = {}
    target = jobs_file.with_name(f"rank{rank}of{world_size}.pt")
    for name, (path, sequences) in torch.load(jobs_file).items():
        try:
            runner = load(Path(path), group=group)
            with torch.inference_mode():
                whole = runner.traits.decoder_prefix is not None
                results[name] = run_whole(runner, sequences) if whole else run_protocol(runner, sequences, 4)
        except StartupError as error:
            results[name] = str(error)
        torch.save(results, target)
    group.barrier()
    group.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
