"""The warm-up call: the largest prefill that the limits allow, with every sampling step switched on."""

from __future__ import annotations

import base64
from dataclasses import dataclass

from wire.v3 import generate_pb2 as pb

# TGI puts a tiny image into the first request, of this odd type; text models skip it.
_PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
_PIXEL_TYPE = "image/jpeg;base64"


@dataclass(frozen=True, kw_only=True)
class WarmUpPlan:
    """What the router asks for; None: the user did not set it."""

    max_input_tokens: int | None
    max_prefill_tokens: int
    max_total_tokens: int | None
    max_batch_size: int | None


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What the shards can do. `total_tokens` is the KV capacity, None for padded models."""

    total_tokens: int | None
    max_input_tokens: int
    max_total_tokens: int


def request_to(plan: WarmUpPlan) -> pb.WarmupRequest:
    """Prompts that together fill one Prefill (fewer if the batch size is limited)."""
    requests: list[pb.Request] = []
    covered = 0
    while covered < plan.max_prefill_tokens and len(requests) != plan.max_batch_size:
        rest = plan.max_prefill_tokens - covered
        truncate = rest if plan.max_input_tokens is None else min(rest, plan.max_input_tokens)
        requests.append(_prompt(truncate, plan.max_total_tokens, with_image=not requests))
        covered += truncate
    request = pb.WarmupRequest(
        batch=pb.Batch(id=0, requests=requests, size=len(requests), max_tokens=plan.max_prefill_tokens, max_blocks=0),
        max_prefill_tokens=plan.max_prefill_tokens,
    )
    if plan.max_input_tokens is not None:
        request.max_input_tokens = plan.max_input_tokens
    if plan.max_total_tokens is not None:
        request.max_total_tokens = plan.max_total_tokens
    return request


def capacity_from(messages: list[pb.WarmupResponse]) -> Capacity:
    """The smallest answer, compared as a whole; a missing capacity is the smallest."""
    smallest = min(messages, key=_as_tuple)
    total, max_input_tokens, max_total_tokens = _as_tuple(smallest)
    return Capacity(
        total_tokens=total if total >= 0 else None,
        max_input_tokens=max_input_tokens,
        max_total_tokens=max_total_tokens,
    )


def _as_tuple(message: pb.WarmupResponse) -> tuple[int, int, int]:
    total = message.max_supported_total_tokens if message.HasField("max_supported_total_tokens") else -1
    return (total, message.max_input_tokens, message.max_total_tokens)


def _prompt(truncate: int, max_total_tokens: int | None, *, with_image: bool) -> pb.Request:
    text = "_test " * truncate
    chunks = [pb.InputChunk(text=text)]
    inputs = text
    if with_image:
        chunks.append(pb.InputChunk(image=pb.Image(data=_PIXEL, mimetype=_PIXEL_TYPE)))
        inputs += f"![](data:{_PIXEL_TYPE};base64,{base64.b64encode(_PIXEL).decode()})"
    return pb.Request(
        id=0,
        inputs=inputs,
        input_chunks=pb.Input(chunks=chunks),
        truncate=truncate,
        add_special_tokens=True,
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
            max_new_tokens=1 if max_total_tokens is None else max(max_total_tokens - truncate, 1),
            ignore_eos_token=True,
        ),
        prefill_logprobs=True,
        top_n_tokens=20,
    )
