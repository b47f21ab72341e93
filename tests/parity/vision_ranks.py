"""Runs `parity.vision_worker` as a group of processes, one start for many models: imports cost seconds each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from parity.vision_scene import Prompt, VisionScene
from support.running_server import free_port

TESTS = Path(__file__).parents[1]
WORLD_SIZE = 2
JOB = "job.pt"


@dataclass(frozen=True)
class Asked:
    """One request. first: the router's first chunk of its prompt."""

    prompt: Prompt
    first: int
    adapter: str | None = None


@dataclass(frozen=True)
class Job:
    """What the ranks run: requests that join one after another. options: for `load`."""

    name: str
    num_stages: int
    requests: list[Asked]
    options: dict[str, Any] = field(default_factory=dict)


class VisionRanks:
    """Two processes that wait for models. Started again after one that failed."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "log"
        self._processes: list[subprocess.Popen[str]] = []

    def said(
        self,
        scene: VisionScene,
        num_stages: int,
        prompts: list[Prompt],
        adapter_ids: Sequence[str | None] = (),
        **options: Any,
    ) -> list[list[int]]:
        """The tokens of prompts that join one after another in small chunks. adapter_ids: of each; options: for
        `load`."""
        names = adapter_ids or [None] * len(prompts)
        asked = [Asked(one, scene.first_chunk(one, 5), name) for one, name in zip(prompts, names, strict=True)]
        torch.save(Job(scene.name, num_stages, asked, options), scene.folder / JOB)
        if not self._processes:
            self._start()
        try:
            for process in self._processes:
                assert process.stdin is not None
                print(scene.folder, file=process.stdin, flush=True)
            for process in self._processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "said\n", self._log.read_text()
        except BaseException:
            self.close()
            raise
        said: dict[int, list[int]] = {}
        for rank in range(WORLD_SIZE):
            said |= torch.load(scene.folder / f"said{rank}.pt")
        return [said[number] for number in range(len(prompts))]

    def _start(self) -> None:
        command = [sys.executable, "-m", "parity.vision_worker"]
        port = str(free_port())
        with self._log.open("w") as log:
            self._processes = [
                subprocess.Popen(
                    [*command, str(rank), str(WORLD_SIZE), port],
                    cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                )
                for rank in range(WORLD_SIZE)
            ]  # fmt: skip

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        self._processes = []
