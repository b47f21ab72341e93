"""The options that make a server one for embeddings, reranking or classification."""

from __future__ import annotations

from dataclasses import dataclass

from wire.cli.options import option
from wire.pooling.task import AskedTask, PoolingName

PANEL = "Embeddings, rerank, classification"


@dataclass(frozen=True, kw_only=True)
class PoolingOptions:
    """What launcher and shards take under one name."""

    task: AskedTask = option(
        "auto",
        env="TERCET_TASK",
        panel=PANEL,
        help="What the model is served for: generate, embed, rerank or classify. Default: what its files say.",
    )
    pooling: PoolingName | None = option(
        None,
        panel=PANEL,
        help="How an embedding is made of the tokens: cls, mean, last-token or splade. Default: what the files say.",
    )
