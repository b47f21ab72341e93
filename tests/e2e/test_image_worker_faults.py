"""The process that decodes pictures, over HTTP: killed, stopped, and left by its client; nothing is held then."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image
from support.pictures import picture, saved
from support.running_server import RunningServer, running_server
from support.vision_models import write_vision_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.long]
LIMIT = 60.0
SIDE = 4000  # of the largest pictures that the server takes
HELD = ("tgi_batch_current_size", "tgi_queue_size", "tgi_kv_blocks_live")


def until(is_so: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def large(shade: int) -> bytes:
    """A file of some kilobytes with 16 megapixels, which take a process some tenths of a second."""
    return saved(Image.fromarray(np.full((SIDE, SIDE), shade, np.uint8)))


def body_of(data: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"inputs": f"See ![]({url}) here", "parameters": {"max_new_tokens": 4, "ignore_eos": True}}


def has_signal(pid: int, kind: str, number: signal.Signals) -> bool:
    """Whether it is in that set of a process: ShdPnd are those that wait, SigCgt those that are handled."""
    (mask,) = re.findall(rf"^{kind}:\s+(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


def stop(pid: int) -> bool:
    """Whether it was stopped. A process that ends already cannot be."""
    os.kill(pid, signal.SIGSTOP)
    process = psutil.Process(pid)
    until(lambda: process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE))
    return process.status() == psutil.STATUS_STOPPED


def is_worker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return "wire.images.worker" in process.cmdline()
    return False


class Scene:
    """A server whose only process for pictures keeps none that was answered. Arrays of large ones are in shared
    memory."""

    def __init__(self, server: RunningServer) -> None:
        self.url, self.port = server.url, server.port
        processes = psutil.Process(server.process.pid).children(recursive=True)
        (worker,) = [one for one in processes if is_worker(one)]
        router = worker.parent()
        assert router is not None
        self.router = router

    def worker(self) -> psutil.Process:
        """The process that decodes. It has been replaced by the time that it is waited for."""
        found: list[psutil.Process] = []

        def is_there() -> bool:
            found[:] = [one for one in self.router.children() if is_worker(one)]
            return len(found) == 1

        until(is_there)
        return found[0]

    @staticmethod
    def stop_decoding(worker: psutil.Process, answered: Callable[[], Any]) -> int | None:
        """Its fork, once it decodes a picture, which is stopped there. None: the answer came before."""
        stopped: list[int] = []

        def is_over() -> bool:
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                for fork in map(int, Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()):
                    # With a handler it is still a copy of the worker: it has not begun.
                    if not has_signal(fork, "SigCgt", signal.SIGALRM) and stop(fork):
                        stopped[:] = [fork]
            return bool(stopped or answered())

        until(is_over)
        return stopped[0] if stopped else None

    def ask(self, data: bytes) -> httpx.Response:
        return httpx.post(f"{self.url}/generate", json=body_of(data), timeout=290)

    def text(self, data: bytes) -> str:
        answer = self.ask(data)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["generated_text"])

    def shared(self) -> list[str]:
        """Shared memory that the router has open."""
        folder, found = f"/proc/{self.router.pid}/fd", []
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(f"{folder}/{name}"))
        return [one for one in found if one.startswith("/memfd:")]

    def wait_idle(self) -> None:
        """Until no block, no picture and no process of one is held."""

        def is_idle() -> bool:
            text = httpx.get(f"{self.url}/metrics", timeout=LIMIT).text
            values = [float(value) for name in HELD for value in re.findall(rf"^{name} (\S+)$", text, re.MULTILINE)]
            assert len(values) == len(HELD)
            return not any(values) and not self.shared() and not self.worker().children()

        until(is_idle)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("qwen2_vl")
    write_vision_checkpoint(folder, "qwen2_vl")
    options = (
        "--dtype", "float32", "--max-total-tokens", "500", "--max-batch-prefill-tokens", "400", "--image-cache-mib",
        "0", "--validation-workers", "1", "--max-image-pixels",
        str(SIDE * SIDE),
    )  # fmt: skip
    with running_server(folder, *options) as server:
        yield Scene(server)


def refused(answer: httpx.Response, why: str) -> None:
    assert answer.status_code == 422, answer.text
    assert answer.json() == {"error": f"Input validation error: invalid image: {why}", "error_type": "validation"}


def test_a_process_that_is_killed_is_asked_once_more(scene: Scene) -> None:
    small, worker, fork = scene.text(picture(30, 40)), scene.worker(), None
    with ThreadPoolExecutor(1) as pool:
        while fork is None:
            answer = pool.submit(scene.text, large(1))
            fork = scene.stop_decoding(worker, answer.done)
        worker.kill()
        found = answer.result()
    assert found == scene.text(large(1)) and scene.worker().pid != worker.pid
    assert scene.text(picture(30, 40)) == small
    scene.wait_idle()


def test_a_client_that_leaves_while_its_picture_is_decoded_frees_all_of_it(scene: Scene) -> None:
    raw = json.dumps(body_of(large(3))).encode()
    head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    worker, fork = scene.worker(), None
    while fork is None:
        with socket.create_connection(("127.0.0.1", scene.port), timeout=LIMIT) as client:
            client.sendall(head.encode() + raw)
            fork = scene.stop_decoding(worker, lambda: select.select([client], [], [], 0)[0])
            assert fork is None or len(scene.shared()) == 1
    until(lambda: has_signal(fork, "ShdPnd", signal.SIGALRM))
    os.kill(fork, signal.SIGCONT)
    scene.wait_idle()
    assert worker.is_running()
    assert scene.text(picture(30, 40))


def test_a_process_that_hangs_is_replaced(scene: Scene) -> None:
    small = scene.text(picture(30, 40))
    worker = scene.worker()
    worker.suspend()
    refused(scene.ask(picture(40, 30)), "it takes more than 10 s to decode")
    assert scene.text(picture(30, 40)) == small and scene.worker().pid != worker.pid
    scene.wait_idle()
