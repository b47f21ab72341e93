"""What the model server was asked to do. The environment is read here and nowhere else in this package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wire.options import argument, option

DtypeName = Literal["float16", "bfloat16", "float32"]


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """`model-server serve MODEL_ID`: one shard."""

    model_id: str = argument(help="Hub id, local folder, or `demo` for the embedded model")
    revision: str | None = option(None, help="Branch, tag or commit of a hub model")
    sharded: bool = option(
        False,
        env=None,
        help="This shard is one of WORLD_SIZE ranks (RANK, MASTER_ADDR and MASTER_PORT are then needed)",
    )
    dtype: DtypeName | None = option(
        None, help="Type of weights and activations; unset: chosen from the device and the model"
    )
    trust_remote_code: bool = option(
        False, help="Allow code from the model repository; models that the native runner serves never need it"
    )
    uds_path: Path = option(
        Path("/tmp/text-generation-server"), env=None, help="Prefix of the unix socket; -<rank> is appended"
    )
    logger_level: str = option("INFO", env=None, help="Least severe log level that is written")
    json_output: bool = option(False, help="One JSON object for each log line")
    otlp_endpoint: str | None = option(
        None, help="OpenTelemetry collector (http://host:port, OTLP over gRPC); needs the extra `trace`"
    )
    otlp_service_name: str = option("text-generation-inference.server", help="Service name in traces")
    max_input_tokens: int | None = option(None, help="Longest prompt the router will send, in tokens")
    max_batch_total_tokens: int | None = option(
        None, help="Upper bound of the KV cache in tokens; unset: measured (GPU) or 16000 and up (CPU)"
    )
    cuda_memory_fraction: float = option(1.0, help="Share of the device's memory that may be used")
    cuda_graphs: list[int] = option(
        [], separator=",", help="Decode batch sizes to capture as CUDA graphs, 0 for none; unset: 1 to 256"
    )
    max_batch_size: int | None = option(
        None, env="MAX_BATCH_SIZE", help="Most requests that the router decodes at once; larger graphs are left out"
    )
    request_logprobs: bool = option(False, help="Compute prompt logprobs when a request asks for them")
    attention: str | None = option(
        None,
        help="Attention backend: triton, flash_attn, torch_varlen, native or reference; TGI's names stand for the best "
        "one that can serve the model",
    )
    prefix_caching: bool = option(
        True, help="Let requests share the KV cache of a common beginning; the router keeps track of it"
    )
    prefill_chunking: bool = option(True, help="Compute long prompts in several steps, beside running requests")
    disable_custom_kernels: bool = option(
        False, help="Leave every sum over the shards to NCCL, also where the GPUs could read each other's memory"
    )
    profile: Path | None = option(
        None, env="TERCET_PROFILE", help="Folder for a Chrome trace of some steps, rank-<rank>.json"
    )
    profile_steps: int = option(50, env="TERCET_PROFILE_STEPS", minimum=1, help="Steps that --profile records")
    watermark_gamma: float = option(0.5, help="Share of the vocabulary that a watermark favours")
    watermark_delta: float = option(2.0, help="Bias that a watermark adds to the logits of its share")
    rank: int = option(0, help="Rank of this shard")
    world_size: int = option(1, help="Number of shards")
    master_addr: str = option("localhost", help="Address where the ranks find each other")
    master_port: int = option(29500, help="Port where the ranks find each other")
    dist_timeout: float = option(
        120.0, env="TGI_DIST_TIMEOUT", minimum=0.1, help="Seconds that the ranks wait for each other at the start"
    )


@dataclass(frozen=True, kw_only=True)
class DownloadConfig:
    """`model-server download-weights MODEL_ID`: fill the local hub cache, then end."""

    model_id: str = argument(help="Hub id of the model, or a local folder to check and convert")
    revision: str | None = option(None, help="Branch, tag or commit")
    trust_remote_code: bool = option(False, help="Also fetch the code files of the repository")
    auto_convert: bool = option(
        False,
        env=None,
        negatable=True,
        help="Where a model has only pickled weights (.bin, .pt), write safetensors beside them: in a process of its "
        "own that takes nothing but tensors",
    )
    extension: Literal[".safetensors"] = option(
        ".safetensors", env=None, help="Kind of the weight files; no other is served"
    )
    logger_level: str = option("INFO", env=None, help="Least severe log level that is written")
    json_output: bool = option(False, help="One JSON object for each log line")
