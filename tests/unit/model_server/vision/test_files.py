"""Images that come as files, at the end of a shard."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from model_server.errors import RequestError
from model_server.vision import files
from model_server.vision.files import ImageFiles
from wire.images.families import FAMILIES

_NEVER_ANSWERS = """
import sys
from wire.worker.main import serve

def answer(asked, limit_s):
    open(sys.argv[1] + "/begun", "w").close()
    return sys.stdin.buffer.read(1)  # there is nothing until the pipe is closed

serve(answer, memory_limit=256 << 20, cpu_limit_s=60)
"""


def test_no_image_is_waited_for_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "never_answers.py").write_text(_NEVER_ANSWERS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(filter(None, sys.path))}")
    monkeypatch.setattr(files, "_MODULE", "never_answers")
    monkeypatch.setattr(files, "_LIMIT_S", 600.0)
    reader = ImageFiles(tmp_path, torch.float32, FAMILIES["llava"], 1, cast(Any, None))
    raised: list[Exception] = []

    def read() -> None:
        for _ in range(2):  # the one that waits, and the next in line
            try:
                reader.read(("a", b"x"), truncate=0, add_special_tokens=True)
            except RequestError as error:
                raised.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    while thread.is_alive() and not (tmp_path / "begun").exists():
        thread.join(0.01)
    reader.close()
    thread.join(300)
    assert len(raised) == 2
