"""Servers for embeddings, reranking and classification as real processes: every route, wrong bodies, equal bits."""

from __future__ import annotations

import base64
import concurrent.futures
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from support.encoder_models import WORDS, write_model, write_sentence_files
from support.running_server import RunningServer, running_server

pytestmark = pytest.mark.e2e

TEXTS = [" ".join(WORDS[place : place + 1 + place % 9]) for place in range(40)]
PROMPTS = {"query": "query ", "document": "search document "}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("embedder")
    write_model(folder, "bert")
    write_sentence_files(folder, prompts=PROMPTS)
    with running_server(folder, "--max-batch-tokens", "64", "--max-client-batch-size", "3000") as server:
        yield server


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("reranker")
    write_model(folder, "roberta", kind="AutoModelForSequenceClassification", num_labels=1)
    with running_server(folder, "--served-model-name", "judge") as server:
        yield server


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("classifier")
    write_model(
        folder, "distilbert", kind="AutoModelForSequenceClassification", id2label={0: "bad", 1: "so-so", 2: "good"}
    )
    with running_server(folder) as server:
        yield server


def post(server: RunningServer, path: str, body: Any, status: int = 200) -> Any:
    answer = httpx.post(server.url + path, json=body, timeout=200)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_a_text_has_the_same_bits_alone_in_any_batch_and_beside_others(embedder: RunningServer) -> None:
    alone = [post(embedder, "/embed", {"inputs": text})[0] for text in TEXTS]
    assert post(embedder, "/embed", {"inputs": TEXTS}) == alone
    assert post(embedder, "/embed", {"inputs": TEXTS[::-1]})[::-1] == alone
    many = TEXTS * 10
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(post, embedder, "/embed", {"inputs": many})]
        answers += [threads.submit(post, embedder, "/embed", {"inputs": text}) for text in TEXTS]
        assert answers[0].result() == alone * 10
        assert [one.result()[0] for one in answers[1:]] == alone
    assert np.linalg.norm(np.array(alone), axis=1) == pytest.approx(1, abs=1e-6)


def test_openai(embedder: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="-", max_retries=0) as client:
        as_text = client.embeddings.create(model="any", input=TEXTS[:3])
        as_floats = client.embeddings.create(model="any", input=TEXTS[:3], encoding_format="float", dimensions=16)
        assert [card.id for card in client.models.list()]
        with pytest.raises(openai.BadRequestError) as refused:
            client.embeddings.create(model="any", input=[])
        assert refused.value.param == "input"
    native = post(embedder, "/embed", {"inputs": TEXTS[:3]})
    assert [one.embedding for one in as_text.data] == [pytest.approx(one, abs=1e-7) for one in native]
    cut = post(embedder, "/embed", {"inputs": TEXTS[:3], "dimensions": 16})
    assert [one.embedding for one in as_floats.data] == cut and len(cut[0]) == 16
    assert as_text.usage.total_tokens == as_text.usage.prompt_tokens > 3
    raw = post(embedder, "/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"})["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(raw), dtype="<f4").tolist() == pytest.approx(native[0])


def test_prompts(embedder: RunningServer) -> None:
    by_hand = post(embedder, "/embed", {"inputs": "query " + TEXTS[0]})
    assert post(embedder, "/embed", {"inputs": TEXTS[0], "prompt_name": "query"}) == by_hand
    for kind in ("query", "search_query"):
        answer = post(embedder, "/v1/embeddings", {"input": TEXTS[0], "input_type": kind})
        assert answer["data"][0]["embedding"] == by_hand[0]
    post(embedder, "/embed", {"inputs": "a", "prompt_name": "poem"}, status=422)
    error = post(embedder, "/v1/embeddings", {"input": "a", "prompt_name": "poem"}, status=400)["error"]
    assert error["param"] == "prompt_name" and "query" in error["message"]


def test_the_other_routes_of_an_embedder(embedder: RunningServer) -> None:
    tokens = post(embedder, "/tokenize", {"inputs": ["what is rain", "fish"]})
    assert [len(one) for one in tokens] == [5, 3]
    assert tokens[0][0]["special"] and tokens[0][0]["start"] is None
    assert [(one["text"], one["start"], one["stop"]) for one in tokens[0][1:-1]] == [
        ("what", 0, 4), ("is", 5, 7), ("rain", 8, 12)
    ]  # fmt: skip
    ids = [one["id"] for one in tokens[0]]
    assert post(embedder, "/decode", {"ids": ids}) == ["what is rain"]
    assert post(embedder, "/embed", {"inputs": ids}) == post(embedder, "/embed", {"inputs": "what is rain"})
    everything = post(embedder, "/embed_all", {"inputs": ["what is rain", "fish"]})
    assert [np.shape(one) for one in everything] == [(5, 64), (3, 64)]
    mean = np.mean(everything[0], axis=0)
    whole = post(embedder, "/embed", {"inputs": "what is rain", "normalize": False})[0]
    assert whole == pytest.approx(mean.tolist(), abs=1e-5)
    vectors = np.array(post(embedder, "/embed", {"inputs": ["fish", "cats eat", "rain"]}))
    body = {"inputs": {"source_sentence": "fish", "sentences": ["cats eat", "rain"]}}
    assert post(embedder, "/similarity", body) == pytest.approx((vectors[1:] @ vectors[0]).tolist(), abs=1e-6)
    assert post(embedder, "/", body) == post(embedder, "/similarity", body)
    assert post(embedder, "/", {"inputs": "fish"}) == post(embedder, "/embed", {"inputs": "fish"})
    info = httpx.get(f"{embedder.url}/info").json()
    assert info["model_type"] == {"embedding": {"pooling": "mean"}} and info["max_input_length"] == 48
    answer = httpx.post(f"{embedder.url}/embed", json={"inputs": "fish"})
    assert int(answer.headers["x-compute-tokens"]) == 3 and int(answer.headers["x-compute-characters"]) == 4
    text = httpx.get(f"{embedder.url}/metrics").text
    assert "te_embed_success" in text and "te_queue_size 0" in text


LONG = " ".join(WORDS * 3)


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/embed", {"inputs": ""}, 400, "cannot be empty"),
        ("/embed", {"inputs": []}, 400, "cannot be empty"),
        ("/embed", {"inputs": ["a", ""]}, 400, "cannot be empty"),
        ("/embed", {"inputs": ["a", 1]}, 422, "item 1"),
        ("/embed", {"inputs": 3}, 422, "inputs"),
        ("/embed", {"inputs": [[1, 2], [-1]]}, 422, "token ids"),
        ("/embed", {"inputs": [100000]}, 422, "vocabulary"),
        ("/embed", {}, 422, "inputs"),
        ("/embed", {"inputs": "a", "dimensions": 0}, 422, "positive"),
        ("/embed", {"inputs": "a", "dimensions": 65}, 422, "maximum"),
        ("/embed", {"inputs": "a", "normalise": True}, 422, "normalize"),
        ("/embed", {"inputs": LONG, "truncate": False}, 422, "must have less than 48 tokens. Given: "),
        ("/embed", {"inputs": "a", "truncation_direction": "up"}, 422, "truncation_direction"),
        ("/embed", {"inputs": ["a"] * 10_000}, 422, "batch size 10000 > maximum allowed batch size 3000"),
        ("/embed_sparse", {"inputs": "a"}, 424, "SPLADE"),
        ("/rerank", {"query": "a", "texts": ["b"]}, 424, "re-ranker"),
        ("/predict", {"inputs": "a"}, 424, "classifier"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, 400, "cannot be empty"),
        ("/decode", {"ids": [1, "a"]}, 422, "ids"),
        ("/", {"inputs": {"source_sentence": "a"}}, 422, "sentences"),
        ("/", {"inputs": ["a", 1]}, 422, "item 1"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"] * 10_000}}, 422, "batch size 10000"),
        ("/embed_all", {"inputs": ["a"] * 10_000}, 422, "batch size 10000"),
        ("/tokenize", {"inputs": ["a"] * 10_000}, 422, "batch size 10000"),
        ("/generate", {"inputs": "a"}, 404, "embed"),
        ("/pooling", {"input": "a"}, 404, "GET /openapi.json lists the routes"),
    ],
)
def test_wrong_bodies_in_teis_words(embedder: RunningServer, path: str, body: Any, status: int, said: str) -> None:
    answer = post(embedder, path, body, status)
    assert set(answer) == {"error", "error_type"} and said in answer["error"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": [100000]}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 65}, "dimensions"),
        ("/v1/embeddings", {"input": ["a"] * 10_000}, "input"),
        ("/v1/embeddings", {"input": "a", "input_type": "passage", "prompt_name": "query"}, "input_type"),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}, None),
        ("/score", {"text_1": "a", "text_2": "b"}, None),
        ("/classify", {"input": "a"}, None),
    ],
)
def test_wrong_bodies_as_openais_object(embedder: RunningServer, path: str, body: Any, param: str | None) -> None:
    answer = post(embedder, path, body, 400)
    error = answer["error"]
    assert set(answer) == {"error", "error_type"} and answer["error_type"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["param"] == param


def test_a_text_that_is_too_long_is_cut_at_either_end(embedder: RunningServer) -> None:
    right = post(embedder, "/embed", {"inputs": LONG})
    assert right == post(embedder, "/embed", {"inputs": LONG, "truncate": True, "truncation_direction": "Right"})
    assert right != post(embedder, "/embed", {"inputs": LONG, "truncation_direction": "left"})
    body = {"input": LONG, "truncate_prompt_tokens": 12}
    assert post(embedder, "/v1/embeddings", body)["usage"]["prompt_tokens"] == 12


def test_nothing_is_held_after_clients_that_disconnect(embedder: RunningServer) -> None:
    for _ in range(3):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{embedder.url}/embed", json={"inputs": [LONG] * 2500}, timeout=0.05)
    assert post(embedder, "/embed", {"inputs": "fish"})
    metrics = httpx.get(f"{embedder.url}/metrics").text
    assert "\nte_queue_size 0\n" in metrics


@pytest.mark.long
def test_a_reranker(reranker: RunningServer) -> None:
    texts = ["water falls from clouds", "cats eat fish", "rain"]
    ranks = post(reranker, "/rerank", {"query": "what is rain", "texts": texts, "return_text": True})
    assert sorted(one["index"] for one in ranks) == [0, 1, 2]
    assert [one["score"] for one in ranks] == sorted((one["score"] for one in ranks), reverse=True)
    assert all(texts[one["index"]] == one["text"] for one in ranks)
    scores = {one["index"]: one["score"] for one in ranks}
    raw = post(reranker, "/rerank", {"query": "what is rain", "texts": texts, "raw_scores": True})
    for one in raw:
        assert 1 / (1 + np.exp(-one["score"])) == pytest.approx(scores[one["index"]], abs=1e-6)
    documents = [texts[0], {"text": texts[1]}, texts[2]]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        body = {"model": "m", "query": "what is rain", "documents": documents, "top_n": 2, "return_documents": True}
        answer = post(reranker, path, body)
        assert [one["index"] for one in answer["results"]] == [one["index"] for one in ranks[:2]]
        assert [one["relevance_score"] for one in answer["results"]] == [one["score"] for one in ranks[:2]]
        assert answer["results"][0]["document"] == {"text": ranks[0]["text"]} and answer["model"] == "judge"
        assert answer["meta"]["billed_units"] == {"search_units": 1} and answer["usage"]["total_tokens"] > 10
    data = post(reranker, "/score", {"text_1": "what is rain", "text_2": texts})["data"]
    assert [one["score"] for one in data] == [scores[place] for place in range(3)]
    alone = post(reranker, "/predict", {"inputs": ["what is rain", texts[0]]})
    assert alone[0]["score"] == scores[0]
    short = {"query": "a", "documents": [" ".join(WORDS), "fish"], "max_tokens_per_doc": 3}
    assert post(reranker, "/v1/rerank", short)["usage"]["total_tokens"] == (3 + 1 + 3) + (3 + 1 + 1)
    assert set(httpx.get(f"{reranker.url}/info").json()["model_type"]) >= {"reranker"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/rerank", {"query": "a"}, 422),
        ("/rerank", {"query": "a", "texts": ["b"], "documents": ["b"]}, 422),
        ("/rerank", {"query": "a", "texts": []}, 400),
        ("/v1/rerank", {"query": "a", "documents": [1]}, 400),
        ("/v1/rerank", {"query": "a", "documents": []}, 400),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "instruction": "c"}, 400),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, 400),
        ("/predict", {"inputs": ["a", "b", "c"]}, 422),
        ("/predict", {"inputs": []}, 422),
        ("/embed", {"inputs": "a"}, 424),
        ("/v1/embeddings", {"input": "a"}, 400),
    ],
)
def test_wrong_bodies_for_a_reranker(reranker: RunningServer, path: str, body: Any, status: int) -> None:
    post(reranker, path, body, status)


@pytest.mark.long
def test_a_classifier(classifier: RunningServer) -> None:
    labels = post(classifier, "/predict", {"inputs": "i like it"})
    assert {one["label"] for one in labels} == {"bad", "so-so", "good"}
    assert sum(one["score"] for one in labels) == pytest.approx(1, abs=1e-6)
    assert [one["score"] for one in labels] == sorted((one["score"] for one in labels), reverse=True)
    assert post(classifier, "/predict", {"inputs": [["i like it"], ["good", "fish"]]})[0] == labels
    data = post(classifier, "/classify", {"input": ["i like it"]})["data"][0]
    assert data["label"] == labels[0]["label"] and data["num_classes"] == 3
    assert max(data["probs"]) == labels[0]["score"]
    assert post(classifier, "/", {"inputs": "i like it"}) == labels
    post(classifier, "/rerank", {"query": "a", "texts": ["b"]}, status=424)


@pytest.mark.long
def test_a_start_that_cannot_succeed_says_why(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3")
    with pytest.raises(AssertionError, match="give --pooling"), running_server(tmp_path, "--task", "embed"):
        pass
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "x.WordEmbeddings", "path": ""}]))
    with pytest.raises(AssertionError, match="WordEmbeddings are not served"), running_server(tmp_path):
        pass
