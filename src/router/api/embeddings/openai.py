"""Routes of OpenAI's API, and vLLM's beside it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from fastapi import Request
from starlette.responses import Response

from router.api.embeddings import convert
from router.api.embeddings.ranking import usage
from router.api.embeddings.routes import asked_texts
from router.api.embeddings.schema import (
    ClassifyBody,
    EmbeddingList,
    EmbeddingsBody,
    InputType,
    LabelledList,
    ScoreBody,
    ScoreList,
)
from router.api.embeddings.state import PooledState, state_of
from router.api.json_out import JsonResponse
from router.api.routes import Routes
from router.pooling.errors import empty, invalid, wrong_task
from router.pooling.inference import Asked
from router.pooling.texts import Text

routes = Routes("Embeddings", is_fast=True)

# Names of prompts that mean the same.
_SYNONYMS: dict[InputType, tuple[str, ...]] = {
    "query": ("query", "search_query"),
    "search_query": ("search_query", "query"),
    "document": ("document", "passage", "search_document"),
    "passage": ("passage", "document", "search_document"),
    "search_document": ("search_document", "document", "passage"),
}


@routes.answers("/v1/embeddings", EmbeddingsBody, EmbeddingList, span="openai_embed")
async def embeddings(request: Request) -> Response:
    """A vector for each text."""
    state = state_of(request)
    body = await state.read(request, EmbeddingsBody)
    state.demand_embeddings()
    at = body.truncate_prompt_tokens
    asked = asked_texts(
        state,
        body.input,
        _prompt(state, body),
        "POOLED",
        cut=state.cut(None if at is None else True, at=at),
        dimensions=state.dimensions(body.dimensions),
        normalize=body.normalize,
        name="input",
    )
    computed = await state.compute(request, asked)
    head = convert.headers(computed, state.config.compute_type)
    as_text = body.encoding_format == "base64"
    return await convert.openai_embeddings(computed, state.model_names[0], head, as_text=as_text)


@routes.answers("/embeddings", EmbeddingsBody, EmbeddingList, span="openai_embed")
async def embeddings_alias(request: Request) -> Response:
    """`/v1/embeddings` under TEI's other name."""
    return await embeddings(request)


def _prompt(state: PooledState, body: EmbeddingsBody) -> str:
    if body.input_type is None:
        return state.prompts.of(body.prompt_name)
    if body.prompt_name is not None:
        raise invalid("give either `prompt_name` or `input_type`", param="input_type")
    found = next((name for name in _SYNONYMS[body.input_type] if name in state.prompts.named), None)
    if found is None:
        known = ", ".join(sorted(state.prompts.named)) or "none"
        raise invalid(f"the model has no prompt for `{body.input_type}`; it has: {known}", param="input_type")
    return state.prompts.of(found)


@routes.answers("/score", ScoreBody, ScoreList, span="score")
async def score(request: Request) -> Response:
    """How relevant each text of `text_2` is for that of `text_1`, as vLLM has it."""
    state = state_of(request)
    body = await state.read(request, ScoreBody)
    if state.task != "rerank":
        raise wrong_task("this model gives no scores of pairs")
    first, second = _as_list(body.text_1), _as_list(body.text_2)
    if not first or not second:
        raise empty("text_1" if not first else "text_2")
    if len(first) not in (1, len(second)):
        raise invalid("`text_1` must be one text, or as many as `text_2` has", param="text_1")
    state.inference.check_size(len(second), "text_2")
    pairs = zip(first * len(second) if len(first) == 1 else first, second, strict=True)
    at = body.truncate_prompt_tokens
    asked = Asked(
        texts=[state.pair(one, other) for one, other in pairs],
        kind="SCORES",
        cut=state.cut(None if at is None else True, at=at),
        name="text_2",
        is_batch=len(second) > 1,
    )
    computed = await state.compute(request, asked)
    data = [
        {"index": place, "object": "score", "score": state.relevance(one.values)}
        for place, one in enumerate(computed.numbers)
    ]
    return JsonResponse(
        _listing(state, "score", data) | {"usage": usage(computed)},
        headers=convert.headers(computed, state.config.compute_type),
    )


@routes.answers("/v1/score", ScoreBody, ScoreList, span="score")
async def score_v1(request: Request) -> Response:
    """`/score` under its other name."""
    return await score(request)


@routes.answers("/classify", ClassifyBody, LabelledList, span="classify")
async def classify(request: Request) -> Response:
    """The likeliest label of each text, and how likely all of them are, as vLLM has it."""
    state = state_of(request)
    body = await state.read(request, ClassifyBody)
    if state.task != "classify":
        raise wrong_task("this model has no labels")
    texts = _as_list(body.input)
    if not texts:
        raise empty("input")
    at = body.truncate_prompt_tokens
    asked = Asked(
        texts=[Text(text) for text in texts],
        kind="SCORES",
        cut=state.cut(None if at is None else True, at=at),
        name="input",
        is_batch=not isinstance(body.input, str),
    )
    computed = await state.compute(request, asked)
    data = []
    for place, one in enumerate(computed.numbers):
        shares = convert.probabilities(one.values, raw=False)
        best = int(shares.argmax())
        label = state.labels.get(best, f"LABEL_{best}")
        data.append({"index": place, "label": label, "probs": shares, "num_classes": len(shares)})
    return JsonResponse(
        _listing(state, "classify", data) | {"usage": usage(computed)},
        headers=convert.headers(computed, state.config.compute_type),
    )


def _as_list(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _listing(state: PooledState, name: str, data: list[dict[str, object]]) -> dict[str, object]:
    return {
        "id": f"{name}-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": state.model_names[0],
        "data": data,
    }
