"""`--env`: the machine and the versions, as one text for a bug report. No secrets, no host names."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping

from launcher.hardware import Hardware

_PACKAGES = (
    "tercet", "torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "accelerate", "grpcio",
    "protobuf", "fastapi", "uvicorn", "uvloop", "llguidance", "triton", "flash-attn", "flashinfer-python",
)  # fmt: skip
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "ATTENTION", "PREFIX_CACHING",
    "PREFILL_CHUNKING", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "LOG_LEVEL",
)  # fmt: skip


def report(hardware: Hardware, environ: Mapping[str, str]) -> str:
    """Several lines; what cannot be found out is N/A."""
    memory = f"{hardware.memory_bytes / 2**30:.1f} GiB" if hardware.memory_bytes else "N/A"
    lines = [
        "Runtime environment:",
        f"Target: {platform.machine()}-{platform.system().lower()} ({' '.join(platform.libc_ver()) or 'N/A'})",
        f"Kernel: {platform.release()}",
        f"Python: {platform.python_implementation()} {platform.python_version()}",
        f"CPU: {_cpu_model()}, {hardware.cores} cores, memory {memory}",
        f"Docker label: {environ.get('DOCKER_LABEL', 'N/A')}",
        f"Git sha: {environ.get('GIT_SHA', 'N/A')}",
        "Packages: " + ", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
        "Variables: " + (", ".join(f"{name}={environ[name]}" for name in _VARIABLES if name in environ) or "none set"),
        f"GPUs: {len(hardware.gpus)}",
        "nvidia-smi:",
        _nvidia_smi(),
    ]
    return "\n".join(lines)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "N/A"


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "N/A")
    except OSError:
        return "N/A"


def _nvidia_smi() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "N/A"
    try:
        answer = subprocess.run(
            [tool], capture_output=True, text=True, errors="replace", timeout=20.0, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return "N/A"
    return answer.stdout.rstrip() or "N/A" if answer.returncode == os.EX_OK else "N/A"
