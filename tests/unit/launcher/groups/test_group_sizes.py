"""What each of several models may take of a machine's memory."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors.numpy import save_file

from launcher.config import LauncherConfig
from launcher.groups.group import Group
from launcher.groups.sizes import divide, memory_of
from launcher.planning.hardware import Hardware
from launcher.planning.model_info import read
from launcher.planning.plan import Endpoints, LaunchPlan, make_plan
from wire.pooling.task import Task

ENDS = Endpoints(hostname="127.0.0.1", port=1, uds_prefix="/x", master_port=2)
SIZES = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 8, "vocab_size": 100}
MACHINE = Hardware(cores=4, memory_bytes=8 << 30, free_bytes=8 << 30)


@dataclass
class Entry:
    name: str
    config: LauncherConfig
    memory: int | None = None


@dataclass
class Launch:
    directory: Path
    config: LauncherConfig
    machine: Hardware


@dataclass
class Planned:
    """A group that is never started."""

    entry: Entry
    model: Launch
    task: Task

    def plan(self) -> LaunchPlan:
        return make_plan(self.model.config, self.model.machine, read(self.model.directory), ENDS)


def group(folder: Path, model_type: str, task: Task, **fields: Any) -> Group:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **SIZES, **fields}))
    save_file({"weight": np.zeros(1000, np.float32)}, folder / "model.safetensors")
    config = LauncherConfig(model_id=str(folder))
    return cast(Group, Planned(Entry(folder.name, config), Launch(folder, config, MACHINE), task))


def test_only_models_that_generate_share_what_is_left_for_caches(tmp_path: Path) -> None:
    chat = group(tmp_path / "chat", "llama", "generate", max_position_embeddings=4096)
    embedders = [group(tmp_path / f"embed{i}", "bert", "embed") for i in range(6)]
    divide([chat, *embedders], MACHINE, 8 << 30, None)
    assert all(one.plan().memory.tokens is None for one in embedders)
    for_chat, for_embedders = memory_of(chat, MACHINE), sum(memory_of(one, MACHINE) for one in embedders)
    assert for_chat > 2 << 30 and for_chat + for_embedders <= 8 << 30


def test_an_embedder_with_a_memory_of_its_own_gets_no_cache(tmp_path: Path) -> None:
    embedder = group(tmp_path / "embed", "bert", "embed")
    embedder.entry = dataclasses.replace(embedder.entry, memory=1 << 30)
    divide([embedder], MACHINE, None, None)
    assert embedder.model.config.kv_cache_memory is None
