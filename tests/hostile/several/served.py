"""The server: three models in room for two, and keys of every kind."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml
from support.encoder_models import write_model, write_sentence_files
from support.running_server import RunningServer, running_models

GENERATING = ("chat", "org/other")
EMBEDDING = "embed"
CONCURRENT = 24
"""Permits of each model."""
NARROW = 4
"""Requests at a time of the key that has a bound."""
START_TIMEOUT_S = 60.0
_MODELS = """
defaults: {{memory: 4GiB, max_total_tokens: 1024, max_input_tokens: 900, max_batch_prefill_tokens: 1024,
           max_batch_total_tokens: 2048, max_concurrent_requests: {concurrent}}}
models:
  chat: {{model_id: demo, preload: true, aliases: [gpt-4o]}}
  org/other: {{model_id: demo, keep_alive: 3s, max_batch_size: 4}}
  embed: {{model_id: {embedder}, keep_alive: 3s}}
"""
_KEYS: dict[str, dict[str, object]] = {
    "admin": {"scopes": ["inference", "admin", "metrics"], "weight": 4, "priority": -5},
    "heavy": {"weight": 0.5},
    "narrow": {"concurrent": NARROW},
    "slow": {"requests_per_minute": 60, "tokens_per_minute": 6000},
    "chatting": {"models": ["chat"], "cache": "own"},
    "jobs": {"priority": 3, "max_total_tokens": 300},
    "expired": {"expires": "2020-01-01"},
    "passing": {},
}


def secret(name: str) -> str:
    """Return the key of a name: never in an answer or in the log."""
    return f"tk-marker-{name}-5b1f0c"


@dataclass(frozen=True)
class Served:
    server: RunningServer
    keys: Path

    def write_keys(self, *without: str) -> None:
        """Write the file of keys, which the server reads again by itself."""
        write_keys(self.keys, *without)

    def processes(self, index: int) -> list[psutil.Process]:
        """Return router and shards of the model at a place of the file, if it is loaded."""
        found = []
        for process in psutil.Process(self.server.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if {"router", "model_server"} & set(words) and any(f"/m{index}" in word for word in words):
                    found.append(process)
        return found


def write_keys(path: Path, *without: str) -> None:
    rows = [
        {"name": name, "hash": f"sha256:{hashlib.sha256(secret(name).encode()).hexdigest()}"} | fields
        for name, fields in _KEYS.items()
        if name not in without
    ]
    written = path.with_suffix(".new")
    written.write_text(yaml.safe_dump(rows))
    written.replace(path)


@contextlib.contextmanager
def served() -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="tercet-several-") as name:
        folder = Path(name)
        write_model(folder / "embedder", "bert")
        write_sentence_files(folder / "embedder")
        models = folder / "models.yaml"
        models.write_text(_MODELS.format(embedder=folder / "embedder", concurrent=CONCURRENT))
        write_keys(folder / "keys.yaml")
        options = (
            "--models", str(models), "--models-memory", "9GiB", "--keys-file", str(folder / "keys.yaml"),
            "--batch-dir", str(folder / "batches"), "--model-start-timeout", f"{START_TIMEOUT_S:g}",
        )  # fmt: skip
        with running_models(*options) as server:
            yield Served(server, folder / "keys.yaml")
