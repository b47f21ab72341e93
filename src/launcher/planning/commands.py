"""Pure: LaunchPlan → argv and environment of each child, as TGI's launcher builds them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from launcher.config import SECRETS, LauncherConfig
from launcher.planning.model_info import with_hub_cache
from launcher.planning.plan import LaunchPlan
from wire.log.log_line import level_from_filter

Environment = Mapping[str, str]

_LEAST_PREFILL = 256
"""A prefill budget that nobody has asked for may be halved down to this where memory is short."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """How to start one child, and how to know that it is ready."""

    name: str
    """`download`, `shard` or `router`."""
    argv: tuple[str, ...]
    env: Environment
    rank: int | None = None
    socket: str | None = None
    """Ready when gRPC Health is answered here."""
    http: tuple[str, int] | None = None
    """Ready when GET /health is answered with 200 here."""
    private_files: bool = False
    """Files that it creates are for its user alone (the mode of a socket follows from this)."""

    @property
    def title(self) -> str:
        return self.name if self.rank is None else f"{self.name} {self.rank}"


def python(module: str) -> tuple[str, ...]:
    """The launcher's own interpreter, so that a stray PATH cannot mix installations.

    `-P`: a `router.py` in the directory that we happen to be started from is not our router.
    """
    return (sys.executable, "-P", "-m", module)


def download(config: LauncherConfig, model_id: str, environ: Environment) -> Command:
    argv = [*python("model_server"), "download-weights", model_id]
    argv += ["--logger-level", _logger_level(config), "--json-output"]
    argv += _if_set("--revision", config.revision) + _switch("--trust-remote-code", config.trust_remote_code)
    env = _model_server_environment(config, environ) | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return Command(name="download", argv=tuple(argv), env=env)


def shard(plan: LaunchPlan, rank: int, environ: Environment) -> Command:
    asked, ends = plan.asked, plan.endpoints
    argv = [*python("model_server"), "serve", plan.model_id]
    argv += ["--uds-path", ends.uds_prefix, "--logger-level", _logger_level(asked), "--json-output"]
    argv += _switch("--trust-remote-code", asked.trust_remote_code)
    argv += _switch("--sharded", plan.num_shard > 1)
    argv += _if_set("--dtype", asked.dtype) + _if_set("--revision", asked.revision)
    argv += [*_if_set("--otlp-endpoint", asked.otlp_endpoint), "--otlp-service-name", asked.otlp_service_name]
    argv += _if_set("--max-input-tokens", plan.max_input_tokens)
    argv += _if_set("--max-batch-total-tokens", asked.max_batch_total_tokens)
    if asked.profile is not None:
        argv += ["--profile", str(asked.profile), "--profile-steps", str(asked.profile_steps)]
    env = _model_server_environment(asked, environ)
    env |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(plan.num_shard),
        "MASTER_ADDR": asked.master_addr,
        "MASTER_PORT": str(ends.master_port),
        "CUDA_MEMORY_FRACTION": _number(asked.cuda_memory_fraction),
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
        "SAFETENSORS_FAST_GPU": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    graphs = [size for size in asked.cuda_graphs if size > 0]
    has_rope = asked.rope_scaling is not None or asked.rope_factor is not None
    optional = {
        "MAX_TOTAL_TOKENS": _text(asked.max_total_tokens),
        "MAX_BATCH_SIZE": _text(asked.max_batch_size),
        "REQUEST_LOGPROBS": "1" if asked.enable_prefill_logprobs else None,
        "CUDA_GRAPHS": (",".join(map(str, graphs)) or "0") if asked.cuda_graphs else None,
        "DISABLE_CUSTOM_KERNELS": "True" if asked.disable_custom_kernels else None,
        "WATERMARK_GAMMA": _text(asked.watermark_gamma),
        "WATERMARK_DELTA": _text(asked.watermark_delta),
        "ATTENTION": asked.attention,
        "ROPE_SCALING": (asked.rope_scaling or "linear") if has_rope else None,
        "ROPE_FACTOR": _number(asked.rope_factor or 1.0) if has_rope else None,
    }
    env |= {name: value for name, value in optional.items() if value is not None}
    return Command(
        name="shard", rank=rank, argv=tuple(argv), env=env, socket=f"{ends.uds_prefix}-{rank}", private_files=True
    )


def router(plan: LaunchPlan, environ: Environment) -> Command:
    asked, ends = plan.asked, plan.endpoints
    argv = [
        *python("router"),
        "--max-client-batch-size", str(asked.max_client_batch_size),
        "--max-concurrent-requests", str(asked.max_concurrent_requests),
        "--max-best-of", str(asked.max_best_of),
        "--max-stop-sequences", str(asked.max_stop_sequences),
        "--max-top-n-tokens", str(asked.max_top_n_tokens),
        "--max-batch-prefill-tokens", str(plan.max_batch_prefill_tokens),
        "--waiting-served-ratio", _number(asked.waiting_served_ratio),
        "--max-waiting-tokens", str(asked.max_waiting_tokens),
        "--validation-workers", str(asked.validation_workers),
        "--hostname", ends.hostname,
        "--port", str(ends.port),
        "--master-shard-uds-path", f"{ends.uds_prefix}-0",
        "--tokenizer-name", plan.model_id,
        "--payload-limit", str(asked.payload_limit),
    ]  # fmt: skip
    # Opened only if asked for; 0 means none.
    argv += _if_set("--prometheus-port", asked.prometheus_port or None)
    argv += _if_set("--max-input-tokens", plan.max_input_tokens)
    argv += _if_set("--max-total-tokens", asked.max_total_tokens)
    argv += ["--usage-stats", asked.usage_stats]
    argv += _switch("--disable-grammar-support", asked.disable_grammar_support)
    argv += _if_set("--tokenizer-config-path", asked.tokenizer_config_path)
    argv += _if_set("--max-batch-total-tokens", asked.max_batch_total_tokens)
    argv += _if_set("--max-batch-size", asked.max_batch_size)
    argv += _if_set("--revision", asked.revision)
    argv += _switch("--trust-remote-code", asked.trust_remote_code)
    # Always JSON to the launcher, which writes the record again in the form that was asked for.
    argv += ["--json-output"]
    argv += _if_set("--otlp-endpoint", asked.otlp_endpoint)
    argv += ["--otlp-service-name", asked.otlp_service_name]
    for origin in asked.cors_allow_origin:
        argv += ["--cors-allow-origin", origin]
    # The ports that argv names, or does not, were chosen with these in view.
    env = _inherited(environ, without=_spelled(argv) | {"AIP_HTTP_PORT", "PROMETHEUS_PORT"})
    env["GRACEFUL_TERMINATION_TIMEOUT"] = str(drain_seconds(asked.graceful_termination_timeout))
    env["LOG_LEVEL"] = asked.log_level
    if asked.api_key is not None:
        env["API_KEY"] = asked.api_key  # Not in argv, which every user of the machine can read.
    if asked.enable_prefill_logprobs:
        env["REQUEST_LOGPROBS"] = "1"
    if asked.max_batch_prefill_tokens is None:
        env.setdefault("MIN_BATCH_PREFILL_TOKENS", str(_LEAST_PREFILL))
    if plan.compute_type is not None:
        env.setdefault("COMPUTE_TYPE", plan.compute_type)
    probe = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(ends.hostname, ends.hostname)
    return Command(name="router", argv=tuple(argv), env=env, http=(probe, ends.port))


def drain_seconds(timeout: int) -> int:
    """What the router gets of the launcher's deadline: the rest is for telling the requests that did not finish. 0 is
    what it says: at once."""
    return max(0, timeout - min(2, max(1, timeout // 3)))


def _model_server_environment(config: LauncherConfig, environ: Environment) -> dict[str, str]:
    # An override that the launcher has accepted names the model's own directory.
    removed = {"LOG_LEVEL", "WEIGHTS_CACHE_OVERRIDE", *map(str.upper, SECRETS)}
    return _inherited(with_hub_cache(environ, config.huggingface_hub_cache), without=removed)


def _inherited(environ: Environment, *, without: Iterable[str]) -> dict[str, str]:
    removed = set(without)
    env = {name: value for name, value in environ.items() if name not in removed}
    if env.get("HF_API_TOKEN"):
        env["HF_TOKEN"] = env["HF_API_TOKEN"]
    return env


def _spelled(argv: Iterable[str]) -> set[str]:
    """The variables of the options that argv spells: a tool that reads both must find one truth."""
    return {word.removeprefix("--").replace("-", "_").upper() for word in argv if word.startswith("--")}


def _logger_level(config: LauncherConfig) -> str:
    """A name that Python's logging libraries know; they have neither WARN nor OFF."""
    level = level_from_filter(config.log_level)
    return {"WARN": "WARNING", "OFF": "CRITICAL"}.get(level, level)


def _if_set(flag: str, value: object) -> list[str]:
    return [] if value is None else [flag, str(value)]


def _switch(flag: str, value: bool) -> list[str]:
    return [flag] if value else []


def _text(value: float | None) -> str | None:
    return None if value is None else _number(value)


def _number(value: float) -> str:
    """As TGI prints floats: 1.0 is `1`."""
    return str(value).removesuffix(".0")
