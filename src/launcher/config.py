"""LauncherConfig: the options as they were given, in TGI's names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher.group_config import GroupConfig
from launcher.http_config import HttpConfig
from launcher.pool_config import PoolConfig
from wire.cli.adapter_options import AdapterOptions
from wire.cli.batch_options import BATCH_FLAGS, BatchOptions
from wire.cli.image_options import IMAGE_FLAGS, ImageOptions
from wire.cli.options import argument, option
from wire.cli.parsing import UsageError
from wire.cli.pooling_options import TEXT_FLAGS, Preset, TextOptions
from wire.cli.replica_options import REPLICA_POLICY, ReplicaPolicy
from wire.cli.request_log_options import REQUEST_LOG_FLAGS, RequestLogOptions
from wire.cli.sampling_options import SamplingOptions
from wire.quantization.methods import Quantize

DEFAULT_MODEL_ID = "bigscience/bloom-560m"
"""TGI's default. Kept because scripts rely on it, warned about because it mostly means a misspelt variable."""

_MODEL_HELP = "Hub id (`org/name`, `org/name-GGUF:Q4_K_M`), folder, GGUF file, or `demo` for the embedded model."
Dtype = Literal["float16", "bfloat16", "float32"]
Attention = Literal[
    "triton", "flash_attn", "torch_varlen", "cpp", "reference",
    "paged", "flashdecoding", "flashdecoding-ipex", "flashinfer",
]  # fmt: skip
KEEP_MODEL_TYPE = ("flash_attn", "torch_varlen")
"""Attention backends whose KV cache is always of the model's type."""

_U32 = 2**32 - 1
_MOST_SHARDS = 1024
_MOST_REPLICAS = 16

_MODEL, _SHARDS = "Model", "Shards"
_REQUEST, _BATCH = "Limits of a request", "Batching"
_RUN = "Operation"
_NOT_YET = "Not served yet (refused at start)"


@dataclass(frozen=True, kw_only=True)
class LauncherConfig(
    HttpConfig,
    GroupConfig,
    PoolConfig,
    ImageOptions,
    AdapterOptions,
    TextOptions,
    SamplingOptions,
    RequestLogOptions,
    BatchOptions,
):
    """Options of the launcher."""

    model_id: str | None = option(
        None, panel=_MODEL,
        help=f"{_MODEL_HELP} Default: {DEFAULT_MODEL_ID}.",
    )  # fmt: skip
    config: Path | None = option(
        None, env="TERCET_CONFIG", panel=_MODEL, is_config_file=True,
        help="YAML file with options by name (`max_batch_size: 8`); the command line and variables win.",
    )  # fmt: skip
    gguf_file: str | None = option(None, panel=_MODEL, help="GGUF file of --model-id's folder or repository to serve.")
    revision: str | None = option(None, panel=_MODEL, help="Branch, tag or commit of a hub model.")
    dtype: Dtype | None = option(
        None, panel=_MODEL,
        help="Type of weights and activations. Default: the checkpoint's. float32 becomes bfloat16 on a GPU; bfloat16 "
        "becomes float16 on a GPU below compute capability 8.0; on a CPU float16 becomes bfloat16 or float32.",
    )  # fmt: skip
    kv_cache_dtype: Literal["fp8_e4m3fn", "fp8_e5m2"] | None = option(
        None, panel=_MODEL,
        help="Type of the numbers in the KV cache; 8-bit types hold twice the tokens of 16-bit ones. Default: the "
        "model's; on a GPU what the checkpoint asks for.",
    )  # fmt: skip
    quantize: Quantize | None = option(
        None, panel=_MODEL,
        help="How plain weights are quantized while they are loaded: fp8, eetq or bitsandbytes to 8 "
        "bits, bitsandbytes-nf4 or bitsandbytes-fp4 to 4. Checkpoints that are "
        "stored quantized need no option.",
    )  # fmt: skip
    trust_remote_code: bool = option(False, panel=_MODEL, help="Allow code from the model's repository.")
    tokenizer_config_path: Path | None = option(
        None, panel=_MODEL, help="A tokenizer_config.json to use instead of the model's (chat template)."
    )
    tool_call_parser: str | None = option(
        None, panel=_MODEL,
        help="Form in which the model writes tool calls: `auto` (as its chat template shows), `tgi` (forced into TGI's "
        "form), or a name from docs/tools-and-reasoning.md. Default: auto.",
    )  # fmt: skip
    reasoning_parser: str | None = option(
        None, panel=_MODEL,
        help="Form of the model's reasoning: `auto`, `none` or a name from docs/tools-and-reasoning.md. Default: auto.",
    )  # fmt: skip
    default_chat_template_kwargs: str | None = option(None, panel=_MODEL, help="JSON: variables of all chat templates.")
    enable_auto_tool_choice: bool = option(False, panel=_MODEL, help="vLLM's: accepted, tools are always served.")
    rope_scaling: Literal["linear", "dynamic"] | None = option(
        None, panel=_MODEL, help="RoPE scaling to use instead of the model's; only `linear` is served."
    )
    rope_factor: float | None = option(
        None, panel=_MODEL, minimum=0.0, help="Divisor of the positions. Default: 1 with --rope-scaling."
    )
    huggingface_hub_cache: Path | None = option(None, panel=_MODEL, help="Directory of the hub cache.")
    attention: Attention | None = option(
        None, panel=_MODEL, help="Attention backend; TGI's names (paged, flash...) mean the best available one."
    )

    sharded: bool | None = option(
        None, panel=_SHARDS, metavar="true|false", help="Require (true) or forbid (false) more than one shard."
    )
    num_shard: int | None = option(
        None, panel=_SHARDS, maximum=_MOST_SHARDS,
        help="Number of shards of each stage. Default: as many of the visible GPUs as divide the attention heads; 1 on "
        "a CPU.",
    )  # fmt: skip
    num_replica: int = option(
        1, panel=_SHARDS, minimum=1, maximum=_MOST_REPLICAS,
        help="Copies of the model behind one router, each on as many GPUs as it has shards.",
    )  # fmt: skip
    replica_policy: ReplicaPolicy = option("prefix", panel=_SHARDS, help=REPLICA_POLICY)
    num_stage: int = option(
        1, panel=_SHARDS, minimum=1, maximum=_MOST_SHARDS,
        help="Stages of a pipeline, each of which holds consecutive layers and has its own shards.",
    )  # fmt: skip
    stage_layers: list[int] = option(
        [], panel=_SHARDS, separator=",", minimum=1, maximum=_U32,
        help="Layers of each stage. Default: such that the largest stage is as small as possible.",
    )  # fmt: skip
    shard_uds_path: str | None = option(
        None, panel=_SHARDS,
        help="Prefix of the shards' sockets; `-<rank>` is appended. Default: in a private directory of this launch.",
    )  # fmt: skip
    cuda_memory_fraction: float = option(
        1.0, panel=_SHARDS, minimum=0.0, maximum=1.0, help="Share of each GPU's memory that may be used."
    )
    cuda_graphs: list[int] = option(
        [], panel=_SHARDS, separator=",", maximum=_U32,
        help="Decode batch sizes to capture as CUDA graphs, 0 for none. Default: 1, 2, 4, then every multiple of 8 up "
        "to 256.",
    )  # fmt: skip
    tgi_wiggle_room: float = option(
        0.95,
        panel=_SHARDS,
        minimum=0.0,
        maximum=1.0,
        hidden=True,
        help="Share of GPU memory that defaults assume to be usable.",
    )
    batch_invariant: bool = option(
        False,
        panel=_SHARDS,
        help="Compute each request with the same bits in any batch. Prompts are then computed whole, prefixes are not "
        "shared, and requests are never preempted; steps are slower. A model or machine that cannot do it is refused.",
    )
    disable_custom_kernels: bool = option(
        False, panel=_SHARDS, help="Let NCCL do every sum over the shards; other kernels are not affected."
    )

    max_concurrent_requests: int = option(Preset(128), panel=_REQUEST, help="Requests at once; of embeddings 512.")
    max_best_of: int = option(2, panel=_REQUEST, help="Largest `best_of`.")
    max_stop_sequences: int = option(4, panel=_REQUEST, help="Largest number of stop texts on TGI's routes.")
    max_top_n_tokens: int = option(5, panel=_REQUEST, maximum=_U32, help="Largest `top_n_tokens` of TGI's routes.")
    max_input_tokens: int | None = option(
        None, panel=_REQUEST, unit="tokens", minimum=1, maximum=_U32, help="Longest prompt. Default: what fits."
    )
    max_input_length: int | None = option(
        None, panel=_REQUEST, unit="tokens", minimum=1, maximum=_U32, help="Deprecated name of --max-input-tokens."
    )
    max_total_tokens: int | None = option(
        None, panel=_REQUEST, unit="tokens", minimum=2, maximum=_U32,
        help="Prompt and generated tokens of one request. Default: what fits.",
    )  # fmt: skip
    max_client_batch_size: int = option(Preset(4), panel=_REQUEST, help="Most prompts of a request; to embed 2048.")
    payload_limit: int = option(
        2_000_000, panel=_REQUEST, unit="bytes", minimum=1,
        help="Largest request body. The default becomes 32 MiB for models that read images.",
    )  # fmt: skip
    enable_prefill_logprobs: bool = option(
        False, panel=_REQUEST, help="Allow requests for the logprobs of prompt tokens."
    )
    disable_grammar_support: bool = option(False, panel=_REQUEST, help="Refuse requests with a grammar.")

    waiting_served_ratio: float = option(
        0.3,
        panel=_BATCH,
        minimum=0.0,
        help="Ratio of waiting to running requests at which a prefill interrupts decoding.",
    )
    max_batch_prefill_tokens: int | None = option(
        None, panel=_BATCH, unit="tokens", maximum=_U32,
        help="Token budget of one prefill. Default: from the model and the device.",
    )  # fmt: skip
    max_step_prefill_tokens: int | None = option(
        None, panel=_BATCH, unit="tokens", minimum=1, maximum=_U32,
        help="Most tokens of prompts that one step computes. Default: 2048 on a GPU, 256 on a CPU; more in a backlog.",
    )  # fmt: skip
    max_batch_total_tokens: int | None = option(
        None, panel=_BATCH, unit="tokens", minimum=1, maximum=_U32,
        help="Token budget of a running batch. Default: what fits.",
    )  # fmt: skip
    kv_cache_memory: int | None = option(
        None, panel=_BATCH, unit="bytes", minimum=1,
        help="Memory of the KV cache of all shards of this machine. Default: on a GPU what is free; on a CPU 25 % of "
        "what is free beside the weights, from 16000 to 2^20 tokens. A CPU's is taken as it is first used.",
    )  # fmt: skip
    max_waiting_tokens: int = option(20, panel=_BATCH, help="Decode steps after which waiting requests join the batch.")
    max_batch_size: int | None = option(None, panel=_BATCH, maximum=_U32, help="Largest number of requests in a batch.")
    state_slots: int | None = option(
        None, panel=_BATCH, minimum=1, maximum=_U32,
        help="States of recurrent layers (Qwen 3.5, Qwen 3 Next) kept at once: one of each running request, the others "
        "saved for prompts that begin alike. Default: half of a GPU's memory beside the weights, a fifth of a CPU's.",
    )  # fmt: skip
    validation_workers: int = option(2, panel=_BATCH, help="Threads of the router that tokenize prompts.")

    json_output: bool = option(False, panel=_RUN, help="Write the log as JSON.")
    log_level: str = option("info", panel=_RUN, help="Lowest level that is logged, or a filter: `warn,router=debug`.")
    verbose: bool = option(
        False, short="v", panel=_RUN,
        help="Show the whole log on a terminal, not only a dozen lines about the start, warnings, errors and a line "
        "for each request. Pipes and JSON always get the whole log.",
    )  # fmt: skip
    graceful_termination_timeout: int = option(
        90, short="g", panel=_RUN, maximum=_U32,
        help="Seconds that running requests have to finish after a signal to stop.",
    )  # fmt: skip
    startup_timeout: int | None = option(
        None, panel=_RUN, minimum=1, maximum=_U32,
        help="Seconds in which everything must be ready, not counting a download. Default: no limit.",
    )  # fmt: skip
    verbose_startup: bool = option(False, panel=_RUN, help="Log where the time of the start-up went.")
    env: bool = option(False, env=None, short="e", panel=_RUN, help="Report the machine and the versions at the start.")
    profile: Path | None = option(
        None, env="TERCET_PROFILE", panel=_RUN,
        help="Folder where every shard writes a Chrome trace of some of its steps, rank-<rank>.json.",
    )  # fmt: skip
    profile_steps: int = option(
        50, env="TERCET_PROFILE_STEPS", panel=_RUN, minimum=1, help="Steps that --profile records."
    )
    otlp_endpoint: str | None = option(
        None, panel=_RUN, help="OpenTelemetry collector (http://host:port, OTLP over gRPC); needs `tercet[trace]`."
    )
    otlp_service_name: str = option("text-generation-inference.router", panel=_RUN, help="Service name in traces.")
    response_store: int = option(0, panel=_RUN, help="Responses of /v1/responses that are kept in memory.")
    usage_stats: Literal["on", "off", "no-stack"] = option("on", panel=_RUN, help="Ignored: nothing is ever sent.")
    speculate: int | None = option(None, panel=_RUN, maximum=15, help="Most tokens drafted for a step.")
    speculate_max_rows: int | None = option(None, panel=_RUN, minimum=2, help="Tokens of a step with drafts on GPUs.")
    speculator: str | None = option(None, panel=_RUN, metavar="ID[@REV]", help="What drafts: a folder or hub id.")
    encoder_cache_tokens: int | None = option(
        None,
        panel=_RUN,
        unit="tokens",
        minimum=1,
        help="Image tokens whose embeddings are kept. Default: two prompts' worth.",
    )
    watermark_gamma: float | None = option(
        None, panel=_RUN, minimum=0.0, maximum=1.0, help="Share of the vocabulary that a watermark favours."
    )
    watermark_delta: float | None = option(None, panel=_RUN, help="Bias that a watermark adds to its share.")

    weights_cache_override: Path | None = option(None, panel=_NOT_YET, help="A flat directory of weight files.")
    ngrok: bool = option(False, panel=_NOT_YET, help="A tunnel to the internet.")
    ngrok_authtoken: str | None = option(None, panel=_NOT_YET, help="Token of the tunnel.")
    ngrok_edge: str | None = option(None, panel=_NOT_YET, help="Edge of the tunnel.")


@dataclass(frozen=True, kw_only=True)
class ServeConfig(LauncherConfig):
    """Options of `launcher serve`."""

    model_id: str | None = argument(
        default=None, env="MODEL_ID", metavar="MODEL", has_flag=True, help=f"{_MODEL_HELP} Required without --models."
    )
    more_models: list[str] = argument(
        default=[], metavar="MODELS", help="More models, at the same address: docs/running-for-others.md."
    )

    def __post_init__(self) -> None:
        """Require a model. Raises UsageError, as the parser does for what is missing."""
        if self.model_id is None and self.models is None:
            meaning = _MODEL_HELP.rstrip(".")
            raise UsageError(f"the following required argument was not provided: <MODEL> ({meaning}), or --models FILE")
        for word in (self.model_id, *self.more_models):
            if word in ("true", "false") and not Path(word).exists():
                raise UsageError(
                    f"unexpected argument '{word}' found: a switch, as --trust-remote-code, takes no value"
                )


SECRETS = frozenset({"api_key", "group_token", "ngrok_authtoken"})
"""Fields that no log shows."""

# Options that a child takes under the same name, as they were asked for.
ROUTER_FLAGS = (
    "max_concurrent_requests", "max_best_of", "max_stop_sequences", "max_top_n_tokens", "max_total_tokens",
    "max_client_batch_size", "payload_limit", "disable_grammar_support", "waiting_served_ratio",
    "max_batch_total_tokens", "max_step_prefill_tokens", "max_waiting_tokens", "max_batch_size", "validation_workers",
    "keys_file", "scheduling_policy", "cors_allow_origin", "served_model_name", "ssl_certfile", "ssl_keyfile",
    "no_playground", "tokenizer_config_path", "revision", "trust_remote_code", "otlp_endpoint", "otlp_service_name",
    "tool_call_parser", "reasoning_parser", "default_chat_template_kwargs", "response_store", "usage_stats",
    *IMAGE_FLAGS, "lora_root", "lora_host_memory", "task", "pooling", *TEXT_FLAGS, "error_format",
    "override_generation_config", "root_path", *REQUEST_LOG_FLAGS, *BATCH_FLAGS,
)  # fmt: skip
ROUTER_VARIABLES = ("log_level", "api_key", "compute_type", "group_token")
"""Secrets are not in argv, which every user of the machine can read."""
SHARD_FLAGS = (
    "revision", "dtype", "quantize", "kv_cache_dtype", "trust_remote_code", "otlp_endpoint", "otlp_service_name",
    "max_batch_total_tokens", "speculate", "encoder_cache_tokens",
)  # fmt: skip
PROFILE_FLAGS = ("profile", "profile_steps")
"""Variables of a shard, set only with `--profile`: TGI's own shard does not know them."""
SHARD_VARIABLES = (
    "master_addr", "cuda_memory_fraction", "max_total_tokens", "max_batch_size", "batch_invariant",
    "disable_custom_kernels", "lora_adapters", "lora_root", "lora_slots", "lora_max_rank", "speculator", "num_stage",
    "stage_layers", "watermark_gamma", "watermark_delta", "attention", "speculate_max_rows", "pooling",
    "state_slots",
)  # fmt: skip
GROUP_TLS = ("group_tls_cert", "group_tls_key", "group_tls_ca")
"""Variables of the shards and the router of a group of nodes."""
DOWNLOAD_FLAGS = ("revision", "trust_remote_code", "quantize", "lora_adapters", "speculator")


def input_limit(config: LauncherConfig) -> int | None:
    """`--max-input-tokens` under either of its names."""
    return config.max_input_tokens if config.max_input_tokens is not None else config.max_input_length
