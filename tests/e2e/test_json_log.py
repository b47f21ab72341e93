"""`--json-output`: every line of standard output is a JSON object, whoever wrote it and however it ends."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.launched import sabotaged
from support.running_server import START_LIMIT_S, RunningServer, free_port

pytestmark = pytest.mark.e2e

# What libraries do: print, warn, draw progress, write what is no text, fail in a thread of their own.
_NOISE = r"""
import os
if os.environ.get("RANK"):
    import sys, threading, warnings
    os.write(1, b"plain words\n\xff\xfe\x00 not UTF-8\n")
    os.write(1, b'{"level": "INFO", "message": "' + b"long" * 51200 + b'", "target": "library"}\n')
    os.write(1, b"x" * 3000000 + b"\n")
    os.write(1, b"  3%|#   | 1/30\r 6%|##   | 2/30\r\n")
    os.write(1, b'{"no": "record"}\n[1, 2]\n')
    print("Traceback (most recent call last):\n  not one of ours")
    def fail():
        raise ValueError("in a thread")
    threading.Thread(target=fail).start()
    class Late:
        def find_spec(self, name, path=None, target=None):
            if name == "model_server.shard":
                warnings.warn("of a library")
    sys.meta_path.insert(0, Late())
"""


class Launched:
    """A launcher with its two streams apart."""

    def __init__(self, folder: Path) -> None:
        self._out, self._err = folder / "out", folder / "err"
        port = free_port()
        argv = [sys.executable, "-m", "launcher", "--model-id", "demo", "--json-output", "--hostname", "127.0.0.1"]
        environ = {**psutil.Process().environ(), **sabotaged(folder, _NOISE)}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            process = subprocess.Popen([*argv, "--port", str(port)], stdout=out, stderr=err, env=environ)
        self.server = RunningServer(process, port, self._out)

    def records(self) -> list[dict[str, Any]]:
        """Raises for a line that is no JSON object."""
        lines = self._out.read_bytes().decode().splitlines()
        records = [json.loads(line) for line in lines]
        assert all(isinstance(record, dict) and "level" in record and "timestamp" in record for record in records)
        return records

    def errors(self) -> str:
        return self._err.read_text()


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    made = Launched(tmp_path)
    try:
        yield made
    finally:
        made.server.stop()


def message_of(record: dict[str, Any]) -> str:
    text = record.get("message", record.get("fields", {}).get("message"))
    assert isinstance(text, str)
    return text


def test_every_line_is_json_through_start_request_and_crash(launched: Launched) -> None:
    server = launched.server
    server.wait_healthy()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=START_LIMIT_S)
    for body in ('{"inputs": "Once", "parameters": {"max_new_tokens": 3}}', '{"inputs": ""}'):
        connection.request("POST", "/generate", body, {"content-type": "application/json"})
        connection.getresponse().read()
    connection.close()
    [shard] = [p for p in psutil.Process(server.process.pid).children() if "model_server" in p.cmdline()]
    shard.send_signal(signal.SIGSEGV)
    deadline = time.monotonic() + 60
    while server.process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert server.process.returncode == 1

    records = launched.records()
    messages = [message_of(record) for record in records]
    ours = [record for record in records if record.get("rank") == 0]
    assert "plain words" in messages and "\ufffd\ufffd\\x00 not UTF-8" in messages
    [long] = [text for text in messages if text.startswith("longlong")]
    assert len(long) > 30_000, "understood as a record, cut to a line"
    assert any(text.startswith("xxxx") and text.endswith(" bytes)") for text in messages)
    assert any("2/30" in text for text in messages) and '{"no": "record"}' in messages
    assert any("of a library" in text for text in messages), "a warning"
    assert any(text.startswith("Memory in MiB") for text in messages), "a table"
    assert any("plan" in record.get("fields", {}) for record in records)
    assert ours and all(len(line) <= 65536 for line in messages)
    # The crash: everything that the shard had said on standard error, where it was, and why it ended.
    [crash] = [text for text in messages if text.startswith("Shard complete standard error output:")]
    assert "ValueError: in a thread" in crash and "Fatal Python error: Segmentation fault" in crash
    last = records[-1]
    assert last["level"] == "ERROR"
    assert message_of(last).startswith('Error: ShardFailed("shard 0 was killed by signal 11 (SIGSEGV)')
    assert launched.errors() == message_of(last) + "\n", "and one plain line for people"
