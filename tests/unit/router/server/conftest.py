"""A configuration, a port and a scheduler for the whole router process."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from router_fakes import INFO, LIMITS
from serving import EndingScheduler, Shards
from tokenizers import Tokenizer

from router.config import RouterConfig
from router.server import server
from router.server.startup import Started


@pytest.fixture
def model(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    return tmp_path


@pytest.fixture
def config(model: Path, free_port: int) -> RouterConfig:
    return RouterConfig(
        tokenizer_name=str(model), hostname="127.0.0.1", port=free_port, graceful_termination_timeout=60
    )


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port that was free a moment ago and is not given out again meanwhile."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.fixture
async def scheduler(monkeypatch: pytest.MonkeyPatch) -> EndingScheduler:
    made = EndingScheduler()

    async def connect(*_: Any, **__: Any) -> Started:
        return Started(info=INFO, limits=LIMITS, scheduler=made, shards=Shards())  # type: ignore[arg-type]

    monkeypatch.setattr(server, "connect_replicas", connect)
    return made
