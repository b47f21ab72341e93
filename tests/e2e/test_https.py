"""HTTPS on the port of the server, from the launcher's own health check to the end."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme
from support.running_server import START_LIMIT_S, RunningServer, running_server

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def server(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(path)
    with running_server("demo", "--ssl-certfile", str(path), "--served-model-name", "mine", wait=False) as server:
        deadline = time.monotonic() + START_LIMIT_S
        while "Ready on https://127.0.0.1:" not in server.log():
            assert server.process.poll() is None and time.monotonic() < deadline, server.log()
            time.sleep(0.05)
        yield server
        assert server.stop() == 0


def test_answers_and_streams(server: RunningServer, authority: trustme.CA) -> None:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with httpx.Client(base_url=f"https://127.0.0.1:{server.port}", verify=context, timeout=60) as client:
        body = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 4}}
        assert client.post("/generate", json=body).json()["generated_text"] == " Paris."
        assert client.get("/v1/models").json()["data"][0]["id"] == "mine"
        with client.stream("POST", "/generate_stream", json=body) as stream:
            events = [line for line in stream.iter_lines() if line]
        assert len(events) == 3 and '"generated_text":" Paris."' in events[-1]
        refused = client.get("/health", headers={"x-long": "a" * 70_000})
        assert refused.status_code == 431
    with httpx.Client(base_url=f"https://127.0.0.1:{server.port}", verify=context, timeout=60) as client:
        assert client.get("/health").status_code == 200


def test_a_client_without_tls_is_refused_and_disturbs_nobody(server: RunningServer, authority: trustme.CA) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert not plain.recv(1000).startswith(b"HTTP/")
    test_answers_and_streams(server, authority)


def test_the_chat_speaks_it(server: RunningServer, authority: trustme.CA, tmp_path: Path) -> None:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    command = [sys.executable, "-m", "launcher", "chat", "--url", f"https://127.0.0.1:{server.port}"]
    trusting = {**os.environ, "SSL_CERT_FILE": str(tmp_path / "ca.pem")}
    question = "Hello! What is 2 plus 3?"
    done = subprocess.run(command, env=trusting, input=question, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "5" in done.stdout, done.stderr
    done = subprocess.run(command, input=question, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "certificate verify failed" in done.stderr, done.stderr
