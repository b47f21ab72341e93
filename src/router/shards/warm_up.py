"""The warm-up call: the largest prefill, with all sampling on."""

from __future__ import annotations

from dataclasses import dataclass

from wire.v3 import generate_pb2 as pb


@dataclass(frozen=True, kw_only=True)
class WarmUpPlan:
    """What the router asks; None: unset."""

    max_input_tokens: int | None
    max_prefill_tokens: int
    max_total_tokens: int | None
    max_batch_size: int | None


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What shards can do; `total_tokens` of KV."""

    total_tokens: int
    max_input_tokens: int
    max_total_tokens: int


def request_to(plan: WarmUpPlan) -> pb.WarmupRequest:
    """Make prompts that fill one Prefill."""
    requests: list[pb.Request] = []
    covered = 0
    while covered < plan.max_prefill_tokens and len(requests) != plan.max_batch_size:
        rest = plan.max_prefill_tokens - covered
        length = rest if plan.max_input_tokens is None else min(rest, plan.max_input_tokens)
        requests.append(_prompt(length, plan.max_total_tokens))
        covered += length
    request = pb.WarmupRequest(
        batch=pb.Batch(id=0, requests=requests),
        max_prefill_tokens=plan.max_prefill_tokens,
    )
    if plan.max_input_tokens is not None:
        request.max_input_tokens = plan.max_input_tokens
    if plan.max_total_tokens is not None:
        request.max_total_tokens = plan.max_total_tokens
    return request


def capacity_from(messages: list[pb.WarmupResponse]) -> Capacity:
    """Return the smallest answer."""
    total, max_input_tokens, max_total_tokens = min(map(_as_tuple, messages))
    return Capacity(total_tokens=total, max_input_tokens=max_input_tokens, max_total_tokens=max_total_tokens)


def _as_tuple(message: pb.WarmupResponse) -> tuple[int, int, int]:
    return (message.max_supported_total_tokens, message.max_input_tokens, message.max_total_tokens)


def _prompt(length: int, max_total_tokens: int | None) -> pb.Request:
    return pb.Request(
        id=0,
        input_ids=[0] * length,
        parameters=pb.NextTokenChooserParameters(
            temperature=0.9,
            top_k=10,
            top_p=0.9,
            typical_p=0.9,
            repetition_penalty=1.2,
            frequency_penalty=0.1,
            watermark=True,
            grammar_type=pb.GRAMMAR_TYPE_NONE,
        ),
        stopping_parameters=pb.StoppingCriteriaParameters(
            max_new_tokens=1 if max_total_tokens is None else max(max_total_tokens - length, 1),
            ignore_eos_token=True,
        ),
        prefill_logprobs=True,
        top_n_tokens=20,
    )
