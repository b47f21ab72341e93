"""Runs `parity.vision_worker` as a group of processes, one start for many models: imports cost seconds each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from parity.vision_scene import Prompt, VisionScene
from support.running_server import free_port

TESTS = Path(__file__).parents[1]
WORLD_SIZE = 2


class VisionRanks:
    """Two processes that wait for models. Started again after one that failed."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "log"
        self._processes: list[subprocess.Popen[str]] = []

    def said(self, scene: VisionScene, num_stages: int, prompts: list[Prompt]) -> list[list[int]]:
        """The tokens of prompts that join one after another in small chunks."""
        torch.save([(one, scene.first_chunk(one, 5)) for one in prompts], scene.folder / "prompts.pt")
        if not self._processes:
            self._start()
        try:
            for process in self._processes:
                assert process.stdin is not None
                print(scene.folder, scene.name, num_stages, sep="\t", file=process.stdin, flush=True)
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
