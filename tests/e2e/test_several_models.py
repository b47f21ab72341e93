"""Several models at one address: the demo twice, an embedder and a damaged model, loaded on demand."""

from __future__ import annotations

import concurrent.futures
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.encoder_models import write_model, write_sentence_files
from support.running_server import RunningServer, running_models

pytestmark = [pytest.mark.e2e, pytest.mark.long]

FILE = """
defaults: {{max_total_tokens: 2048, memory: 4GiB}}
models:
  chat: {{model_id: demo, preload: true, aliases: [gpt-4o]}}
  org/other: {{model_id: demo, keep_alive: 3s}}
  embed: {{model_id: {embedder}}}
  damaged: {{model_id: {damaged}}}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Room for two of the models."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "embedder", "bert")
    write_sentence_files(folder / "embedder")
    write_model(folder / "damaged", "bert")
    write_sentence_files(folder / "damaged")
    weights = folder / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    path = folder / "models.yaml"
    path.write_text(FILE.format(embedder=folder / "embedder", damaged=folder / "damaged"))
    with running_models("--models", str(path), "--models-memory", "9GiB") as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as made:
        yield made


def states(client: httpx.Client) -> dict[str, str]:
    return {card["id"]: card["status"]["value"] for card in client.get("/v1/models").json()["data"]}


def wait_for(client: httpx.Client, **wanted: str) -> None:
    deadline = time.monotonic() + 60
    while not wanted.items() <= states(client).items():
        assert time.monotonic() < deadline, states(client)
        time.sleep(0.1)


def ask(client: httpx.Client, model: str, max_tokens: int = 3) -> httpx.Response:
    if model == "embed":
        return client.post("/v1/embeddings", json={"model": model, "input": "a text"})
    messages = [{"role": "user", "content": "Hello"}]
    return client.post("/v1/chat/completions", json={"model": model, "messages": messages, "max_tokens": max_tokens})


def processes_of(server: RunningServer) -> list[int]:
    """Pids of the launcher's children, and of theirs."""
    rows = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout.split("\n")[1:]
    parents = {int(pid): int(parent) for pid, parent in (row.split() for row in rows if row)}
    found = [server.process.pid]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def pid_of(server: RunningServer, *words: str) -> int:
    """The process whose command line has these words."""
    for pid in processes_of(server):
        with suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if all(word in line for word in words):
                return pid
    raise AssertionError(f"no process with {words}")


def test_on_demand_by_every_door(server: RunningServer, client: httpx.Client) -> None:
    """Twenty clients while a model starts, OpenAI's client, TGI's routes by path; then it is unloaded as it is idle."""
    assert states(client) == {"chat": "loaded", "org/other": "unloaded", "embed": "unloaded", "damaged": "unloaded"}
    with concurrent.futures.ThreadPoolExecutor(20) as threads:
        answers = list(threads.map(lambda _: ask(client, "org/other"), range(20)))
    assert [answer.status_code for answer in answers] == [200] * 20
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        chunks = list(
            sdk.chat.completions.create(
                model="gpt-4o", messages=[{"role": "user", "content": "Hello"}], max_tokens=4, stream=True
            )
        )
        assert len(chunks) == 4
        with pytest.raises(openai.NotFoundError) as caught:
            sdk.chat.completions.create(model="nope", messages=[{"role": "user", "content": "Hello"}])
        assert caught.value.code == "model_not_found"
        assert {"chat", "org/other", "embed", "damaged"} == {model.id for model in sdk.models.list()}
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 2, "details": True}}
    generated = client.post("/models/org/other/generate", json=body).json()
    assert generated["details"]["generated_tokens"] == 2
    assert client.post("/generate", json=body).json()["error_type"] == "model_required"
    assert client.get("/info?model=chat").json()["model_id"] == "demo"
    wait_for(client, **{"org/other": "unloaded", "chat": "loaded"})


def test_a_killed_router_ends_its_streams_alone_and_comes_back(server: RunningServer, client: httpx.Client) -> None:
    body = {"inputs": "Tell me a story", "parameters": {"max_new_tokens": 1500, "ignore_eos": True}}
    with client.stream("POST", "/models/chat/generate_stream", json=body) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data:")
        os.kill(pid_of(server, "-m router ", "m0-http"), signal.SIGKILL)
        last = [line for line in lines if line][-1]
    assert '"error"' in last
    assert ask(client, "chat").status_code == 200
    assert server.process.poll() is None


def test_room_and_a_damaged_model(server: RunningServer, client: httpx.Client) -> None:
    """What is idle makes room, and a model that cannot start is told as failed while the others serve."""
    failed = ask(client, "damaged")
    assert (failed.status_code, failed.json()["error"]["code"]) == (503, "model_failed")
    assert "retry-after" in failed.headers
    assert len(ask(client, "embed").json()["data"][0]["embedding"]) > 1
    assert ask(client, "org/other").status_code == 200
    found = states(client)
    assert found["damaged"] == "failed"
    assert list(found.values()).count("loaded") == 2
    text = client.get("/metrics").text
    assert 'tgi_model_starts{model="damaged",outcome="failed"} 1' in text
    assert 'tgi_queue_size{model="org/other"} 0' in text
    client.post("/v1/models/load", json={"model": "chat"}).raise_for_status()
    assert client.post("/v1/models/unload", json={"model": "chat"}).json()["status"]["value"] == "unloaded"


@pytest.mark.weekly
def test_random_order_loses_nothing(server: RunningServer) -> None:
    """Three models in room for two, clients in random order, kills of any process: each request gets an answer."""
    end, chance = time.monotonic() + 120, random.Random(3)

    def client_of(number: int) -> list[int]:
        own, codes = random.Random(number), []
        with httpx.Client(base_url=server.url, timeout=200) as client:
            while time.monotonic() < end:
                answer = ask(client, own.choice(["chat", "org/other", "embed"]), own.randint(1, 60))
                codes.append(answer.status_code)
                assert answer.status_code in (200, 500) or "retry-after" in answer.headers, answer.text
                time.sleep(own.random() if answer.status_code == 200 else 3)
        return codes

    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        running = [threads.submit(client_of, number) for number in range(6)]
        kills = 0
        while time.monotonic() < end:
            time.sleep(chance.uniform(10, 20))
            victims = [
                pid for pid in processes_of(server) if b"m0" in _command_line(pid) or b"m1" in _command_line(pid)
            ]
            if victims:
                os.kill(chance.choice(victims), signal.SIGKILL)
                kills += 1
        codes: list[Any] = [code for one in running for code in one.result()]
    assert set(codes) <= {200, 500, 503}
    assert codes.count(200) > 100
    assert codes.count(500) <= 6 * kills  # what ran on a model that was killed
    with httpx.Client(base_url=server.url, timeout=200) as client:
        for model in ("chat", "org/other"):
            client.post("/v1/models/load", json={"model": model}).raise_for_status()
            assert ask(client, model).status_code == 200


def _command_line(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@pytest.mark.long
@pytest.mark.parametrize("victim", ["launcher", "front"])
def test_nothing_is_left(victim: str) -> None:
    """With a killed launcher, and with a killed front, everything ends."""
    with running_models("demo", "--served-model-name", "a", "--keep-alive", "1h") as running:
        assert httpx.post(f"{running.url}/generate", json={"inputs": "x"}, timeout=60).status_code == 200
        pids = processes_of(running)
        os.kill(running.process.pid if victim == "launcher" else pid_of(running, "router.front"), signal.SIGKILL)
        running.process.wait(30)
        deadline = time.monotonic() + 30
        while any(Path(f"/proc/{pid}/cmdline").exists() and _command_line(pid) for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_stop_says_what_runs_and_what_a_second_one_does() -> None:
    with running_models("demo", "--served-model-name", "a", "--keep-alive", "1h") as running:
        body = {"inputs": "Tell me a story", "parameters": {"max_new_tokens": 4000, "ignore_eos": True}}
        with httpx.stream("POST", f"{running.url}/generate_stream", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data:")
            running.process.send_signal(signal.SIGINT)
            running.log_with("SIGINT: 1 request runs; stopping, at most 90 s; a second Ctrl-C ends everything now")
            time.sleep(0.4)  # the same signal sooner is the same request
            running.process.send_signal(signal.SIGINT)
            assert running.process.wait(30) == 128 + signal.SIGINT
