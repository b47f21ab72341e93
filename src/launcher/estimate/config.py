"""What `launcher estimate` was asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wire.cli.options import argument, option


@dataclass(frozen=True, kw_only=True)
class EstimateConfig:
    """One model on one machine."""

    model_id: str = argument(metavar="MODEL", has_flag=True, help="Hub id, folder, GGUF file, or `demo`.")
    revision: str | None = option(None, env="REVISION", help="Branch, tag or commit of a hub id. Default: main.")
    memory: int | None = option(
        None, env=None, unit="bytes", minimum=1,
        help="Memory of each GPU, or of the machine for --device cpu. Default: this machine's.",
    )  # fmt: skip
    device: Literal["gpu", "cpu"] | None = option(
        None, env=None, help="Default: gpu if this machine has GPUs or if --memory is given, else cpu."
    )
    kv_cache_memory: int | None = option(
        None,
        env=None,
        unit="bytes",
        minimum=1,
        help="What --kv-cache-memory of the server will be. Default: its default.",
    )
    num_shard: int | None = option(
        None, env=None, minimum=1, maximum=64, help="Only this number of shards. Default: 1, 2, 4 and 8 where they fit."
    )
    request: int = option(
        2048,
        env=None,
        unit="tokens",
        minimum=1,
        help="Tokens of each request (prompt and answer), to say how many fit.",
    )
    json: bool = option(False, env=None, help="Print JSON instead of a table.")
