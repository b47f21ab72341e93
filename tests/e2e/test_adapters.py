"""Requests for different LoRA adapters and for the base model at once, each with the tokens that PEFT gives."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.metrics_text import metrics_of
from support.peft_adapters import assert_tokens_of_peft, peft_adapter
from support.running_server import running_server
from support.tiny_models import tiny_checkpoint

pytestmark = pytest.mark.e2e

NEW_TOKENS = 12
PROMPT = "The quick brown fox jumps over the lazy dog, and the cache kept its keys"

Folders = dict[str | None, Path | None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("adapted"))


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    pytest.importorskip("peft")
    made = tmp_path_factory.mktemp("adapters")
    return {
        None: None,
        "poems": peft_adapter(model, made / "poems", 1),
        "org/prose": peft_adapter(
            model, made / "prose", 2, r=16, use_rslora=True, target_modules=["q_proj", "up_proj"]
        ),
    }


LATER = {"haiku": 3, "ode": 4, "limerick": 5}
"""Adapters that are loaded while the server runs, by their seeds; two of them fit its memory for these."""
HOST_MEMORY = "0.00008"


@pytest.fixture(scope="module")
def root(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("peft")
    made = tmp_path_factory.mktemp("root")
    peft_adapter(model, made / "haiku", LATER["haiku"], use_dora=True)
    for name in ("ode", "limerick"):
        peft_adapter(model, made / "new" / name, LATER[name])
    return made


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)])
def client(request: pytest.FixtureRequest, model: Path, folders: Folders, root: Path) -> Iterator[httpx.Client]:
    options = ("--dtype", "float32", "--num-shard", str(request.param), "--max-batch-prefill-tokens", "64")
    adapters = f"{folders['poems']},org/prose={folders['org/prose']}"
    later = ("--lora-root", str(root), "--lora-host-memory", HOST_MEMORY, "--lora-slots", "2", "--api-key", "secret")
    headers = {"authorization": "Bearer secret"}
    with (
        running_server(model, *options, "--lora-adapters", adapters, *later) as server,
        httpx.Client(base_url=server.url, timeout=60, headers=headers) as client,
    ):
        yield client


def generated(client: httpx.Client, adapter: str | None, prompt: str) -> list[int]:
    parameters = {"max_new_tokens": NEW_TOKENS, "details": True, "ignore_eos": True, "adapter_id": adapter}
    answer = client.post("/generate", json={"inputs": prompt, "parameters": parameters})
    assert answer.status_code == 200, answer.text
    return [token["id"] for token in answer.json()["details"]["tokens"]]


def test_adapters_come_and_go_while_requests_run(client: httpx.Client, model: Path, root: Path) -> None:
    """More of them than fit, beside requests for the base model; then one in place of another, and none."""

    def load(name: str, path: str, **others: Any) -> httpx.Response:
        return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **others})

    for name in ("ode", "limerick"):
        answer = load(name, f"new/{name}")
        assert (answer.status_code, answer.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")
    places = {"haiku": root / "haiku", "ode": root / "new" / "ode", "limerick": root / "new" / "limerick", None: None}
    prompt = [token["id"] for token in client.post("/tokenize", json={"inputs": PROMPT}).json()]
    asked = [*places, *places, *reversed(list(places)), *places]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda name: generated(client, name, PROMPT), asked))
    for name in places:
        of_name = [tokens for asked_for, tokens in zip(asked, answers, strict=True) if asked_for == name]
        assert_tokens_of_peft(model, places[name], prompt, of_name[0])
        assert of_name == [of_name[0]] * 4
    metrics = metrics_of(client.get("/metrics").text)
    assert metrics["tgi_lora_evictions"] > 0 and metrics['tgi_lora_adapters{state="registered"}'] == 5
    assert load("ode", "new/limerick").status_code == 400
    assert load("ode", "new/limerick", load_inplace=True).status_code == 200
    assert generated(client, "ode", PROMPT) == answers[asked.index("limerick")]
    assert load("x", "../elsewhere").status_code == 400
    for name in ("ode", "limerick"):
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 200
    gone = client.post("/generate", json={"inputs": "Hi", "parameters": {"adapter_id": "ode"}})
    assert gone.status_code == 422 and "`adapter_id` ode is not known" in gone.json()["error"]


def test_tokens_are_those_of_peft(client: httpx.Client, model: Path, folders: Folders) -> None:
    """One prompt for all, twice: KV of one adapter in the prefix cache is no other's."""
    prompt = [token["id"] for token in client.post("/tokenize", json={"inputs": PROMPT}).json()]
    asked = [*folders, *folders, *reversed(list(folders))]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda name: generated(client, name, PROMPT), asked))
    for name, tokens in zip(asked, answers, strict=True):
        assert_tokens_of_peft(model, folders[name], prompt, tokens)
    assert len({tuple(tokens) for tokens in answers}) == len(folders)


def test_openai_clients_name_an_adapter_as_the_model(client: httpx.Client, folders: Folders) -> None:
    def answer(model: str) -> dict[str, Any]:
        body = {"model": model, "prompt": PROMPT, "max_tokens": NEW_TOKENS, "temperature": 0}
        found = client.post("/v1/completions", json=body)
        assert found.status_code == 200, found.text
        whole: dict[str, Any] = found.json()
        return whole

    cards = client.get("/v1/models").json()["data"]
    base = cards[0]["id"]
    assert [card["id"] for card in cards] == [base, "poems", "org/prose", "haiku"]
    assert (cards[1]["parent"], cards[1]["root"]) == (base, "poems") and "parent" not in cards[0]
    assert client.get("/v1/models/org/prose").json() == cards[2]
    assert client.get("/v1/models/unknown").status_code == 404
    texts = {name: answer(name) for name in ("tgi", "poems", "org/prose")}
    assert [whole["model"] for whole in texts.values()] == [base, "poems", "org/prose"]
    assert len({whole["choices"][0]["text"] for whole in texts.values()}) == 3
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": NEW_TOKENS, "temperature": 0}
    chats = {
        name: client.post("/v1/chat/completions", json={**chat, "model": name}).json() for name in ("tgi", "poems")
    }
    assert chats["poems"]["model"] == "poems"
    assert len({whole["choices"][0]["message"]["content"] for whole in chats.values()}) == 2


def test_a_name_that_is_not_known(client: httpx.Client) -> None:
    answer = client.post("/generate", json={"inputs": "Hi", "parameters": {"adapter_id": "prose"}})
    assert answer.status_code == 422
    assert answer.json()["error"] == "Input validation error: `adapter_id` prose is not known to this server"


def test_requests_are_counted_by_adapter(client: httpx.Client) -> None:
    def counted() -> dict[str, int]:
        text = client.get("/metrics").text
        return {name: int(n) for name, n in re.findall(r'^tgi_lora_requests\{adapter="(.*)"\} (\d+)$', text, re.M)}

    before = counted()
    for adapter in ("poems", None, "poems", "org/prose"):
        generated(client, adapter, "Hi")
    grown = {name: n - before[name] for name, n in counted().items()}
    assert {name: n for name, n in grown.items() if n} == {"poems": 2, "org/prose": 1}
    text = client.get("/metrics").text
    none_run = r'^tgi_lora_requests_info\{max_lora="\d+",running_lora_adapters="",waiting_lora_adapters=""\} \d+\.\d+$'
    assert re.search(none_run, text, re.M), "labels of vllm:lora_requests_info"


@pytest.mark.long
def test_an_adapter_as_the_model(model: Path, folders: Folders, tmp_path: Path) -> None:
    """Its base model is found by its config, and every request gets the tokens of both together."""
    folder = folders["poems"]
    assert folder is not None
    with (
        running_server(folder, "--dtype", "float32") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        assert client.get("/info").json()["model_id"] == str(folder)
        prompt = [token["id"] for token in client.post("/tokenize", json={"inputs": PROMPT}).json()]
        tokens = generated(client, None, PROMPT)
    assert_tokens_of_peft(model, folder, prompt, tokens)
