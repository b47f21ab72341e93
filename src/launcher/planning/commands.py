"""Pure: LaunchPlan → argv and environment of each child, as TGI's launcher builds them.

Options that a child takes as they were given are in `launcher.config`; other names and values are in the child's
function.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from launcher.command import Command, Environment
from launcher.config import (
    DOWNLOAD_FLAGS,
    GROUP_TLS,
    PROFILE_FLAGS,
    ROUTER_FLAGS,
    ROUTER_VARIABLES,
    SECRETS,
    SHARD_FLAGS,
    SHARD_VARIABLES,
    LauncherConfig,
)
from launcher.planning.model_info import with_hub_cache
from launcher.planning.plan import LaunchPlan
from wire.cli.pooling_options import Preset
from wire.cli.spelling import to_argv, to_environment, variable_of
from wire.log.console import REQUESTS
from wire.log.levels import level_from_filter
from wire.processes.python_child import child_environment, module_command
from wire.text.sampling_defaults import AUTO, NONE

DECIDED = frozenset({
    "COLLECTIVE_TIMEOUT", "ENDPOINTS", "FRONT_UDS", "MASTER_SHARD_UDS_PATH", "NGROK_AUTHTOKEN", "NGROK_EDGE",
    "NODE_ENDPOINT", "NUM_NODES", "RANK", "REPLICA_UDS_PATHS", "REQUEST_LOGPROBS", "STORE_KEY_PREFIX", "TOKENIZER_NAME",
    "WORLD_SIZE",
})  # fmt: skip
"""Variables of children that the launcher sets, or leaves unset: what is inherited under these names is of another
program, or of another launch."""
_LEAST_PREFILL = 256
"""A prefill budget that no option sets may be halved down to this where memory is short."""
_FOR_LIBRARIES = {
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
    "SAFETENSORS_FAST_GPU": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
# PyTorch's allocator, by its name from 2.9 on and by the one before: segments that grow leave no gaps between steps of
# very different sizes, which would end single steps for lack of memory.
_ALLOCATOR = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True")


def handed_on(asked: LauncherConfig, names: Iterable[str]) -> dict[str, Any]:
    """Return the given options that a child takes under the launcher's name."""
    values = {name: getattr(asked, name) for name in names}
    return {name: value for name, value in values.items() if not isinstance(value, Preset)}


def download(config: LauncherConfig, model_id: str, environ: Environment) -> Command:
    flags = {"logger_level": _logger_level(config), "json_output": True, **handed_on(config, DOWNLOAD_FLAGS)}
    env = _model_server_environment(config, environ) | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    env |= to_environment({"num_stage": config.num_stage})
    return Command(
        name="download", argv=(*module_command("model_server"), "download-weights", model_id, *to_argv(flags)), env=env
    )


def shards(plan: LaunchPlan, environ: Environment) -> list[Command]:
    """Return the shards of this node, of all replicas."""
    numbers = [None] if plan.asked.num_replica == 1 else range(plan.asked.num_replica)
    return [shard(plan, rank, environ, replica) for replica in numbers for rank in plan.ranks]


def _uds_prefix(plan: LaunchPlan, replica: int | None) -> str:
    prefix = plan.endpoints.uds_prefix
    return f"{prefix}-replica{replica}" if replica else prefix


def _of_a_replica(plan: LaunchPlan, replica: int | None, environ: Environment) -> dict[str, str]:
    """Return the environment that gives a replica its part of the machine."""
    if replica is None:
        return {}
    if not plan.on_gpu:
        if "OMP_NUM_THREADS" in environ:
            return {}
        num_shards = plan.num_shard * plan.asked.num_replica
        return {"OMP_NUM_THREADS": str(max(1, int(plan.hardware.cores) // num_shards))}
    given = environ.get("CUDA_VISIBLE_DEVICES", "all").strip()
    seen = [str(number) for number in range(len(plan.hardware.gpus))] if given.lower() == "all" else given.split(",")
    own = seen[replica * plan.num_shard : (replica + 1) * plan.num_shard]
    return {"CUDA_VISIBLE_DEVICES": ",".join(name.strip() for name in own)}


def shard(plan: LaunchPlan, rank: int, environ: Environment, replica: int | None = None) -> Command:
    """replica: None for the only one."""
    asked, ends, prefix = plan.asked, plan.endpoints, _uds_prefix(plan, replica)
    cache = plan.memory.cache
    flags = {
        "uds_path": prefix,
        "logger_level": _logger_level(asked),
        "json_output": True,
        "sharded": plan.num_shard > 1,
        "max_input_tokens": plan.max_input_tokens,
        _cache_option(plan): None if cache is None else cache // asked.num_replica,
        **handed_on(asked, SHARD_FLAGS),
        **handed_on(asked, PROFILE_FLAGS if asked.profile is not None else ()),
    }
    variables = {
        "rank": rank,
        "world_size": plan.num_shard,
        "master_port": ends.master_port + (replica or 0),
        "request_logprobs": 1 if asked.enable_prefill_logprobs else None,
        "cuda_graphs": _cuda_graphs(asked),
        "tercet_task": asked.task,
        **_rope(asked),
        **handed_on(asked, SHARD_VARIABLES),
        **_of_a_group(plan),
    }
    return Command(
        name="shard",
        rank=rank,
        replica=replica,
        argv=(*module_command("model_server"), "serve", plan.model_id, *to_argv(flags)),
        env=_interfaces(plan)
        | _model_server_environment(asked, environ)
        | to_environment(variables)
        | _FOR_LIBRARIES
        | _allocator(environ)
        | _of_a_replica(plan, replica, environ),
        socket=f"{prefix}-{rank}",
        private_files=True,
    )


def _cache_option(plan: LaunchPlan) -> str:
    """Return the given cache size, or a default in tokens, which the shards bound exactly."""
    return "default_kv_cache_memory" if plan.asked.kv_cache_memory is None else "kv_cache_memory"


def _of_a_group(plan: LaunchPlan) -> dict[str, Any]:
    if plan.part is None:
        return {}
    return {
        "num_nodes": plan.part.num_nodes,
        "node_endpoint": plan.part.endpoints[plan.part.node_rank],
        "endpoints": plan.part.endpoints,
        "group_token": plan.asked.group_token,
        "master_addr": plan.part.store_address,
        "store_key_prefix": plan.part.key_prefix,
        **handed_on(plan.asked, GROUP_TLS),
    }


def _interfaces(plan: LaunchPlan) -> dict[str, str]:
    """gloo would resolve the host's name, which may be 127.0.0.1 on each node."""
    if plan.part is None or plan.part.interface is None:
        return {}
    return dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), plan.part.interface)


def router(plan: LaunchPlan, environ: Environment, *, logs_requests: bool = False) -> Command:
    """`logs_requests`: a record of each finished request, beside TGI's."""
    asked, ends = plan.asked, plan.endpoints
    flags = {
        "tokenizer_name": plan.model_id,
        "master_shard_uds_path": f"{ends.uds_prefix}-0",
        "replica_uds_paths": [f"{_uds_prefix(plan, replica)}-0" for replica in range(1, asked.num_replica)],
        "replica_policy": asked.replica_policy if asked.num_replica > 1 else None,
        "hostname": ends.hostname,
        "port": ends.port,
        "uds": ends.uds,
        "uds_mode": None if ends.uds is None else asked.uds_mode,
        "prometheus_port": asked.prometheus_port or None,  # opened only if asked for; 0 means none
        "max_input_tokens": plan.max_input_tokens,
        "max_batch_prefill_tokens": plan.max_batch_prefill_tokens,
        "max_batch_tokens": asked.max_batch_tokens or asked.max_batch_prefill_tokens,
        "generation_config": _of_any_folder(asked.generation_config),
        # Always JSON to the launcher, which writes the record again in the form that was asked for.
        "json_output": True,
        **handed_on(asked, ROUTER_FLAGS),
    }
    variables = {
        "graceful_termination_timeout": drain_seconds(asked.graceful_termination_timeout),
        "request_logprobs": 1 if asked.enable_prefill_logprobs else None,
        "front_uds": ends.front_uds,
        **handed_on(asked, ROUTER_VARIABLES),
    }
    if plan.part is not None:
        variables |= {"lease_seconds": asked.lease_seconds, **handed_on(asked, GROUP_TLS)}
    if logs_requests:
        variables["log_level"] = f"{asked.log_level},{REQUESTS}=debug"
    defaults = {
        "min_batch_prefill_tokens": _LEAST_PREFILL if asked.max_batch_prefill_tokens is None else None,
        "compute_type": plan.compute_type,
    }
    # A tool that reads flags and variables must find one truth; AIP_HTTP_PORT would override the port.
    others = inherited(environ, without={*map(variable_of, flags), "AIP_HTTP_PORT"})
    return Command(
        name="router",
        argv=(*module_command("router"), *to_argv(flags)),
        env=to_environment(defaults) | others | to_environment(variables),
        url=plan.url,
    )


def _of_any_folder(generation_config: str | None) -> str | None:
    """Children run in another folder than the launcher."""
    if generation_config in (None, AUTO, NONE):
        return generation_config
    return os.path.abspath(os.path.expanduser(generation_config))


def drain_seconds(timeout: int) -> int:
    """Return the router's part of the launcher's deadline; the rest answers unfinished requests."""
    return max(0, timeout - min(2, max(1, timeout // 3)))


def _allocator(environ: Environment) -> dict[str, str]:
    """Nothing if the operator has set one of the names, even to an empty text."""
    return {} if _ALLOCATOR.keys() & environ.keys() else _ALLOCATOR


def _cuda_graphs(asked: LauncherConfig) -> list[int] | None:
    """Return the sizes, None for the shard's own, `[0]` for no graphs."""
    return ([size for size in asked.cuda_graphs if size > 0] or [0]) if asked.cuda_graphs else None


def _rope(asked: LauncherConfig) -> dict[str, Any]:
    """Fill in, as TGI, `linear` for a factor alone and a factor of 1 for a kind alone."""
    if asked.rope_scaling is None and asked.rope_factor is None:
        return {}
    return {"rope_scaling": asked.rope_scaling or "linear", "rope_factor": asked.rope_factor or 1.0}


def _model_server_environment(config: LauncherConfig, environ: Environment) -> dict[str, str]:
    # An override that the launcher has accepted names the model's own directory.
    removed = {"LOG_LEVEL", "WEIGHTS_CACHE_OVERRIDE", *map(variable_of, SECRETS)}
    return inherited(with_hub_cache(environ, config.huggingface_hub_cache), without=removed)


def inherited(environ: Environment, *, without: Iterable[str]) -> dict[str, str]:
    removed = DECIDED | set(without)
    env = {name: value for name, value in child_environment(environ).items() if name not in removed}
    if env.get("HF_API_TOKEN"):
        env["HF_TOKEN"] = env["HF_API_TOKEN"]
    return env


def _logger_level(config: LauncherConfig) -> str:
    """A name that Python's logging libraries know; they have neither WARN nor OFF."""
    level = level_from_filter(config.log_level)
    return {"WARN": "WARNING", "OFF": "CRITICAL"}.get(level, level)
