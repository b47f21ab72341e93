"""RouterConfig: the given options; `router.limits.ServingLimits` is what holds."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from router.errors import ArgumentValidation
from wire import tls
from wire.cli.batch_options import BatchOptions, check_batches
from wire.cli.image_options import ImageOptions
from wire.cli.options import option
from wire.cli.pooling_options import Preset, TextOptions, check_prompts
from wire.cli.replica_options import REPLICA_POLICY, ReplicaPolicy
from wire.cli.request_log_options import RequestLogOptions, check_request_log
from wire.cli.root_path_options import RootPathOptions, check_root_path
from wire.cli.sampling_options import SamplingOptions
from wire.cli.uds_options import UdsOptions, check_uds
from wire.keys import SCHEDULING_POLICY, SchedulingPolicy, check_keys
from wire.tracing import TracingError
from wire.tracing import check as check_tracing

TGI_VERSION = "3.3.7"
"""The TGI level that we are compatible with; connectors gate features on it."""

DEFAULT_PAYLOAD_LIMIT = 2_000_000
IMAGE_PAYLOAD_LIMIT = 32 << 20
"""Of models that read images, where no other limit is asked for."""
_U32 = 2**32 - 1
"""Largest value of the options that are u32 in TGI."""
_LIMITS = "Limits of a request"
_BATCHING = "Batching"
_HTTP = "HTTP"
_MODEL = "Model"
_OPERATION = "Operation"
_UNSERVED = "Accepted for compatibility"


@dataclass(frozen=True, kw_only=True)
class RouterConfig(
    ImageOptions, TextOptions, SamplingOptions, RequestLogOptions, UdsOptions, RootPathOptions, BatchOptions
):
    """Options of the router."""

    max_concurrent_requests: int = option(
        Preset(128), panel=_LIMITS, minimum=1,
        help="Requests served or queued at once; more are refused with 429. For embeddings and scores 512 if unset.",
    )  # fmt: skip
    max_best_of: int = option(2, panel=_LIMITS, help="Largest `best_of`; 1 turns the parameter off.")
    max_stop_sequences: int = option(4, panel=_LIMITS, help="Largest number of `stop` texts on TGI's routes.")
    max_top_n_tokens: int = option(5, panel=_LIMITS, maximum=_U32, help="Largest `top_n_tokens` of TGI's routes.")
    max_input_tokens: int | None = option(
        None,
        unit="tokens",
        panel=_LIMITS,
        minimum=1,
        maximum=_U32,
        help="Longest prompt in tokens. Default: what fits, from the warm-up.",
    )
    max_total_tokens: int | None = option(
        None,
        unit="tokens",
        panel=_LIMITS,
        minimum=2,
        maximum=_U32,
        help="Prompt and generated tokens of one request. Default: what fits, from the warm-up.",
    )
    max_client_batch_size: int = option(
        Preset(4), panel=_LIMITS,
        help="Largest number of prompts in a request. For embeddings and scores 2048 texts if unset.",
    )  # fmt: skip
    payload_limit: int = option(
        DEFAULT_PAYLOAD_LIMIT, panel=_LIMITS, unit="bytes", minimum=1,
        help="Largest request body. The default becomes 32 MiB for models that read images.",
    )  # fmt: skip
    max_stop_sequence_bytes: int = option(
        4096, panel=_LIMITS, unit="bytes", help="Most bytes of all `stop` texts of a request together."
    )
    max_request_seconds: float | None = option(
        None,
        panel=_LIMITS,
        help="Seconds after which a request that has not ended fails. Default: no limit.",
        minimum=0.001,
        maximum=_U32,
    )
    disable_grammar_support: bool = option(False, panel=_LIMITS, help="Refuse requests with a grammar.")
    request_logprobs: bool = option(
        False, panel=_LIMITS, help="The model server computes prompt logprobs; the launcher sets the variable."
    )

    waiting_served_ratio: float = option(
        1.2,
        panel=_BATCHING,
        help="Ratio of waiting to running requests at which a prefill interrupts decoding.",
        minimum=0,
    )
    max_batch_prefill_tokens: int = option(
        4096, panel=_BATCHING, unit="tokens", minimum=1, maximum=_U32, help="Token budget of one prefill."
    )
    max_step_prefill_tokens: int | None = option(
        None, panel=_BATCHING, unit="tokens", minimum=1, maximum=_U32,
        help="Most tokens of prompts that one step computes; longer prompts are computed in several. Default: 2048 on "
        "a GPU, 256 on a CPU; more in a backlog.",
    )  # fmt: skip
    min_batch_prefill_tokens: int | None = option(
        None,
        unit="tokens",
        panel=_BATCHING,
        help="Lowest prefill budget to which the start may go down if memory is short. Default: no reduction.",
        minimum=1,
        maximum=_U32,
    )
    max_batch_total_tokens: int | None = option(
        None,
        unit="tokens",
        panel=_BATCHING,
        minimum=1,
        maximum=_U32,
        help="Token budget of a running batch. Default: what fits, from the warm-up.",
    )
    max_waiting_tokens: int = option(
        20, panel=_BATCHING, help="Decode steps after which waiting requests join the batch."
    )
    max_batch_size: int | None = option(
        None, panel=_BATCHING, maximum=_U32, help="Largest number of requests in a batch."
    )
    max_step_seconds: float = option(
        60.0,
        panel=_BATCHING,
        help="Seconds after which a step that has not ended counts as stuck; the server then exits.",
        minimum=0.1,
        maximum=_U32,
    )

    hostname: str = option("0.0.0.0", panel=_HTTP, help="IP address to listen on.")
    port: int = option(3000, short="p", panel=_HTTP, help="Port to listen on.", maximum=65535)
    prometheus_port: int | None = option(
        None, panel=_HTTP, help="A separate port for /metrics; opened only if given.", maximum=65535
    )
    api_key: str | None = option(None, panel=_HTTP, header=True, help="Bearer token that every POST route requires.")
    keys_file: Path | None = option(
        None, panel=_HTTP,
        help="YAML file of API keys with their scopes, limits and shares, instead of --api-key; it may change while "
        "the server runs.",
    )  # fmt: skip
    scheduling_policy: SchedulingPolicy | None = option(None, panel=_HTTP, help=SCHEDULING_POLICY)
    cors_allow_origin: tuple[str, ...] = option(
        (), panel=_HTTP, header=True, help="An allowed origin; repeatable. Default: any."
    )
    max_connections: int = option(
        4096, panel=_HTTP, help="Most open connections; others are closed with 503.", minimum=1
    )
    head_timeout_seconds: float = option(
        10.0, panel=_HTTP, help="Seconds in which the head of a request must arrive.", minimum=0.1, maximum=_U32
    )
    body_timeout_seconds: float = option(
        60.0, panel=_HTTP, help="Seconds in which the body of a request must arrive.", minimum=0.1, maximum=_U32
    )
    keep_alive_seconds: int = option(
        75, panel=_HTTP, help="Seconds for which an idle connection is kept open.", minimum=1, maximum=_U32
    )
    stalled_client_seconds: float = option(
        30.0,
        panel=_HTTP,
        help="Seconds after which the connection of a client that reads nothing is closed.",
        minimum=0.1,
        maximum=_U32,
    )
    max_unread_bytes: int = option(
        1_048_576,
        unit="bytes",
        panel=_HTTP,
        help="Bytes of tokens that may wait for a slow client; beyond them its stream ends.",
        minimum=1,
    )

    ssl_certfile: str | None = option(
        None, panel=_HTTP, help="PEM file with a certificate (and its chain): the port then speaks HTTPS."
    )
    ssl_keyfile: str | None = option(
        None, panel=_HTTP, help="PEM file with the certificate's key. Default: the key in --ssl-certfile."
    )
    no_playground: bool = option(
        False, panel=_HTTP, help="Answer browsers at / as any other client, without the page to try the model."
    )
    error_format: Literal["auto", "tgi"] = option(
        "auto", panel=_HTTP,
        help="Form of errors on OpenAI's routes: `auto` is OpenAI's, with status 400 for what a request does wrong; "
        "`tgi` is TGI's, with 422. Anthropic's routes and /v1/responses have their own in either case.",
    )  # fmt: skip
    front_uds: Path | None = option(
        None, panel=_HTTP, hidden=True,
        help="Socket of the front of several models, which holds keys to their limits of requests; the launcher sets "
        "the variable.",
    )  # fmt: skip
    kserve_api: bool = option(False, panel=_HTTP, help="Serve KServe's v2 routes below /v2 too.")
    aip_http_port: int | None = option(
        None, panel=_HTTP, help="Vertex AI's name for the port; overrides --port.", maximum=65535
    )
    aip_predict_route: str | None = option(None, panel=_HTTP, help="A second path for /vertex, set by Vertex AI.")
    aip_health_route: str | None = option(None, panel=_HTTP, help="A second path for /health, set by Vertex AI.")

    master_shard_uds_path: str = option(
        "/tmp/text-generation-server-0", panel=_MODEL, help="Socket of the shard with rank 0."
    )
    replica_uds_paths: list[str] = option(
        [], panel=_MODEL, separator=",", hidden=True,
        help="Sockets of the shards with rank 0 of further replicas of the model.",
    )  # fmt: skip
    replica_policy: ReplicaPolicy = option("prefix", panel=_MODEL, help=REPLICA_POLICY)
    group_token: str | None = option(
        None, panel=_MODEL, header=True, help="Secret of a group of nodes, for the shards of other nodes."
    )
    group_tls_cert: Path | None = option(
        None, panel=_MODEL, help="PEM file with this node's certificate, for TLS between the nodes of a group."
    )
    group_tls_key: Path | None = option(None, panel=_MODEL, help="PEM file with the key of --group-tls-cert.")
    group_tls_ca: Path | None = option(
        None, panel=_MODEL, help="PEM file with the certificate of the authority that signed those of all nodes."
    )
    lease_seconds: int | None = option(
        None, panel=_MODEL, minimum=1, maximum=_U32,
        help="Seconds for which another node of a group may be silent; /health fails after half of them.",
    )  # fmt: skip
    tokenizer_name: str = option(
        "bigscience/bloom",
        panel=_MODEL,
        help="Model: a directory, `demo`, or a hub id whose files are in the local cache.",
    )
    served_model_name: tuple[str, ...] = option(
        (), panel=_MODEL,
        help="A name of the model in OpenAI's API; repeatable, the first is used in answers. Default: the model's id.",
    )  # fmt: skip
    tokenizer_config_path: str | None = option(
        None, panel=_MODEL, help="A tokenizer_config.json to use instead of the model's."
    )
    chat_template: str | None = option(
        None, panel=_MODEL, help="A file with a chat template to use instead of the model's."
    )
    tool_call_parser: str = option(
        "auto", panel=_MODEL,
        help="Form in which the model writes tool calls: `auto` (as its chat template shows), `tgi` (forced into TGI's "
        "form), or a name from docs/tools-and-reasoning.md.",
    )  # fmt: skip
    reasoning_parser: str = option(
        "auto", panel=_MODEL,
        help="Form of the model's reasoning: `auto`, `none` (it stays in the text), or a name from "
        "docs/tools-and-reasoning.md.",
    )  # fmt: skip
    default_chat_template_kwargs: str | None = option(
        None, panel=_MODEL,
        help="Variables of every chat's template, a JSON object; a request's `chat_template_kwargs` win.",
    )  # fmt: skip
    lora_root: str | None = option(
        None, panel=_MODEL,
        help="Folder of LoRA adapters: its sub-folders can be asked for, and others loaded and unloaded by "
        "/v1/load_lora_adapter and /v1/unload_lora_adapter. Needs --api-key or --keys-file.",
    )  # fmt: skip
    lora_host_memory: float = option(
        4.0, panel=_MODEL, minimum=1e-6,
        help="GiB of memory of each shard for adapters of --lora-root; those used last stay.",
    )  # fmt: skip
    revision: str | None = option(None, panel=_MODEL, help="Hub revision: a branch, tag or commit.")
    trust_remote_code: bool = option(False, panel=_UNSERVED, help="The router never runs a model's code.")
    validation_workers: int = option(2, panel=_MODEL, help="Threads that tokenize prompts.")

    response_store: int = option(
        0, panel=_OPERATION, maximum=_U32,
        help="Responses of /v1/responses that are kept in memory, those used last and 64 MiB of them at most, for "
        "`previous_response_id` and GET; 0: none.",
    )  # fmt: skip

    json_output: bool = option(False, panel=_OPERATION, help="Write the log as JSON.")
    log_level: str = option(
        "info", panel=_OPERATION, help="Lowest level that is logged, or a filter: `warn,router=debug`."
    )
    compute_type: str = option(
        "gpu+optimized", panel=_OPERATION, header=True, help="Value of the response header x-compute-type."
    )
    graceful_termination_timeout: int = option(
        90, panel=_OPERATION, maximum=_U32, help="Seconds that running requests have to finish after a signal to stop."
    )
    otlp_endpoint: str | None = option(
        None,
        panel=_OPERATION,
        help="OpenTelemetry collector (http://host:port, OTLP/gRPC); needs `tercet[trace]`.",
    )
    otlp_service_name: str = option(
        "text-generation-inference.router", panel=_OPERATION, help="Service name in traces."
    )
    usage_stats: Literal["on", "no-stack", "off"] = option(
        "on", panel=_UNSERVED, help="Accepted and ignored: nothing is ever sent."
    )
    ngrok: bool = option(False, panel=_UNSERVED, help="Not served.")
    ngrok_authtoken: str | None = option(None, panel=_UNSERVED, help="Not served.")
    ngrok_edge: str | None = option(None, panel=_UNSERVED, help="Not served.")

    @property
    def limits_of_keys(self) -> Literal["all", "model"]:
        """Return which limits of API keys hold here."""
        return "all" if self.front_uds is None else "model"

    @property
    def listening_port(self) -> int:
        return self.port if self.aip_http_port is None else self.aip_http_port

    @property
    def has_priorities(self) -> bool:
        """Whether requests may say whose turn it is."""
        policy = self.scheduling_policy
        return self.keys_file is not None if policy is None else policy == "priority"


@dataclass(frozen=True)
class ImageLabels:
    """What the container image was built from, if in one."""

    git_sha: str | None
    docker_label: str | None


def image_labels() -> ImageLabels:
    """Read the image's variables."""
    return ImageLabels(os.environ.get("GIT_SHA") or None, os.environ.get("DOCKER_LABEL") or None)


def with_image_payload(config: RouterConfig) -> RouterConfig:
    """Make room for images in bodies, unless a limit was given."""
    if config.payload_limit != DEFAULT_PAYLOAD_LIMIT:
        return config
    return replace(config, payload_limit=IMAGE_PAYLOAD_LIMIT)


def check(config: RouterConfig) -> None:
    """Refuse what is known to be wrong before loading."""
    for flag, value in (
        ("--validation-workers", config.validation_workers),
        ("--max-batch-size", config.max_batch_size),
        ("--max-best-of", config.max_best_of),
        ("--max-client-batch-size", config.max_client_batch_size),
    ):
        if value == 0:
            raise ArgumentValidation(f"`{flag}` must be > 0")
    _check_token_limits(config)
    check_prompts(config, ArgumentValidation)
    check_request_log(config, ArgumentValidation)
    check_batches(config, ArgumentValidation)
    try:
        check_tracing(config.otlp_endpoint)
    except TracingError as error:
        raise ArgumentValidation(str(error)) from None
    try:
        tls.check(config.ssl_certfile, config.ssl_keyfile)
    except tls.TlsError as error:
        raise ArgumentValidation(str(error)) from None
    check_uds(config, config.ssl_certfile, ArgumentValidation)
    check_root_path(config, ArgumentValidation)
    if "" in config.served_model_name:
        raise ArgumentValidation("`--served-model-name` is empty")
    if config.image_hosts and config.image_fetch == "off":
        raise ArgumentValidation("`--image-hosts` has no effect with `--image-fetch off`: leave one of them out")
    if config.ngrok or config.ngrok_authtoken or config.ngrok_edge:
        raise ArgumentValidation("ngrok tunnels are not served; remove `--ngrok*`")
    check_keys(config.keys_file, config.api_key, ArgumentValidation)
    if config.lora_root is not None and config.api_key is None and config.keys_file is None:
        raise ArgumentValidation("`--lora-root` lets clients load adapters: it needs `--api-key` or `--keys-file`")
    for flag, route in (
        ("--aip-predict-route", config.aip_predict_route),
        ("--aip-health-route", config.aip_health_route),
    ):
        if route is not None and (not route.startswith("/") or set(route) & set("{}?#")):
            raise ArgumentValidation(f"`{flag}` {route} is not a path")
    for flag, path in (
        ("--tokenizer-config-path", config.tokenizer_config_path),
        ("--chat-template", config.chat_template),
    ):
        if path is not None and not Path(path).is_file():
            raise ArgumentValidation(f"`{flag}` {path} is not a file")


def _check_token_limits(config: RouterConfig) -> None:
    longest_input, total, capacity = config.max_input_tokens, config.max_total_tokens, config.max_batch_total_tokens
    prefill = config.max_batch_prefill_tokens
    if longest_input is not None and total is not None and longest_input >= total:
        raise ArgumentValidation(
            f"`--max-input-tokens` must be < `--max-total-tokens`. Given: {longest_input} and {total}"
        )
    if capacity is not None and prefill > capacity:
        raise ArgumentValidation(
            f"`--max-batch-prefill-tokens` must be <= `--max-batch-total-tokens`. Given: {prefill} and {capacity}"
        )
    if capacity is not None and total is not None and total > capacity:
        raise ArgumentValidation(
            f"`--max-total-tokens` must be <= `--max-batch-total-tokens`. Given: {total} and {capacity}"
        )
