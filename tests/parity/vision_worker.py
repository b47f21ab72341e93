"""One rank of vision models: `python -m parity.vision_worker RANK WORLD PORT`.

Each line of its standard input is the folder of a model: it runs the `Job` there in small chunks, one request joining
after another, or whole where they must be, writes its tokens beside it, and says so.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from parity.vision_ranks import JOB, Job
from parity.vision_scene import request
from support.engine_shard import EngineShard
from support.loading import CPU, load

from model_server.distributed.group import connect
from model_server.distributed.layout import Layout, Ranks
from model_server.distributed.stage_links import StageLinks
from model_server.features.images.encoder import ImageEncoder
from model_server.features.images.families import vision_family
from model_server.features.images.tower import load_tower
from model_server.text.tokenizer import Tokenizer


def main(rank: int, world_size: int, port: int) -> None:
    torch.set_num_threads(1)
    group = connect(rank, world_size, CPU, port=port, timeout_s=120)
    group.on_lost(lambda message: None)  # the ranks end one by one
    ranks = {n: Ranks.of(group, Layout.of(rank, world_size, num_stages=n)) for n in (1, 2)}
    for line in sys.stdin:
        folder = Path(line.rstrip("\n"))
        job: Job = torch.load(folder / JOB, weights_only=False)
        with torch.inference_mode():
            said = answers(ranks[job.num_stages], folder, job)
        torch.save(said, folder / f"said{rank}.pt")
        print("said", flush=True)


def answers(ranks: Ranks, folder: Path, job: Job) -> dict[int, list[int]]:
    """The tokens of this rank's requests, by request."""
    rank, world_size = ranks.world.rank, ranks.world.size
    family = vision_family(json.loads((folder / "config.json").read_text()))
    assert family is not None
    runner: Any = load(folder, ranks=ranks, **job.options)
    is_whole = family.sight == "prompt"
    links = StageLinks(ranks, CPU) if ranks.layout.stage.size > 1 else None
    encoder = ImageEncoder(load_tower(folder, job.name, family, CPU, torch.float32), 10_000, ranks.world)
    shard = EngineShard(
        Tokenizer.load(folder), rank=rank, world_size=world_size, budget=None if is_whole else 7, runner=runner,
        encoder=encoder, num_blocks=256, links=links,
    )  # fmt: skip
    requests = [
        request(shard, one.prompt, chunk_len=None if is_whole else one.first, adapter_id=one.adapter)
        for one in job.requests
    ]
    if is_whole:
        results = [shard.prefill(0, *requests)]
    else:
        results = [shard.prefill(n, one, cached=0 if n else None) for n, one in enumerate(requests)]
    results += shard.run_out(results.pop(), 0)
    said: dict[int, list[int]] = {}
    for generation in (g for result in results for g in result.generations):
        assert generation.tokens is not None, generation.error
        said.setdefault(generation.request_id, []).extend(generation.tokens.ids)
    return said


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
