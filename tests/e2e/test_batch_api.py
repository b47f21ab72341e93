"""Batches outlive a server that is killed at any moment: every request has one answer in the end."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from support.encoder_models import write_model, write_sentence_files
from support.running_server import RunningServer, running_models, running_server

pytestmark = [pytest.mark.e2e, pytest.mark.long]

NUM = 60


def lines(max_tokens: int = 40) -> bytes:
    bodies = [{"prompt": f"The {number}", "max_tokens": max_tokens, "ignore_eos": True} for number in range(NUM)]
    rows = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def begin(client: openai.OpenAI, max_tokens: int = 40) -> str:
    file = client.files.create(file=("in.jsonl", lines(max_tokens)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h").id


def ended(client: openai.OpenAI, batch_id: str) -> openai.types.Batch:
    while (batch := client.batches.retrieve(batch_id)).status in ("validating", "in_progress", "finalizing"):
        time.sleep(0.1)
    return batch


def assert_whole(client: openai.OpenAI, batch: openai.types.Batch) -> None:
    assert batch.status == "completed" and batch.error_file_id is None and batch.output_file_id is not None
    rows = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(int(row["custom_id"]) for row in rows) == list(range(NUM))
    assert {row["response"]["status_code"] for row in rows} == {200}


def client_of(server: RunningServer, path: str = "/v1") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + path, api_key="x", max_retries=0, timeout=120)


def kill(server: RunningServer) -> None:
    """The launcher with all its processes, at once."""
    processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    psutil.wait_procs(processes, 60)


def test_a_batch_outlives_a_server_that_is_killed(tmp_path: Path) -> None:
    options = ("--batch-dir", str(tmp_path / "batches"), "--max-concurrent-requests", "4")
    chosen = random.Random(5)
    with running_server("demo", *options) as server:
        client = client_of(server)
        batch_id = begin(client)
        while client.batches.retrieve(batch_id).request_counts.completed < 5:
            time.sleep(0.01)
        time.sleep(chosen.random() / 20)
        kill(server)
    with running_server("demo", *options) as server:
        client = client_of(server)
        assert_whole(client, ended(client, batch_id))
        second = begin(client)
        server.stop()
    with running_server("demo", *options) as server:
        client = client_of(server)
        assert_whole(client, ended(client, second))
        assert_whole(client, client.batches.retrieve(batch_id))


def test_each_of_several_models_has_its_own(tmp_path: Path) -> None:
    models = tmp_path / "models.yaml"
    models.write_text("models: {one: {model_id: demo}, two: {model_id: demo}}")
    with running_models("--models", str(models), "--batch-dir", str(tmp_path / "batches")) as server:
        client, other = client_of(server, "/models/one/v1"), client_of(server, "/models/two/v1")
        assert_whole(client, ended(client, begin(client)))
        assert other.batches.list().data == [] and other.files.list().data == []
        large = client.files.create(file=("large.jsonl", b"x" * (40 << 20)), purpose="batch")
        assert large.bytes == 40 << 20 and client.files.delete(large.id).deleted
        assert sorted(path.name for path in (tmp_path / "batches").iterdir()) == ["one", "two"]


def test_a_batch_keeps_its_model_loaded(tmp_path: Path) -> None:
    """It is not unloaded as idle; the front charges the batch to its key; after a restart the batch loads its model."""
    models, keys = tmp_path / "models.yaml", tmp_path / "keys.yaml"
    models.write_text("models: {one: {model_id: demo, keep_alive: 1s}, two: {model_id: demo}}")
    digest = hashlib.sha256(b"x").hexdigest()
    keys.write_text(f"- {{name: first, hash: 'sha256:{digest}', requests_per_minute: 1000}}")
    options = ("--models", str(models), "--batch-dir", str(tmp_path / "batches"), "--keys-file", str(keys))
    options += ("--max-concurrent-requests", "4")

    def state() -> str:
        listed = httpx.get(f"{server.url}/v1/models").json()["data"]
        return next(str(model["status"]["value"]) for model in listed if model["id"] == "one")

    with running_models(*options) as server:
        client = client_of(server, "/models/one/v1")
        batch_id, seen = begin(client, max_tokens=100), set()
        while True:
            states = set()
            for _ in range(15):  # longer than the model may be idle
                time.sleep(0.1)
                states.add(state())
            if (batch := client.batches.retrieve(batch_id)).status == "completed":
                break
            seen |= states
        assert seen == {"loaded"}
        assert_whole(client, batch)
        while state() != "unloaded":
            time.sleep(0.1)
    with running_models(*options) as server:
        client = client_of(server, "/models/one/v1")
        second = begin(client)
        server.stop()
    assert (tmp_path / "batches" / "one" / "unfinished").exists()
    with running_models(*options) as server:
        while state() != "loaded":
            time.sleep(0.1)
        assert_whole(client_of(server, "/models/one/v1"), ended(client_of(server, "/models/one/v1"), second))


def test_vectors_are_answered_too(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_model(model, "bert")
    write_sentence_files(model)
    row = {"method": "POST", "url": "/v1/embeddings"}
    rows = [row | {"custom_id": str(number), "body": {"input": f"text {number}"}} for number in range(9)]
    rows.append(row | {"custom_id": "wrong", "body": {"input": 3.5}})
    with running_server(model, "--batch-dir", str(tmp_path / "batches")) as server:
        client = client_of(server)
        lines = "".join(json.dumps(one) + "\n" for one in rows).encode()
        file = client.files.create(file=("in.jsonl", lines), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
        batch = ended(client, batch.id)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (9, 1)
        answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        assert all(answer["response"]["body"]["data"][0]["embedding"] for answer in answers)
        with pytest.raises(openai.NotFoundError) as refused:
            client.files.retrieve("file-none")
        assert refused.value.code == "not_found"
        assert client.files.delete(batch.output_file_id).deleted
