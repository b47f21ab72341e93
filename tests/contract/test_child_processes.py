"""Every Python child of every process is started by `wire.processes.python_child`; who starts processes is listed."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"
PYTHON = "wire/processes/python_child.py"
STARTERS = {
    "launcher/doctor/machine.py",
    "launcher/planning/env_report.py",  # nvidia-smi
    "launcher/estimate/gguf_file.py",  # the download of a launch
    "launcher/models/command.py",  # the download of a launch
    "launcher/planning/hardware.py",  # nvidia-smi
    "launcher/planning/preflight.py",  # the router, to check its variables
    "launcher/processes/child.py",
    "launcher/processes/parent_watchdog.py",  # becomes what `child` wants
    "launcher/placement/ray_nodes.py",  # the launcher, on a node
    "model_server/weights/conversion/clean_process.py",
    "wire/worker/forked.py",  # a copy of a worker, which imports nothing more
    "wire/worker/process.py",
    "wire/text/tokenizer_trial.py",
}
_MODULES = {"subprocess", "multiprocessing", "pty", "concurrent.futures.process"}
_NAMES = ("exec", "spawn", "posix_spawn", "fork", "popen", "system", "create_subprocess", "ProcessPool")


def _starts_processes(tree: ast.AST) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(alias.name in _MODULES for alias in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and (
            node.module in _MODULES or any(alias.name.startswith("ProcessPool") for alias in node.names)
        ):
            return True
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner, name = node.value.id, node.attr
            if owner in ("os", "asyncio") and name.startswith(_NAMES):
                return True
    return False


@functools.cache
def _trees() -> dict[str, ast.AST]:
    return {str(path.relative_to(SRC)): ast.parse(path.read_text()) for path in sorted(SRC.rglob("*.py"))}


def test_who_starts_processes() -> None:
    """A new name here: its command comes from `wire.processes.python_child`, and so does the environment."""
    assert {name for name, tree in _trees().items() if _starts_processes(tree)} == STARTERS


def test_nobody_else_knows_the_interpreter() -> None:
    found = {
        name
        for name, tree in _trees().items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in ("executable", "_base_executable"))
        or (isinstance(node, ast.Constant) and node.value in ("python", "python3"))
    }
    assert found == {PYTHON}
