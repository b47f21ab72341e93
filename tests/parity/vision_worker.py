"""One rank of vision models: `python -m parity.vision_worker RANK WORLD PORT`.

Each line of its standard input is FOLDER, NAME and STAGES between tabs: it runs the prompts in FOLDER/prompts.pt in
small chunks, one joining after another, or whole where they must be, writes its tokens beside them, and says so.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from parity.vision_scene import Prompt, request
from support.engine_shard import EngineShard
from support.loading import CPU, load

from model_server.distributed.group import connect
from model_server.distributed.layout import Layout, Ranks
from model_server.distributed.stage_links import StageLinks
from model_server.text.tokenizer import Tokenizer
from model_server.vision.encoder import ImageEncoder
from model_server.vision.families import vision_family
from model_server.vision.tower import load_tower


def main(rank: int, world_size: int, port: int) -> None:
    torch.set_num_threads(1)
    group = connect(rank, world_size, CPU, port=port, timeout_s=120)
    group.on_lost(lambda message: None)  # the ranks end one by one
    ranks = {n: Ranks.of(group, Layout.of(rank, world_size, num_stages=n)) for n in (1, 2)}
    for line in sys.stdin:
        folder, name, num_stages = line.rstrip("\n").split("\t")
        with torch.inference_mode():
            said = answers(ranks[int(num_stages)], Path(folder), name)
        torch.save(said, Path(folder, f"said{rank}.pt"))
        print("said", flush=True)


def answers(ranks: Ranks, folder: Path, name: str) -> dict[int, list[int]]:
    """The tokens of this rank's requests, by request."""
    rank, world_size = ranks.world.rank, ranks.world.size
    prompts: list[tuple[Prompt, int]] = torch.load(folder / "prompts.pt", weights_only=False)
    family = vision_family(json.loads((folder / "config.json").read_text()))
    assert family is not None
    runner: Any = load(folder, ranks=ranks)
    is_whole = family.sight == "prompt"
    links = StageLinks(ranks, CPU) if ranks.layout.stage.size > 1 else None
    encoder = ImageEncoder(load_tower(folder, name, family, CPU, torch.float32), 10_000, ranks.world)
    shard = EngineShard(
        Tokenizer.load(folder), rank=rank, world_size=world_size, budget=None if is_whole else 7, runner=runner,
        encoder=encoder, num_blocks=256, links=links,
    )  # fmt: skip
    requests = [request(shard, prompt, chunk_len=None if is_whole else first) for prompt, first in prompts]
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
