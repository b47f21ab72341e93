"""Phases on the log, and stacks on demand, of real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from wire import phases
from wire.processes import stack_dump

_PROGRAM = """
import logging, time
from wire import phases
from wire.processes import stack_dump
from wire.log import log_setup
log_setup.configure({json}, "WARN")
stack_dump.answer_requests()
phases.enter(phases.LOADING)
logging.getLogger("wire").info("not asked for")
print("up", flush=True)
{more}
"""


def start(more: str = "", *, json_output: bool = True, wanted: bool = True) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), phases.VARIABLE: "1" if wanted else ""}
    program = _PROGRAM.format(json=json_output, more=more)
    return subprocess.Popen(
        [sys.executable, "-c", program], env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_a_launcher_hears_of_phases_whatever_the_level() -> None:
    said, _ = start().communicate(timeout=60)
    first, second = said.splitlines()
    record = json.loads(first)
    assert (record["level"], record["message"], record["phase"]) == ("DEBUG", "Phase: loading", "loading")
    assert second == "up"


@pytest.mark.parametrize(("json_output", "wanted"), [(False, True), (True, False)])
def test_nobody_else_does(json_output: bool, wanted: bool) -> None:
    said, _ = start(json_output=json_output, wanted=wanted).communicate(timeout=60)
    assert said == "up\n"


def test_stacks_of_all_threads_on_demand_and_the_process_goes_on() -> None:
    more = """
import threading
def deep_in_a_thread():
    time.sleep(600)
threading.Thread(target=deep_in_a_thread, daemon=True).start()
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""
    with start(more) as process:
        assert process.stdout is not None and process.stderr is not None
        while process.stdout.readline() != "ready\n":
            assert process.poll() is None
        process.send_signal(stack_dump.SIGNAL)
        text = ""
        # The thread that the signal interrupts comes last, its first line at the very end.
        while "in deep_in_a_thread" not in text or "in <module>" not in text:
            line = process.stderr.readline()
            assert line, text
            text += line
        assert process.poll() is None
        process.kill()


def test_a_crash_in_native_code_says_where() -> None:
    process = start("import ctypes; ctypes.string_at(0)")
    _, said = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in said and "in string_at" in said
