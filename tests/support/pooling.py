"""A pooled model in this process, loaded from a folder as a shard does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from model_server.attention.choice import AttentionChoice
from model_server.distributed.group import connect
from model_server.distributed.layout import Layout, Ranks
from model_server.distributed.placement import Placement
from model_server.errors import StartupError
from model_server.models.model import describe_pooled
from model_server.pooling import loading
from model_server.pooling.items import Item, Kind
from model_server.pooling.plan import make_plan
from model_server.pooling.runner import PoolingRunner
from model_server.weights.checkpoint import examine
from wire.pooling.files import read
from wire.pooling.task import AskedTask, PoolingName, find_task

CPU = torch.device("cpu")


def load_pooled(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    pooling: PoolingName | None = None,
    task: AskedTask = "auto",
    attention: str | None = None,
    longest: int | None = None,
    device: torch.device = CPU,
) -> PoolingRunner:
    """Warm."""
    checkpoint = examine(folder)
    found = find_task(folder, task, StartupError)
    files = read(folder, checkpoint.fields, StartupError)
    plan = make_plan(found, files, checkpoint.fields, pooling, "the model", folder)
    layout = Layout.of(0, 1, num_stages=1, num_nodes=1)
    ranks = Ranks.of(connect(0, 1, device, address="localhost", port=1, timeout_s=1), layout, device)
    placement = Placement(device, dtype, ranks, None)
    runner = loading.load(describe_pooled(checkpoint), plan, placement, AttentionChoice(attention, device, dtype))
    with torch.inference_mode():
        runner.warm_up(64, longest)
    return runner


def items_of(folder: Path, texts: Sequence[str | tuple[str, str]], kind: Kind, longest: int) -> list[Item]:
    """The texts, or pairs, cut to `longest` tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(longest)
    items = []
    for number, encoding in enumerate(tokenizer.encode_batch(list(texts))):
        second = encoding.type_ids.index(1) if 1 in encoding.type_ids else 0
        ids = np.array(encoding.ids, dtype=np.uint32)
        items.append(Item(id=number, input_ids=ids, second_from=second, kind=kind))
    return items


def run(runner: PoolingRunner, items: Sequence[Item]) -> list[np.ndarray]:
    """The numbers of each item; fails with the first error."""
    with torch.inference_mode():
        results = runner.run(items).results
    assert [one.error for one in results] == [None] * len(items)
    numbers = [np.frombuffer(one.values, dtype="<f4") for one in results]
    return [
        values.reshape(one.rows, one.columns) if one.rows > 1 else values
        for one, values in zip(results, numbers, strict=True)
    ]
