"""The options of the model server. Only `cpp.config` reads the environment too; `distributed.group` sets a variable of
gloo.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from model_server.errors import StartupError
from wire.adapters import check_slots
from wire.cli.adapter_options import MOST_SLOTS
from wire.cli.options import argument, option
from wire.cli.pooling_options import PoolingOptions
from wire.log import progress_bars
from wire.quantization.methods import Quantize
from wire.speculation.options import check_speculation

DtypeName = Literal["float16", "bfloat16", "float32"]

_U32 = 2**32 - 1

NOT_SERVED = "not served yet"

_DISTRIBUTED, _RUN, _REFUSED = "Ranks", "Operation", "Not served yet (refused at start)"


# TGI's command line reads no variables for its own options (an inherited REVISION would reach the download of every
# adapter): those have `env=None`. Its launcher hands the rest to the shards by variables, which are options here.


# Tokens that a draft model drafts unless `--speculate` says how many.
_DRAFTED_BY_MODEL = 3
_WINDOW_ROWS = 128


@dataclass(frozen=True, kw_only=True)
class ServeConfig(PoolingOptions):
    """`model-server serve MODEL_ID`: one shard."""

    model_id: str = argument(help="Hub id, local folder, or `demo` for the embedded model")
    revision: str | None = option(None, env=None, help="Branch, tag or commit of a hub model")
    dtype: DtypeName | None = option(
        None, env=None, help="Type of weights and activations; unset: by the device and the type of the weights"
    )
    trust_remote_code: bool = option(
        False,
        env=None,
        negatable=True,
        help="Allow code from the model repository; models that the native runner serves never need it",
    )
    uds_path: Path = option(
        Path("/tmp/text-generation-server"), env=None, help="Prefix of the unix socket; -<rank> is appended"
    )
    logger_level: str = option("INFO", env=None, panel=_RUN, help="Least severe log level that is written")
    json_output: bool = option(False, env=None, negatable=True, panel=_RUN, help="One JSON object for each log line")
    otlp_endpoint: str | None = option(
        None, env=None, panel=_RUN,
        help="OpenTelemetry collector (http://host:port, OTLP over gRPC); needs the extra `trace`",
    )  # fmt: skip
    otlp_service_name: str = option(
        "text-generation-inference.server", env=None, panel=_RUN, help="Service name in traces"
    )
    max_input_tokens: int | None = option(
        None, unit="tokens", env=None, minimum=1, maximum=_U32, help="Longest prompt that the router sends, in tokens"
    )
    max_batch_total_tokens: int | None = option(
        None, unit="tokens", env=None, minimum=1, maximum=_U32,
        help="Upper bound of the KV cache in tokens; unset: what its memory holds",
    )  # fmt: skip
    kv_cache_memory: int | None = option(
        None, unit="bytes", env=None, minimum=1,
        help="Memory of this shard's KV cache; unset: on a GPU what is free, on a CPU --default-kv-cache-memory",
    )  # fmt: skip
    default_kv_cache_memory: int | None = option(
        None, unit="bytes", env=None, minimum=1,
        help="On a CPU, memory of this shard's KV cache unless it or its tokens are given: from 16000 to 2^20 tokens; "
        "unset: 25 % of what is free once the weights are loaded, divided by the shards",
    )  # fmt: skip
    cuda_memory_fraction: float = option(
        1.0, minimum=0.0, maximum=1.0, help="Share of the device's memory that may be used"
    )
    cuda_graphs: list[int] = option(
        [], separator=",", maximum=_U32,
        help="Decode batch sizes to capture as CUDA graphs, 0 for none; unset: 1 to 256",
    )  # fmt: skip
    max_batch_size: int | None = option(
        None,
        env="MAX_BATCH_SIZE",
        minimum=1,
        maximum=_U32,
        help="Most requests that the router decodes at once; no larger CUDA graph is captured",
    )
    state_slots: int | None = option(
        None,
        minimum=1,
        maximum=_U32,
        help="States of recurrent layers kept at once, of running requests and saved for prompts that begin alike. "
        "Unset: half of a GPU's memory beside the weights, a fifth of a CPU's, at least --max-batch-size",
    )
    lora_adapters: str | None = option(
        None,
        help="LoRA adapters to load with the model, separated by commas: name=path, path, or a hub id[@revision] that "
        "download-weights has fetched",
    )
    lora_root: str | None = option(
        None,
        help="Folder of LoRA adapters that the router may have loaded and dropped while the model serves",
    )
    lora_slots: int | None = option(
        None, minimum=1, maximum=MOST_SLOTS,
        help="Most LoRA adapters in one batch, which the router keeps to. On a GPU as many have memory of their own; "
        "unset: 8, without --lora-root at most those of --lora-adapters; on a CPU any number",
    )  # fmt: skip
    lora_max_rank: int | None = option(
        None,
        help="Largest rank of a LoRA adapter: 8, 16, 32, 64, 128 or 256. Unset: 256 on a CPU; on a GPU, whose slots "
        "all have that rank, that of --lora-adapters, and at least 64 with --lora-root",
    )
    request_logprobs: bool = option(False, help="Compute prompt logprobs when a request asks for them")
    attention: str | None = option(
        None,
        help="Attention backend: triton, flash_attn, torch_varlen, cpp or reference; TGI's names mean the best one "
        "that can serve the model",
    )
    kv_cache_dtype: Literal["fp8_e4m3fn", "fp8_e5m2"] | None = option(
        None,
        env=None,
        help="Type of the numbers in the KV cache. Unset: the model's; on a GPU what the checkpoint asks for",
    )
    quantize: Quantize | None = option(
        None,
        env=None,
        help="How plain weights are quantized while they are loaded: fp8, eetq or bitsandbytes to 8 "
        "bits, bitsandbytes-nf4 or bitsandbytes-fp4 to 4. Checkpoints that are "
        "stored quantized are served as they are, without it",
    )
    rope_scaling: Literal["linear", "dynamic"] | None = option(
        None, help="RoPE scaling to use instead of the config's; only `linear` is served"
    )
    rope_factor: float | None = option(None, minimum=0, help="Divisor of the positions; default with --rope-scaling: 1")
    prefix_caching: bool = option(
        True, help="Let requests share the KV cache of a common beginning; the router keeps track of it"
    )
    prefill_chunking: bool = option(True, help="Compute long prompts in several steps, together with running requests")
    batch_invariant: bool = option(
        False,
        help="Compute each request with the same bits in any batch, or refuse to start; without chunks, shared "
        "prefixes and preemption, and slower",
    )
    encoder_cache_tokens: int | None = option(
        None, unit="tokens", env=None, minimum=1, maximum=_U32,
        help="Image tokens whose embeddings are kept for further requests with the same image; unset: twice the most "
        "that one prompt can have",
    )  # fmt: skip
    speculate: int | None = option(
        None,
        env=None,
        maximum=15,
        help="The most tokens that are drafted and checked in one step, as long as that pays; unset: none, or with "
        "--speculator 3, or as many as there are heads",
    )
    speculate_max_rows: int | None = option(
        None,
        minimum=2,
        help="On a GPU, the most tokens that a step with drafts computes, over all its requests: with more requests "
        "the drafts are shorter, then there are none; unset: 128",
    )
    speculator: str | None = option(
        None,
        help="What drafts: a folder, ID or ID@REVISION of Medusa heads, an MLP speculator, EAGLE-3, or an ordinary "
        "checkpoint with the model's tokenizer; mtp: the layer for multi-token prediction in the model's own files",
    )
    disable_custom_kernels: bool = option(
        False, help="Let NCCL do every sum over the shards, even if the GPUs can read each other's memory"
    )
    profile: Path | None = option(
        None, env="TERCET_PROFILE", help="Folder for a Chrome trace of some steps, rank-<rank>.json"
    )
    profile_steps: int = option(50, env="TERCET_PROFILE_STEPS", minimum=1, help="Steps that --profile records")
    watermark_gamma: float = option(
        0.5, minimum=0.0, maximum=1.0, help="Share of the vocabulary that a watermark favours"
    )
    watermark_delta: float = option(2.0, help="Bias that a watermark adds to the logits of its share")
    sharded: bool = option(
        False,
        env=None,
        negatable=True,
        panel=_DISTRIBUTED,
        help="This shard is one of WORLD_SIZE ranks (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are then needed)",
    )
    rank: int | None = option(None, panel=_DISTRIBUTED, help="Rank of this shard")
    world_size: int | None = option(None, panel=_DISTRIBUTED, minimum=1, help="Number of shards")
    master_addr: str = option("localhost", panel=_DISTRIBUTED, help="Address where the ranks connect to each other")
    master_port: int = option(
        29500, panel=_DISTRIBUTED, maximum=65535, help="Port where the ranks connect to each other"
    )
    num_stage: int = option(
        1, panel=_DISTRIBUTED, minimum=1, help="Stages of the pipeline: WORLD_SIZE counts the shards of all of them"
    )
    stage_layers: list[int] = option(
        [],
        separator=",",
        panel=_DISTRIBUTED,
        minimum=1,
        maximum=_U32,
        help="Layers of each stage, as 20,22,22,16; unset: so that the largest stage has the fewest bytes",
    )
    num_nodes: int = option(1, panel=_DISTRIBUTED, minimum=1, help="Nodes on which the ranks run, as many on each")
    node_endpoint: str | None = option(
        None,
        panel=_DISTRIBUTED,
        help="Where the first rank of a node answers for all ranks of the node: tcp://<address>:<port> or unix://<path>",
    )
    endpoints: list[str] = option(
        [], separator=",", panel=_DISTRIBUTED, help="Endpoints of all nodes in their order; rank 0 names them"
    )
    group_token: str | None = option(
        None, panel=_DISTRIBUTED, header=True, help="Secret that calls to the endpoint must carry"
    )
    group_tls_cert: Path | None = option(
        None, panel=_DISTRIBUTED, help="PEM file with this node's certificate, for TLS between the nodes of a group"
    )
    group_tls_key: Path | None = option(None, panel=_DISTRIBUTED, help="PEM file with the key of --group-tls-cert")
    group_tls_ca: Path | None = option(
        None, panel=_DISTRIBUTED, help="PEM file with the certificate of the authority that signed those of all nodes"
    )

    dist_timeout: float = option(
        120.0,
        env="TGI_DIST_TIMEOUT",
        panel=_DISTRIBUTED,
        minimum=0.1,
        maximum=_U32,
        help="Seconds for which the ranks wait for each other at the start",
    )
    collective_timeout: float | None = option(
        None,
        panel=_DISTRIBUTED,
        minimum=0.1,
        maximum=_U32,
        help="Seconds for which a rank waits for the others in a step; unset: as at the start",
    )
    store_key_prefix: str = option(
        "",
        panel=_DISTRIBUTED,
        help="Beginning of every key by which the ranks find each other, known to no other process",
    )

    weights_cache_override: Path | None = option(None, panel=_REFUSED, help="A flat directory of weight files")

    @property
    def linear_rope_factor(self) -> float | None:
        """Return the factor, as TGI: alone it means `linear`, a kind alone 1."""
        if self.rope_scaling is None:
            return self.rope_factor
        return 1.0 if self.rope_factor is None else self.rope_factor

    @property
    def num_drafted(self) -> int:
        """The longest draft; 0: none are made."""
        if self.speculate is None:
            return 0 if self.speculator is None else _DRAFTED_BY_MODEL
        return self.speculate

    @property
    def most_window_rows(self) -> int:
        """Bound the tokens of a GPU's step with drafts."""
        return _WINDOW_ROWS if self.speculate_max_rows is None else self.speculate_max_rows

    @property
    def place(self) -> tuple[int, int]:
        """Rank and number of ranks."""
        return (self.rank or 0, self.world_size or 1) if self.sharded else (0, 1)


@dataclass(frozen=True, kw_only=True)
class DownloadConfig:
    """`model-server download-weights MODEL_ID`: fill the local hub cache, then end."""

    model_id: str = argument(help="Hub id of the model, or a local folder to check and convert")
    revision: str | None = option(None, env=None, help="Branch, tag or commit")
    trust_remote_code: bool = option(
        False, env=None, negatable=True, help="Also fetch the code files of the repository"
    )
    auto_convert: bool = option(
        False,
        env=None,
        negatable=True,
        help="If a model, or a folder of --lora-adapters, has only pickled weights (.bin, .pt), write safetensors "
        "beside them; a separate process that accepts only tensors reads the pickled files",
    )
    quantize: Quantize | None = option(
        None,
        env=None,
        help="Method with which the model will be served; if it does not fit config.json, it is refused before "
        "weights are downloaded",
    )
    num_stage: int = option(
        1,
        minimum=1,
        help="Stages in which the model will be served; a model that cannot be divided into stages is refused before "
        "weights are downloaded",
    )
    speculator: str | None = option(
        None, env=None, help="Draft model or heads to fetch too, as of `serve`; folders stay where they are"
    )
    lora_adapters: str | None = option(
        None,
        help="LoRA adapters that the model will be served with, as `serve` takes them; those of the hub are fetched "
        "too, their configs and safetensors only",
    )
    extension: Literal[".safetensors"] = option(
        ".safetensors", env=None, help="Kind of the weight files; only .safetensors is served"
    )
    merge_lora: bool = option(
        False,
        env=None,
        negatable=True,
        help="Accepted for compatibility: an adapter is merged into its base model when it is loaded, in memory",
    )
    logger_level: str = option("INFO", env=None, panel=_RUN, help="Least severe log level that is written")
    json_output: bool = option(False, env=None, negatable=True, panel=_RUN, help="One JSON object for each log line")


def threads_are_set() -> bool:
    """Whether the user set the CPU operators' threads."""
    return "OMP_NUM_THREADS" in os.environ


def draws_progress_bars() -> bool:
    """Whether the log's reader draws bars, which move more often than records."""
    return progress_bars.are_drawn(os.environ)


def check(config: ServeConfig) -> None:
    """Refuse what no model can be served with."""
    for flag, is_set, remedy in (
        ("ROPE_SCALING dynamic", config.rope_scaling == "dynamic", "use `linear`, or a kind that config.json can name"),
        ("WEIGHTS_CACHE_OVERRIDE", config.weights_cache_override is not None, "give the directory as the model"),
    ):
        if is_set:
            raise StartupError(f"{flag} is {NOT_SERVED}: {remedy}")
    check_speculation(config.speculator, config.speculate, config.num_stage, StartupError)
    check_slots(config.lora_slots, config.lora_max_rank, config.lora_adapters or config.lora_root, StartupError)
    if config.rope_factor == 0:
        raise StartupError("ROPE_FACTOR must be > 0")
    if config.sharded and (config.rank is None or config.world_size is None):
        raise StartupError("--sharded needs the variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT")
    if config.sharded and config.place[0] >= config.place[1]:
        raise StartupError("RANK must be < WORLD_SIZE. Given: {} and {}".format(*config.place))
    if config.place[1] % config.num_stage:
        raise StartupError(f"WORLD_SIZE {config.place[1]} cannot be divided by NUM_STAGE {config.num_stage}")
    if config.place[1] % config.num_nodes:
        raise StartupError(f"WORLD_SIZE {config.place[1]} cannot be divided by NUM_NODES {config.num_nodes}")
    if config.num_nodes > 1 and len(config.endpoints) != config.num_nodes:
        raise StartupError(f"ENDPOINTS must name one endpoint for each of the {config.num_nodes} nodes")
    if config.cuda_memory_fraction == 0:
        raise StartupError("CUDA_MEMORY_FRACTION must be > 0")
