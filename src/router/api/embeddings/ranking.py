"""Reranking in the form of Cohere, Jina and vLLM."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from router.api.embeddings import convert
from router.api.embeddings.schema import DocumentsBody, Ranking, RerankBody
from router.api.embeddings.state import PooledState, state_of
from router.api.json_out import JsonResponse
from router.api.routes import Routes
from router.pooling.errors import empty, invalid, wrong_task
from router.pooling.inference import Asked, Computed

routes = Routes("Rerank", is_fast=True)


@routes.answers("/v1/rerank", DocumentsBody, Ranking, span="rerank_documents")
async def rerank_v1(request: Request) -> Response:
    """How relevant each document is for the query, the best first: as Jina's and vLLM's API have it."""
    state = state_of(request)
    body = await state.read(request, DocumentsBody)
    return await rank_documents(request, state, body, body.documents)


@routes.answers("/v2/rerank", DocumentsBody, Ranking, span="rerank_documents")
async def rerank_v2(request: Request) -> Response:
    """How relevant each document is for the query, the best first: as Cohere's API has it."""
    return await rerank_v1(request)


async def rank_documents(
    request: Request, state: PooledState, body: DocumentsBody | RerankBody, documents: Sequence[Any]
) -> Response:
    """Answer a request with `documents`."""
    if state.task != "rerank":
        raise wrong_task("model is not a re-ranker model")
    if not documents:
        raise empty("documents")
    texts = [_text(place, document) for place, document in enumerate(documents)]
    pairs = [state.pair(body.query, text, body.instruction) for text in texts]
    # Only the document is cut: the query's tokens, and the special ones, are added.
    cut = state.cut(True if body.max_tokens_per_doc else None)
    asked = Asked(
        texts=pairs,
        kind="SCORES",
        cut=cut,
        name="documents",
        is_batch=True,
        second_at_most=body.max_tokens_per_doc,
    )
    computed = await state.compute(request, asked)
    scores = [state.relevance(one.values) for one in computed.numbers]
    results = [
        {
            "index": place,
            "relevance_score": scores[place],
            **({"document": {"text": texts[place]}} if body.return_documents else {}),
        }
        for place in convert.ranking(scores)[: body.top_n]
    ]
    return JsonResponse(
        {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": state.model_names[0],
            "results": results,
            "usage": usage(computed),
            "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
        },
        headers=convert.headers(computed, state.config.compute_type),
    )


def usage(computed: Computed) -> dict[str, int]:
    total = sum(computed.num_tokens)
    return {"prompt_tokens": total, "total_tokens": total}


def _text(place: int, document: Any) -> str:
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise invalid(f'`documents`: item {place} should be a text or an object {{"text": ...}}', param="documents")
    return text
