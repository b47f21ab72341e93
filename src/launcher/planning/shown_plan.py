"""A launch plan in words: what was decided, before the start and once it serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.planning.model_info import shown_bytes
from launcher.planning.plan import LaunchPlan
from wire.text.counting import counted

Row = tuple[str, str]


def plan_rows(plan: LaunchPlan) -> list[Row]:
    """Describe what was decided, in the order of the work."""
    asked = plan.asked
    return [
        *_model(plan),
        ("shards", f"{plan.num_shard} on {'GPU' if plan.on_gpu else 'CPU'}"),
        *([("replicas", str(asked.num_replica))] if asked.num_replica > 1 else []),
        ("devices", plan.hardware.devices(plan.num_shard)),
        ("memory", plan.hardware.memory(plan.num_shard, asked.cuda_memory_fraction)),
        ("dtype", asked.dtype or "chosen by the shard"),
        ("weights", _weights(plan)),
        *(_generation(plan) if plan.task == "generate" else _pooling(plan)),
        ("max concurrent requests", str(asked.max_concurrent_requests)),
        *_where(plan),
        ("sockets", f"{plan.endpoints.uds_prefix}-<rank>"),
    ]


def served_rows(plan: LaunchPlan, info: Mapping[str, Any]) -> list[Row]:
    """Describe what is served in a few rows, with the numbers of the router's /info."""
    asked = plan.asked
    dtype = str(info.get("model_dtype", asked.dtype or "chosen by the shard")).removeprefix("torch.")
    devices = f"{counted(plan.num_shard, 'shard')} on {plan.hardware.devices(plan.num_shard)}"
    machine = f"{devices}, {plan.hardware.memory(plan.num_shard, asked.cuda_memory_fraction)}"
    rows = [*_model(plan), ("machine", machine)]
    if plan.task != "generate":
        text, step = info.get("max_input_length", "?"), info.get("max_batch_tokens", "?")
        limits = f"{text} tokens in a text, {step} in a step"
        at_once = info.get("max_concurrent_requests", asked.max_concurrent_requests)
        return [*rows, ("types", dtype), ("limits", f"{limits}; {counted(at_once, 'request')} at once")]
    cache = str(info.get("kv_cache_dtype") or plan.memory.cache_type or "the same").removeprefix("torch.")
    total, batch = info.get("max_total_tokens"), info.get("max_batch_total_tokens")
    return [
        *rows,
        ("types", f"{dtype}, KV cache in {cache}"),
        (
            "limits",
            f"{_shown(info.get('max_input_tokens', plan.max_input_tokens), '?')} tokens in a prompt, "
            f"{_shown(total or asked.max_total_tokens, '?')} with its answer, "
            f"{_shown(batch or asked.max_batch_total_tokens, '?')} in all requests; "
            f"{counted(asked.max_concurrent_requests, 'request')} at once",
        ),
    ]


def _model(plan: LaunchPlan) -> list[Row]:
    revision = plan.asked.revision
    return [
        ("model", plan.model_id + (f" @ {revision}" if revision else "")),
        ("family", plan.info.summary() if plan.info else "decided by the shard"),
        *([("task", plan.task)] if plan.task != "generate" else []),
    ]


def _generation(plan: LaunchPlan) -> list[Row]:
    asked, measured = plan.asked, "what fits (measured at warm-up)"
    return [
        ("kv cache", _cache(plan)),
        ("attention", asked.attention or "chosen by the shard"),
        ("cuda graphs", _cuda_graphs(plan)),
        ("max input tokens", _shown(plan.max_input_tokens, "max total tokens - 1")),
        ("max total tokens", _shown(asked.max_total_tokens, measured)),
        ("max batch prefill tokens", str(plan.max_batch_prefill_tokens)),
        ("max batch total tokens", _tokens(plan, measured)),
    ]


def _pooling(plan: LaunchPlan) -> list[Row]:
    return [
        ("attention", plan.asked.attention or "chosen by the shard"),
        ("max input tokens", _shown(plan.max_input_tokens, "the model's positions")),
        ("max batch tokens", _shown(plan.asked.max_batch_tokens, "chosen by the router")),
    ]


def _where(plan: LaunchPlan) -> list[Row]:
    ends, part = plan.endpoints, plan.part
    http = [("listens on", str(ends.uds) if ends.uds is not None else f"{ends.hostname}:{ends.port}")]
    http.append(("url", plan.url))
    if part is None:
        return http
    ranks = f"ranks {plan.ranks[0]} to {plan.ranks[-1]}" if len(plan.ranks) > 1 else f"rank {plan.ranks[0]}"
    node = ("node", f"{part.node_rank} of {part.num_nodes}, with {ranks}")
    return [node, *http] if part.node_rank == 0 else [node, ("endpoint", part.endpoints[part.node_rank])]


def _weights(plan: LaunchPlan) -> str:
    """Say how they are quantized, and what they take."""
    method = None if plan.info is None else plan.info.quantize
    kind = method or (f"{plan.asked.quantize} on load" if plan.asked.quantize else None)
    size = plan.memory.weights
    if size is None:
        return kind or "decided by the shard"
    return f"{kind or 'plain'}, about {shown_bytes(size)} in memory"


def _cache(plan: LaunchPlan) -> str:
    memory = plan.memory
    kind, token = memory.cache_type or "the model's type", memory.token
    each = " and shard" * (plan.num_shard > 1)
    if token is not None:
        kind = f"{kind}, {shown_bytes(token)} a token{each}"
    size = memory.cache if plan.on_gpu or memory.tokens is None else memory.tokens * (token or 0)
    return kind if size is None else f"{kind}, {shown_bytes(size)}{' a shard' * (plan.num_shard > 1)}"


def _tokens(plan: LaunchPlan, measured: str) -> str:
    """Say how many the KV cache holds."""
    tokens = plan.memory.tokens
    if plan.on_gpu or tokens is None:
        most = "" if tokens is None else f", at most about {tokens}"
        return _shown(plan.asked.max_batch_total_tokens, measured + most)
    return str(tokens)


def _cuda_graphs(plan: LaunchPlan) -> str:
    sizes = [str(size) for size in plan.asked.cuda_graphs if size > 0]
    if not plan.on_gpu:
        return "none on a CPU"
    return ", ".join(sizes) or ("off" if plan.asked.cuda_graphs else "default sizes")


def _shown(value: int | None, default: str) -> str:
    return default if value is None else str(value)
