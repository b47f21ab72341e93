"""Vectors by huggingface_hub, openai, LangChain, LlamaIndex, litellm and Haystack."""

from __future__ import annotations

import litellm
import numpy as np
import openai
import pytest
from haystack import Document
from haystack.components.embedders import OpenAITextEmbedder
from haystack.utils import Secret
from haystack_integrations.components.embedders.huggingface_api import (
    HuggingFaceAPIDocumentEmbedder,
    HuggingFaceAPITextEmbedder,
)
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

TEXTS = ["what is rain", "water falls from clouds"]
SIZE = 64


@pytest.fixture(scope="module")
def expected(embed_url: str) -> list[list[float]]:
    """The vectors by the plainest client."""
    return InferenceClient(embed_url).feature_extraction(TEXTS).tolist()


def test_hub(embed_url: str, expected: list[list[float]]) -> None:
    client = InferenceClient(embed_url)
    assert client.feature_extraction(TEXTS[0])[0].tolist() == expected[0]
    prompted = client.feature_extraction(TEXTS[0], prompt_name="query", normalize=False)
    assert prompted[0].tolist() == client.feature_extraction(f"query {TEXTS[0]}", normalize=False)[0].tolist()
    cosine = float(np.dot(*np.array(expected)))
    assert client.sentence_similarity(TEXTS[0], other_sentences=[TEXTS[1]]) == pytest.approx([cosine], abs=1e-6)
    with pytest.raises(HfHubHTTPError, match="422"):
        client.feature_extraction("rain " * 500, truncate=False)


def test_openai(embed_url: str, expected: list[list[float]]) -> None:
    client = openai.OpenAI(base_url=f"{embed_url}/v1", api_key="-", max_retries=0)
    answer = client.embeddings.create(model="embed", input=TEXTS)
    assert [one.embedding for one in answer.data] == [pytest.approx(one, abs=1e-7) for one in expected]
    assert len(client.embeddings.create(model="embed", input=TEXTS, dimensions=16).data[0].embedding) == 16
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model="embed", input="")
    assert refused.value.param == "input"


async def test_langchain(embed_url: str, expected: list[list[float]]) -> None:
    # Without the check it sends texts; with it the ids of OpenAI's own tokenizer.
    model = OpenAIEmbeddings(
        base_url=f"{embed_url}/v1", api_key="-", model="embed", check_embedding_ctx_length=False, max_retries=0
    )  # type: ignore[call-arg]
    assert model.embed_query(TEXTS[0]) == pytest.approx(expected[0], abs=1e-7)
    assert len(await model.aembed_documents(TEXTS * 600)) == 1200


async def test_llama_index(embed_url: str, expected: list[list[float]]) -> None:
    model = TextEmbeddingsInference(model_name="embed", base_url=embed_url)
    assert model.get_text_embedding(TEXTS[0]) == pytest.approx(expected[0], abs=1e-7)
    assert model.get_text_embedding_batch(TEXTS)[1] == pytest.approx(expected[1], abs=1e-7)
    assert len(await model.aget_query_embedding(TEXTS[0])) == SIZE


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(embed_url: str, expected: list[list[float]], provider: str) -> None:
    asked = {"model": f"{provider}/embed", "api_base": f"{embed_url}/v1", "api_key": "-", "max_retries": 0}
    answer = litellm.embedding(input=TEXTS, **asked)
    assert [one["embedding"] for one in answer.data] == [pytest.approx(one, abs=1e-7) for one in expected]
    with pytest.raises(litellm.BadRequestError, match="cannot be empty"):
        litellm.embedding(input=[""], **asked)


def test_haystack(embed_url: str, expected: list[list[float]]) -> None:
    key = Secret.from_token("-")
    by_openai = OpenAITextEmbedder(api_key=key, api_base_url=f"{embed_url}/v1", model="embed")
    assert by_openai.run(TEXTS[0])["embedding"] == pytest.approx(expected[0], abs=1e-7)
    options = {
        "api_type": "text_embeddings_inference",
        "api_params": {"url": embed_url},
        "token": key,
        "normalize": True,
    }
    assert HuggingFaceAPITextEmbedder(**options).run(TEXTS[0])["embedding"] == pytest.approx(expected[0], abs=1e-7)
    documents = HuggingFaceAPIDocumentEmbedder(**options).run([Document(content=text) for text in TEXTS])["documents"]
    assert [one.embedding for one in documents] == [pytest.approx(one, abs=1e-7) for one in expected]
