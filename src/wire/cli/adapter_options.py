"""AdapterOptions: options of the launcher for LoRA adapters."""

from __future__ import annotations

from dataclasses import dataclass

from wire.cli.options import option

_ADAPTERS = "Adapters"
MOST_SLOTS = 256


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Options for LoRA adapters; without the first two there are none."""

    lora_adapters: str | None = option(
        None, panel=_ADAPTERS,
        help="LoRA adapters that requests may ask for by name, separated by commas: name=path, path, or a hub "
        "id[@revision], which is fetched before the model is loaded; also name=id[@revision].",
    )  # fmt: skip
    lora_root: str | None = option(
        None,
        panel=_ADAPTERS,
        help="Folder of LoRA adapters to load while the server runs; needs --api-key or --keys-file.",
    )
    lora_host_memory: float | None = option(
        None, panel=_ADAPTERS, minimum=1e-6, help="GiB for those of a shard. Default: 4."
    )
    lora_slots: int | None = option(
        None, panel=_ADAPTERS, minimum=1, maximum=MOST_SLOTS,
        help="Most adapters in one batch; requests for others wait. On a GPU as many have memory of their own. "
        "Default: 8 on a GPU, without --lora-root at most those of --lora-adapters; on a CPU no limit.",
    )  # fmt: skip
    lora_max_rank: int | None = option(
        None, panel=_ADAPTERS,
        help="Largest rank of an adapter: 8, 16, 32, 64, 128 or 256; slots of a GPU all have it. Default: 256 on a "
        "CPU; on a GPU that of --lora-adapters, and at least 64 with --lora-root.",
    )  # fmt: skip
