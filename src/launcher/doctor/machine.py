"""The machine: processor, memory, GPUs, the compiler that Triton needs. Starts children for what needs torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.doctor.finding import Finding
from launcher.planning.env_report import cpu_features
from launcher.planning.hardware import Hardware
from launcher.planning.model_info import shown_bytes
from wire.processes.python_child import NEUTRAL_FOLDER, child_environment, module_command
from wire.text.counting import counted

_CHILD_TIMEOUT_S = 120.0
"""Importing torch for the first time after an installation may take a minute on a slow disk."""
_LITTLE_MEMORY = 4 << 30
_LITTLE_SHARED_MEMORY = 1 << 30
_NOT_BUILT = "none were built"
"""What the model server says of operators that an installation without a compiler lacks."""
_COMPILERS = ("cc", "gcc", "clang")


def processor(hardware: Hardware) -> Finding:
    features = " ".join(cpu_features()) or "instruction sets unknown"
    return Finding(name="CPU", text=f"{hardware.cpu or 'unknown'}, {counted(hardware.cores, 'core')}; {features}")


def memory(hardware: Hardware) -> Finding:
    if hardware.memory_bytes is None:
        return Finding(name="memory", state="warning", text="its size is unknown")
    text = shown_bytes(hardware.memory_bytes)
    if hardware.memory_bytes < _LITTLE_MEMORY:
        return Finding(
            name="memory", state="warning", text=f"{text}, enough for small models only",
            remedy="see what fits: launcher estimate MODEL",
        )  # fmt: skip
    return Finding(name="memory", text=text)


def operators(environ: Mapping[str, str]) -> Finding:
    """The C++ operators for CPUs, by the model server's own words."""
    try:
        answer = _child("model_server.cpp", environ)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(name="C++ operators", state="warning", text=f"cannot be checked: {_reason(error)}")
    said = answer.stdout.strip().partition("\n")[0]
    if answer.returncode == 0:
        return Finding(name="C++ operators", text=said)
    if not said:  # shards fail in the same way
        return Finding(name="C++ operators", state="error", text=f"cannot be used: {_last_line(answer)}")
    text, reason, is_remedy = said.partition(_NOT_BUILT)
    remedy = "apt install g++, then pip install --force-reinstall --no-deps tercet (in a checkout: make operators)"
    return Finding(
        name="C++ operators", state="warning", text=text + reason, remedy=remedy if is_remedy else ""
    )  # fmt: skip


def torch(hardware: Hardware, environ: Mapping[str, str]) -> list[Finding]:
    """torch, and what it says of the GPUs."""
    try:
        answer = _child("model_server.device_probe", environ)
        if answer.returncode != 0:
            raise OSError(_last_line(answer))
        found: dict[str, Any] = json.loads(answer.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return [
            Finding(
                name="torch", state="error", text=f"cannot be used: {_reason(error)}",
                remedy="install tercet again: pip install --force-reinstall tercet",
            )
        ]  # fmt: skip
    text = f"{found['torch']}, built for " + (f"CUDA {found['cuda']}" if found["cuda"] else "CPUs")
    if hardware.unused_gpus:
        return [
            Finding(
                name="torch", state="warning", text=f"{text}: {counted(hardware.unused_gpus, 'GPU')} will not be used",
                remedy="install a torch for CUDA: pip install --force-reinstall torch==2.13.0",
            )
        ]  # fmt: skip
    if not hardware.gpus:
        return [Finding(name="torch", text=text)]
    if not found["gpus"]:
        return [
            Finding(
                name="torch", state="error", text=f"{text}; it sees no GPU: {found['reason'] or 'no reason given'}",
                remedy="update the driver (nvidia-smi shows the newest CUDA that it serves), or hide the GPUs: "
                "CUDA_VISIBLE_DEVICES= launcher serve MODEL",
            )
        ]  # fmt: skip
    kernels = Finding(name="Triton", text="its kernels run")
    if found["triton"]:
        kernels = Finding(
            name="Triton", state="warning", text=f"its kernels do not run, torch's operators serve: {found['triton']}",
            remedy="apt install gcc python3-dev",
        )  # fmt: skip
    return [Finding(name="torch", text=text), kernels]


def gpus(hardware: Hardware, driver: str | None) -> list[Finding]:
    """What the driver lists. driver: its version."""
    listed = hardware.gpus
    if not listed and not hardware.unused_gpus:
        files = any(Path("/dev").glob("nvidia[0-9]*"))
        if files:
            return [
                Finding(
                    name="GPU", state="warning", text="there are device files, but no GPU is visible",
                    remedy="check CUDA_VISIBLE_DEVICES, and run nvidia-smi",
                )
            ]  # fmt: skip
        return [Finding(name="GPU", text="none; models are served on the CPU")]
    if not listed:
        return [Finding(name="GPU", text=f"{counted(hardware.unused_gpus, 'GPU')}, driver {driver or 'unknown'}")]
    names = ", ".join(
        (gpu.card or gpu.uuid) + (f" ({gpu.memory_mib / 1024:.0f} GiB)" if gpu.memory_mib else "") for gpu in listed
    )
    found = [Finding(name="GPU", text=f"{names}; driver {driver or 'unknown'}")]
    shared = hardware.shared_memory_bytes
    if len(listed) > 1 and shared is not None and shared < _LITTLE_SHARED_MEMORY:
        found.append(
            Finding(
                name="/dev/shm", state="warning", text=f"{shared >> 20} MiB; shards on several GPUs may need 1 GiB",
                remedy="docker run --shm-size 1g ...",
            )
        )  # fmt: skip
    return found


def compiler(hardware: Hardware) -> Finding:
    """Triton compiles a launcher for each kernel when it first runs."""
    found = next(filter(None, map(shutil.which, _COMPILERS)), None)
    header = Path(sysconfig.get_path("include"), "Python.h").is_file()
    if not hardware.gpus:
        return Finding(name="compiler", text=f"{found or 'none'}; needed on GPUs only")
    if found is None or not header:
        lacking = "no C compiler" if found is None else "Python's headers (Python.h) are missing"
        return Finding(name="compiler", state="warning", text=lacking, remedy="apt install gcc python3-dev")
    return Finding(name="compiler", text=found)


def driver_version() -> str | None:
    """By NVIDIA's own tool; None without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        answer = subprocess.run(
            [tool, "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, errors="replace", timeout=20.0, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.partition("\n")[0].strip() or None


def _child(module: str, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        module_command(module), env=child_environment(environ), cwd=NEUTRAL_FOLDER, capture_output=True, text=True,
        errors="replace", timeout=_CHILD_TIMEOUT_S, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def _last_line(answer: subprocess.CompletedProcess[str]) -> str:
    """Return the error of a failed child, below its traceback."""
    lines = answer.stderr.strip().splitlines()
    return lines[-1] if lines else f"its check exited with status {answer.returncode}"


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer for {error.timeout:.0f} s"
    return str(error) if isinstance(error, OSError) else "it gave no answer"
