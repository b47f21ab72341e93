"""This project's engine in one process: tokenizer, steps of so many tokens as a server's, pooling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from model_server.attention.choice import AttentionChoice
from model_server.device import SMALL_MODEL_BYTES, tune
from model_server.distributed.group import connect
from model_server.distributed.layout import Layout, Ranks
from model_server.distributed.placement import Placement
from model_server.errors import StartupError
from model_server.models.model import describe_pooled
from model_server.pooling import loading
from model_server.pooling.items import Item, Kind
from model_server.pooling.plan import make_plan
from model_server.weights.checkpoint import examine
from wire.pooling.files import read
from wire.pooling.task import find_task

CPU = torch.device("cpu")
STEP_TOKENS = 512


def load(model: str, dtype: str) -> Callable[[Sequence[str]], Any]:
    folder = Path(model)
    kind: torch.dtype = getattr(torch, dtype)
    checkpoint = examine(folder)
    tune(CPU, 1, max(checkpoint.file_bytes, SMALL_MODEL_BYTES))  # all CPUs, as in a server
    files = read(folder, checkpoint.fields, StartupError)
    plan = make_plan(find_task(folder, "embed", StartupError), files, checkpoint.fields, None, model, folder)
    ranks = Ranks.of(
        connect(0, 1, CPU, address="localhost", port=1, timeout_s=1), Layout.of(0, 1, num_stages=1, num_nodes=1), CPU
    )
    placement = Placement(CPU, kind, ranks, None)
    runner = loading.load(describe_pooled(checkpoint), plan, placement, AttentionChoice(None, CPU, kind))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    with torch.inference_mode():
        tokenizer.enable_truncation(runner.warm_up(STEP_TOKENS, None))

    def embed(texts: Sequence[str]) -> Any:
        ids = [np.array(one.ids, np.uint32) for one in tokenizer.encode_batch(list(texts))]
        items = [Item(id=number, input_ids=one, kind=Kind.POOLED, normalize=True) for number, one in enumerate(ids)]
        with torch.inference_mode():
            results = [one for step in _steps(items) for one in runner.run(step).results]
        return [np.frombuffer(one.values, "<f4") for one in results]

    return embed


def _steps(items: Sequence[Item]) -> Iterator[list[Item]]:
    step: list[Item] = []
    tokens = 0
    for item in items:
        if step and tokens + len(item.input_ids) > STEP_TOKENS:
            yield step
            step, tokens = [], 0
        step.append(item)
        tokens += len(item.input_ids)
    yield step
