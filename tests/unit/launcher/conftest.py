"""A launch that must leave no process behind."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from unit.launcher.supervised import Launch, Story

from launcher.processes.child import Guard
from launcher.processes.signals import Signals


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    logger = logging.getLogger("text_generation_launcher")
    story = Story()
    level = logger.level
    logger.addHandler(story)
    logger.setLevel(logging.DEBUG)
    guard = Guard()
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    try:
        with Signals() as signals:
            made = Launch(tmp_path, signals, guard, story)
            yield made
        left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
        if made.supervisor is not None:
            made.supervisor.kill_all()
        assert left == [], "a child was left running"
    finally:
        guard.close()
        logger.removeHandler(story)
        logger.setLevel(level)
