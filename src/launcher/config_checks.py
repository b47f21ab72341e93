"""The combinations of the launcher's options that are refused."""

from __future__ import annotations

import os

from launcher.config import DEFAULT_MODEL_ID, KEEP_MODEL_TYPE, LauncherConfig, input_limit
from launcher.errors import ArgumentValidation
from launcher.group_config import check_group, num_nodes
from launcher.http_config import check_http, http_port
from launcher.pool_config import check_pool
from wire import tracing
from wire.adapters import check_adapters, check_lora_root, check_slots
from wire.cli.batch_options import check_batches
from wire.cli.pooling_options import check_prompts
from wire.cli.request_log_options import check_request_log
from wire.cli.sampling_options import check_sampling
from wire.speculation.options import check_speculation
from wire.text.chat_options import check_chat_options


def check(config: LauncherConfig) -> None:
    """Refuse what is wrong whatever the machine and the model.

    Raises:
        ArgumentValidation: Names the option and what to give instead.
    """
    if config.model_id == "":
        raise ArgumentValidation("`--model-id` is empty")
    check_group(config)
    check_pool(config)
    check_http(config)
    _check_served(config)
    check_prompts(config, ArgumentValidation)
    check_request_log(config, ArgumentValidation)
    check_batches(config, ArgumentValidation)
    try:
        tracing.check(config.otlp_endpoint)
    except tracing.TracingError as error:
        raise ArgumentValidation(str(error)) from None
    if config.sharded and config.num_shard is not None and config.num_shard <= 1:
        raise ArgumentValidation(f"`--sharded true` needs `--num-shard` > 1, given {config.num_shard}")
    parsers = config.tool_call_parser, config.reasoning_parser
    check_chat_options(*parsers, config.default_chat_template_kwargs, ArgumentValidation)
    check_sampling(config, ArgumentValidation)
    check_speculation(config.speculator, config.speculate, config.num_stage, ArgumentValidation)
    if config.num_shard is not None and config.num_shard * config.num_stage % num_nodes(config):
        raise ArgumentValidation(
            f"`--num-shard` {config.num_shard} cannot be divided among {num_nodes(config)} nodes: give a multiple of "
            "`--nnodes`, or leave it out"
        )
    if config.sharded is False and num_nodes(config) > 1:
        raise ArgumentValidation("`--sharded false` and several nodes contradict each other: leave one out")
    _check_replicas(config)
    if config.num_shard is not None and config.num_shard < 1:
        raise ArgumentValidation("`--num-shard` cannot be < 1")
    if config.max_input_tokens is not None and config.max_input_length is not None:
        raise ArgumentValidation(
            f"both `--max-input-tokens` ({config.max_input_tokens}) and `--max-input-length` "
            f"({config.max_input_length}) are set; use `--max-input-tokens`, `--max-input-length` is deprecated"
        )
    if config.validation_workers == 0:
        raise ArgumentValidation("`--validation-workers` must be > 0")
    for flag, count in (
        ("--max-concurrent-requests", config.max_concurrent_requests),
        ("--max-batch-size", config.max_batch_size),
        ("--max-client-batch-size", config.max_client_batch_size),
        ("--max-best-of", config.max_best_of),
        ("--max-batch-prefill-tokens", config.max_batch_prefill_tokens),
    ):
        if count == 0:
            raise ArgumentValidation(f"`{flag}` must be > 0")
    if config.kv_cache_dtype is not None and config.attention in KEEP_MODEL_TYPE:
        raise ArgumentValidation(
            f"--attention {config.attention} keeps its cache in the model's type; "
            "leave --kv-cache-dtype out or use triton"
        )
    if config.rope_factor == 0:
        raise ArgumentValidation("`--rope-factor` must be > 0")
    if config.cuda_memory_fraction == 0:
        raise ArgumentValidation("`--cuda-memory-fraction` must be > 0")
    if config.tokenizer_config_path is not None and not config.tokenizer_config_path.is_file():
        raise ArgumentValidation(f"`--tokenizer-config-path` {config.tokenizer_config_path} is not a file")
    port = http_port(config)[1]
    if config.master_port is not None and config.master_port in (port, config.prometheus_port) and config.master_port:
        raise ArgumentValidation(f"`--master-port` {config.master_port} is asked for twice; choose another")
    _check_token_limits(config)


def _check_token_limits(config: LauncherConfig) -> None:
    longest_input, total = input_limit(config), config.max_total_tokens
    prefill, capacity = config.max_batch_prefill_tokens, config.max_batch_total_tokens
    if longest_input is not None and total is not None and longest_input >= total:
        raise ArgumentValidation(
            f"`--max-input-tokens` must be < `--max-total-tokens`. Given: {longest_input} and {total}"
        )
    if capacity is not None and total is not None and total > capacity:
        raise ArgumentValidation(
            f"`--max-total-tokens` must be <= `--max-batch-total-tokens`. Given: {total} and {capacity}"
        )
    if capacity is not None and longest_input is not None and longest_input >= capacity:
        raise ArgumentValidation(
            f"`--max-input-tokens` must be < `--max-batch-total-tokens`. Given: {longest_input} and {capacity}"
        )
    if capacity is not None and prefill is not None and prefill > capacity:
        raise ArgumentValidation(
            f"`--max-batch-prefill-tokens` must be <= `--max-batch-total-tokens`. Given: {prefill} and {capacity}"
        )


def _check_served(config: LauncherConfig) -> None:
    taken = (config.model_id or DEFAULT_MODEL_ID, *config.served_model_name)
    check_adapters(config.lora_adapters, ArgumentValidation, taken=taken)
    check_lora_root(
        config.lora_root, config.api_key or config.keys_file, ArgumentValidation, leads=not config.node_rank
    )
    adapters = config.lora_adapters or config.lora_root
    check_slots(config.lora_slots, config.lora_max_rank, adapters, ArgumentValidation)
    if config.quantize == "exl2" and (config.num_shard or 1) > 1:
        raise ArgumentValidation("Sharding is currently not supported with `exl2` quantization")
    for flag, is_set, remedy in (
        ("--rope-scaling dynamic", config.rope_scaling == "dynamic", "use `linear`, or a kind of config.json"),
        ("--weights-cache-override", not _is_the_model(config), "give the directory as `--model-id`"),
        ("--ngrok", config.ngrok, "put a tunnel of your choice in front of `--port`"),
    ):
        if is_set:
            raise ArgumentValidation(f"`{flag}` is not served yet: {remedy}")


def _is_the_model(config: LauncherConfig) -> bool:
    """Whether the flat directory of weights is not given or is the model's own folder."""
    override = config.weights_cache_override
    if override is None or config.model_id is None:
        return override is None
    return os.path.realpath(override) == os.path.realpath(config.model_id)


def _check_replicas(config: LauncherConfig) -> None:
    """Refuse what holds for one copy of a model."""
    if config.num_replica == 1:
        if config.replica_policy != "prefix":
            raise ArgumentValidation("`--replica-policy` is for `--num-replica`: give that too, or leave it out")
        return
    for flag, is_given in (
        ("--nnodes", num_nodes(config) > 1),
        ("--lora-root", config.lora_root is not None),
        ("--master-port", config.master_port is not None),
        ("--models", config.models is not None),
    ):
        if is_given:
            raise ArgumentValidation(f"`--num-replica` and `{flag}` exclude each other")
