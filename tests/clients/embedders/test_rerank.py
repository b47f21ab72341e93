"""Scores and labels by cohere, litellm, LlamaIndex, Haystack and huggingface_hub."""

from __future__ import annotations

import cohere
import litellm
import pytest
from haystack import Document
from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker
from huggingface_hub import InferenceClient
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

QUERY = "what is rain"
TEXTS = ["cats eat fish", "water falls from clouds", "rain"]


@pytest.fixture(scope="module")
def expected(rerank_url: str) -> list[tuple[int, float]]:
    """Places and scores, the best first."""
    answer = cohere.ClientV2("-", base_url=rerank_url).rerank(model="rerank", query=QUERY, documents=TEXTS)
    found = [(one.index, one.relevance_score) for one in answer.results]
    assert sorted(place for place, _ in found) == [0, 1, 2]
    assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)
    return found


def test_cohere(rerank_url: str, expected: list[tuple[int, float]]) -> None:
    older = cohere.Client("-", base_url=rerank_url)
    answer = older.rerank(model="rerank", query=QUERY, documents=TEXTS, top_n=2, return_documents=True)
    assert [(one.index, one.relevance_score) for one in answer.results] == expected[:2]
    assert answer.results[0].document.text == TEXTS[expected[0][0]]
    with pytest.raises(cohere.BadRequestError, match="cannot be empty"):
        cohere.ClientV2("-", base_url=rerank_url).rerank(model="rerank", query=QUERY, documents=[])


@pytest.mark.parametrize("provider", ["hosted_vllm", "huggingface", "jina_ai", "cohere"])
def test_litellm(rerank_url: str, expected: list[tuple[int, float]], provider: str) -> None:
    base = f"{rerank_url}/v2/rerank" if provider == "cohere" else rerank_url
    answer = litellm.rerank(
        model=f"{provider}/rerank", query=QUERY, documents=TEXTS, api_base=base, api_key="-", max_retries=0
    )
    assert [(one["index"], one["relevance_score"]) for one in answer.results] == expected


def test_llama_index(rerank_url: str, expected: list[tuple[int, float]]) -> None:
    ranker = TextEmbeddingInference(model_name="rerank", base_url=rerank_url, top_n=2)
    nodes = ranker.postprocess_nodes([NodeWithScore(node=TextNode(text=text)) for text in TEXTS], query_str=QUERY)
    assert [(one.node.get_content(), one.score) for one in nodes] == [(TEXTS[at], score) for at, score in expected[:2]]


def test_haystack(rerank_url: str, expected: list[tuple[int, float]]) -> None:
    ranker = HuggingFaceTEIRanker(url=rerank_url, top_k=2, token=None)
    found = ranker.run(QUERY, [Document(content=text) for text in TEXTS])["documents"]
    assert [(one.content, one.score) for one in found] == [(TEXTS[at], score) for at, score in expected[:2]]


def test_labels_by_hub(classify_url: str) -> None:
    # It takes the first of what TEI answers, the best label.
    best = InferenceClient(classify_url).text_classification("i like it")
    assert best.label in ("bad", "so-so", "good") and 1 / 3 < best.score < 1
