"""Text-embeddings-inference's routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import Request
from starlette.responses import Response

from router.api.embeddings import convert
from router.api.embeddings.inputs import Inputs, Pairs
from router.api.embeddings.ranking import rank_documents
from router.api.embeddings.root import RootBody
from router.api.embeddings.schema import (
    DecodeBody,
    EmbedBody,
    PredictBody,
    Prediction,
    Rank,
    Ranking,
    RerankBody,
    SimilarityBody,
    SimilarityInputs,
    SimilarityParameters,
    SimpleToken,
    SparseValue,
    TokenizeTextsBody,
    TokensBody,
)
from router.api.embeddings.state import PooledState, state_of
from router.api.json_out import JsonResponse
from router.api.routes import Routes
from router.pooling.errors import empty, invalid, wrong_task
from router.pooling.inference import Asked, Computed
from router.pooling.texts import Text
from router.shards.pooling import Kind

routes = Routes("Text Embeddings Inference", is_fast=True)


def asked_texts(
    state: PooledState, inputs: Inputs, prompt: str, kind: Kind, body: TokensBody | None = None, **more: Any
) -> Asked:
    if not inputs.texts:
        raise empty(more.get("name", "inputs"))
    cut = more.pop("cut", None) or state.cut(
        None if body is None else body.truncate, "right" if body is None else body.truncation_direction
    )
    texts = [Text(one, prompt=prompt) for one in inputs.texts]
    return Asked(texts=texts, kind=kind, cut=cut, is_batch=inputs.is_batch, **more)


def _head(state: PooledState, computed: Computed) -> dict[str, str]:
    return convert.headers(computed, state.config.compute_type)


@routes.answers("/embed", EmbedBody, list[list[float]], span="embed")
async def embed(request: Request) -> Response:
    """A vector for each text. Returns a list also for a single one."""
    state = state_of(request)
    return await _vectors(request, state, await state.read(request, EmbedBody))


async def embed_or_compare(request: Request) -> Response:
    """Answer as /embed, or as /similarity where the inputs are sentences."""
    state = state_of(request)
    body = await state.read(request, RootBody)
    if isinstance(body.inputs, SimilarityInputs):
        return await _cosines(request, state, body.inputs, body.parameters)
    return await _vectors(request, state, body)


async def _vectors(request: Request, state: PooledState, body: EmbedBody) -> Response:
    state.demand_embeddings()
    asked = asked_texts(
        state,
        body.inputs,
        state.prompts.of(body.prompt_name),
        "POOLED",
        body,
        dimensions=state.dimensions(body.dimensions),
        normalize=body.normalize,
    )
    computed = await state.compute(request, asked)
    return await convert.vectors(computed, _head(state, computed))


@routes.answers("/embed_all", TokensBody, list[list[list[float]]], span="embed_all")
async def embed_all(request: Request) -> Response:
    """A vector for each token of each text, special tokens included, as the model's last layer gives it."""
    state = state_of(request)
    body = await state.read(request, TokensBody)
    if state.task != "embed" or state.is_sparse:
        raise wrong_task(
            "`embed_all` is not available for SPLADE models" if state.is_sparse else "Model is not an embedding model"
        )
    asked = asked_texts(state, body.inputs, state.prompts.of(body.prompt_name), "TOKENS", body)
    computed = await state.compute(request, asked)
    return await convert.all_tokens(computed, _head(state, computed))


@routes.answers("/embed_sparse", TokensBody, list[list[SparseValue]], span="embed_sparse")
async def embed_sparse(request: Request) -> Response:
    """The numbers of each text's vector that are not 0, of models with SPLADE pooling."""
    state = state_of(request)
    body = await state.read(request, TokensBody)
    if not state.is_sparse:
        raise wrong_task("Model is not an embedding model with SPLADE pooling")
    asked = asked_texts(state, body.inputs, state.prompts.of(body.prompt_name), "SPARSE", body)
    computed = await state.compute(request, asked)
    return await convert.sparse_vectors(computed, _head(state, computed))


@routes.answers("/similarity", SimilarityBody, list[float], span="similarity")
async def similarity(request: Request) -> Response:
    """The cosine of each sentence's vector and that of `source_sentence`."""
    state = state_of(request)
    body = await state.read(request, SimilarityBody)
    return await _cosines(request, state, body.inputs, body.parameters)


async def _cosines(
    request: Request, state: PooledState, inputs: SimilarityInputs, given: SimilarityParameters | None
) -> Response:
    state.demand_embeddings()
    if not inputs.sentences:
        raise empty("inputs.sentences")
    state.inference.check_size(len(inputs.sentences), "inputs.sentences")
    parameters = given or SimilarityParameters.model_validate({})
    prompt = state.prompts.of(parameters.prompt_name)
    texts = [Text(text, prompt=prompt) for text in (inputs.source_sentence, *inputs.sentences)]
    cut = state.cut(parameters.truncate, parameters.truncation_direction)
    asked = Asked(texts=texts, kind="POOLED", cut=cut, name="inputs.sentences", is_batch=True, num_free=1)
    computed = await state.compute(request, asked)
    source, *others = (one.values for one in computed.numbers)
    return JsonResponse([np.float32(np.dot(source, other)) for other in others], headers=_head(state, computed))


@routes.answers("/predict", PredictBody, list[Prediction] | list[list[Prediction]], span="predict")
async def predict(request: Request) -> Response:
    """Labels of each text or pair with their scores, the best first."""
    state = state_of(request)
    body = await state.read(request, PredictBody)
    if state.task == "embed":
        raise wrong_task("Model is not a classifier model")
    pairs: Pairs = body.inputs
    texts = [Text(first, second) for first, second in pairs.pairs]
    cut = state.cut(body.truncate, body.truncation_direction)
    computed = await state.compute(request, Asked(texts=texts, kind="SCORES", cut=cut, is_batch=pairs.is_batch))
    found = [convert.predictions(one, state.labels, raw=body.raw_scores) for one in computed.numbers]
    return JsonResponse(found if pairs.is_batch else found[0], headers=_head(state, computed))


@routes.answers("/rerank", RerankBody, list[Rank] | Ranking, span="rerank")
async def rerank(request: Request) -> Response:
    """How well each text answers the query, the best first: as a list for `texts`, as an object for `documents`."""
    state = state_of(request)
    body = await state.read(request, RerankBody)
    if (body.texts is None) == (body.documents is None):
        raise invalid("give either `texts` or `documents`", param="texts")
    if body.documents is not None:
        return await rank_documents(request, state, body, body.documents)
    assert body.texts is not None
    if not body.texts:
        raise empty("texts")
    computed = await state.compute(request, _asked_rerank(state, body, body.texts))
    scores = [convert.probabilities(one.values, raw=body.raw_scores)[0] for one in computed.numbers]
    answer = [
        {"index": place, **({"text": body.texts[place]} if body.return_text else {}), "score": scores[place]}
        for place in convert.ranking(scores)
    ]
    return JsonResponse(answer, headers=_head(state, computed))


def _asked_rerank(state: PooledState, body: RerankBody, texts: Sequence[str]) -> Asked:
    """Ask shards for the texts of a query."""
    if state.task != "rerank":
        raise wrong_task("model is not a re-ranker model")
    pairs = [state.pair(body.query, text) for text in texts]
    cut = state.cut(body.truncate, body.truncation_direction)
    return Asked(texts=pairs, kind="SCORES", cut=cut, name="texts", is_batch=True)


@routes.answers("/tokenize", TokenizeTextsBody, list[list[SimpleToken]], span="tokenize")
async def tokenize(request: Request) -> Response:
    """The tokens of each text, with byte offsets."""
    state = state_of(request)
    body = await state.read(request, TokenizeTextsBody)
    prompt = state.prompts.of(body.prompt_name)
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    if not texts or not all(texts):
        raise empty("inputs")
    state.inference.check_size(len(texts), "inputs")
    whole = [prompt + text for text in texts]
    encodings = await state.inference.tokenizer.spans(whole, add_special_tokens=body.add_special_tokens)
    found = [_tokens(text, encoding) for text, encoding in zip(whole, encodings, strict=True)]
    content = await convert.listed(found, [5 * len(one) for one in found])
    return Response(content, media_type="application/json")


def _tokens(text: str, encoding: Any) -> list[dict[str, Any]]:
    places = _byte_places(text)
    return [
        {"id": number, "text": token, "special": True, "start": None, "stop": None}
        if special
        else {"id": number, "text": text[start:stop], "special": False, "start": places(start), "stop": places(stop)}
        for number, token, special, (start, stop) in zip(
            encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets, strict=True
        )
    ]


def _byte_places(text: str) -> Any:
    """Map characters to UTF-8 bytes."""
    if text.isascii():
        return lambda place: place
    places = np.zeros(len(text) + 1, dtype=np.int64)
    np.cumsum([len(character.encode()) for character in text], out=places[1:])
    return lambda place: int(places[place])


@routes.answers("/decode", DecodeBody, list[str], span="decode")
async def decode(request: Request) -> Response:
    """The text of each list of token ids."""
    state = state_of(request)
    body = await state.read(request, DecodeBody)
    lists = body.ids if body.ids and isinstance(body.ids[0], list) else [body.ids]
    if not body.ids or not all(lists):
        raise empty("ids")
    size = state.inference.tokenizer.vocab_size
    for ids in lists:
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < size for i in ids):
            raise invalid("`ids` must be token ids of the model's vocabulary, or a list of lists of them", param="ids")
    state.inference.check_size(len(lists), "ids")
    found = await state.inference.tokenizer.decode(lists, skip_special_tokens=body.skip_special_tokens)
    return JsonResponse(found)
