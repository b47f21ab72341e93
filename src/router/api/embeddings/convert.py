"""From numbers to the JSON of each API."""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from starlette.responses import Response

from router.api.json_out import JsonResponse, dumps
from router.pooling.inference import Computed
from router.shards.pooling import Floats, Numbers

# Numbers of an answer that are written without a break for the event loop: about a millisecond.
_PIECE = 100_000


def headers(computed: Computed, compute_type: str) -> dict[str, str]:
    """TEI's, in whole milliseconds."""
    return {
        "x-compute-type": compute_type,
        "x-compute-time": _milliseconds(computed.total_s),
        "x-compute-characters": str(computed.num_characters),
        "x-compute-tokens": str(sum(computed.num_tokens)),
        "x-total-time": _milliseconds(computed.total_s),
        "x-tokenization-time": _milliseconds(computed.tokenization_s),
        "x-queue-time": _milliseconds(computed.queue_s),
        "x-inference-time": _milliseconds(computed.inference_s),
    }


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))


async def listed(items: Sequence[Any], sizes: Iterable[int], before: bytes = b"[", after: bytes = b"]") -> bytes:
    """Yield `items` as a JSON list in pieces, by `sizes` numbers each."""
    pieces: list[bytes] = [before]
    waiting: list[Any] = []
    size = 0
    for item, numbers in zip(items, sizes, strict=True):
        waiting.append(item)
        size += numbers
        if size >= _PIECE:
            pieces += [dumps(waiting)[1:-1], b","]
            waiting, size = [], 0
            await asyncio.sleep(0)
    if waiting:
        pieces += [dumps(waiting)[1:-1], b","]
    if len(pieces) > 1:
        pieces.pop()
    pieces.append(after)
    return b"".join(pieces)


async def vectors(computed: Computed, head: Mapping[str, str]) -> Response:
    """A list of each text's numbers."""
    numbers = [one.values for one in computed.numbers]
    body = await listed(numbers, [one.size for one in numbers])
    return Response(body, media_type="application/json", headers=dict(head))


async def sparse_vectors(computed: Computed, head: Mapping[str, str]) -> Response:
    """List each text's non-zero numbers."""
    found = [_sparse(one) for one in computed.numbers]
    body = await listed(found, [len(one) for one in found])
    return Response(body, media_type="application/json", headers=dict(head))


def _sparse(numbers: Numbers) -> list[dict[str, Any]]:
    pairs = zip(numbers.indices, numbers.values, strict=True)
    return [{"index": index, "value": value} for index, value in pairs]


def token_vectors(numbers: Numbers) -> Floats:
    """Return [tokens, hidden], also of one token."""
    return np.atleast_2d(numbers.values)


async def all_tokens(computed: Computed, head: Mapping[str, str]) -> Response:
    """List each text's token vectors."""
    numbers = [token_vectors(one) for one in computed.numbers]
    body = await listed(numbers, [one.size for one in numbers])
    return Response(body, media_type="application/json", headers=dict(head))


async def openai_embeddings(computed: Computed, model: str, head: Mapping[str, str], *, as_text: bool) -> Response:
    """Return OpenAI's object; `as_text`: base64 of bytes."""
    total = sum(computed.num_tokens)
    items = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(one.values.tobytes()).decode() if as_text else one.values,
        }
        for index, one in enumerate(computed.numbers)
    ]
    usage = {"prompt_tokens": total, "total_tokens": total}
    after = b'],"model":' + dumps(model) + b',"usage":' + dumps(usage) + b"}"
    body = await listed(items, [one.values.size for one in computed.numbers], b'{"object":"list","data":[', after)
    return Response(body, media_type="application/json", headers=dict(head))


def sigmoid(value: float) -> np.float32:
    """In 64 bits, without overflow."""
    if value >= 0:
        return np.float32(1 / (1 + math.exp(-value)))
    grown = math.exp(value)
    return np.float32(grown / (1 + grown))


def softmax(values: Floats) -> Floats:
    wide = np.exp(values.astype(np.float64) - values.max())
    shares: Floats = (wide / wide.sum()).astype(np.float32)
    return shares


def probabilities(values: Floats, *, raw: bool) -> Floats:
    """Apply TEI's rule, one label alone, several together, unless `raw`."""
    if raw:
        return values
    if len(values) == 1:
        return np.array([sigmoid(float(values[0]))], dtype=np.float32)
    return softmax(values)


def predictions(numbers: Numbers, labels: Mapping[int, str], *, raw: bool) -> list[dict[str, Any]]:
    """Labels with their scores, the best first."""
    scores = probabilities(numbers.values, raw=raw)
    order = sorted(range(len(scores)), key=lambda place: -scores[place])
    return [{"score": scores[place], "label": labels.get(place, f"LABEL_{place}")} for place in order]


def ranking(scores: Sequence[np.float32]) -> list[int]:
    """Return places of scores, the best first, equals in order."""
    return sorted(range(len(scores)), key=lambda place: -scores[place])


def json_answer(content: Any, head: Mapping[str, str]) -> JsonResponse:
    return JsonResponse(content, headers=dict(head))
