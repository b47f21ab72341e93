"""`--env`: machine and versions as text for a bug report, without secrets, host names or torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from launcher.config import SECRETS, LauncherConfig
from launcher.planning.hardware import Hardware
from launcher.planning.hub import nearest_folder
from launcher.planning.model_info import hub_cache
from wire.cli.options import options_of
from wire.text.escape import one_line, without_passwords

_PACKAGES = (
    "tercet", "torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "accelerate", "grpcio",
    "protobuf", "fastapi", "uvicorn", "uvloop", "llguidance", "numpy", "triton", "flash-attn", "flashinfer-python",
)  # fmt: skip
_COMPILERS = ("g++", "c++", "gcc", "cc", "nvcc")
_TOOL_LIMIT_S = 20.0

# Instructions that our operators, and torch's, choose their code by.
_CPU_FEATURES = (
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "avx_vnni", "amx_tile", "amx_int8", "amx_bf16",
    "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip
_FEATURE_NAMES = {"asimd": "neon"}

# What others read: the hub library, torch, its libraries, container runtimes.
_PREFIXES = (
    "HF_",
    "HUGGING",
    "TGI_",
    "TERCET_",
    "NCCL_",
    "GLOO_",
    "OMP_",
    "MKL_",
    "KMP_",
    "TORCH_",
    "CUDA_",
    "NVIDIA_",
)
_OTHERS = ("ATTENTION", "PREFIX_CACHING", "PREFILL_CHUNKING", "USE_FLASH_ATTENTION", "COMPUTE_TYPE", "XDG_CACHE_HOME",
           "LOG_COLORIZE", "TMPDIR", "ZE_AFFINITY_MASK", "TRANSFORMERS_OFFLINE")  # fmt: skip
_SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def report(hardware: Hardware, environ: Mapping[str, str]) -> str:
    """Several lines; what cannot be found out is N/A."""
    lines = [
        f"Target: {platform.machine()}-{platform.system().lower()} ({' '.join(platform.libc_ver()).strip() or 'N/A'})",
        f"Kernel: {platform.release()}",
        f"Python: {platform.python_implementation()} {platform.python_version()}",
        f"torch: {_version('torch')}",
        f"CPU: {hardware.cpu or 'N/A'}, {hardware.cores} cores, memory {_size(hardware.memory_bytes)}",
        f"CPU features: {' '.join(cpu_features()) or 'N/A'}",
        f"Shared memory (/dev/shm): {_size(hardware.shared_memory_bytes)}",
        f"Compilers: {_compilers()}",
        f"Hub cache: {_cache(environ)}",
        f"Docker label: {environ.get('DOCKER_LABEL') or 'N/A'}",
        f"Git sha: {environ.get('GIT_SHA') or 'N/A'}",
        "Packages: " + ", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
        f"Variables: {_variables(environ)}",
        f"GPUs: {len(hardware.gpus)}" + (" (torch is built for CPUs only)" if hardware.unused_gpus else ""),
        "nvidia-smi:",
        _nvidia_smi(),
    ]
    return "\n".join(lines)


def cpu_features(cpu_info: Path = Path("/proc/cpuinfo")) -> list[str]:
    """The features of this processor that matter for speed."""
    try:
        lines = cpu_info.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    line = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    present = set(line.partition(":")[2].split())
    return [_FEATURE_NAMES.get(name, name) for name in _CPU_FEATURES if name in present]


def _variables(environ: Mapping[str, str]) -> str:
    """Print our variables and the libraries'; of secrets only that they are set."""
    ours = {opt.env: opt.name in SECRETS for opt in options_of(LauncherConfig) if opt.env}
    shown = []
    for name, value in sorted(environ.items()):
        if name in ours or name in _OTHERS or name.startswith(_PREFIXES):
            is_secret = ours.get(name, False) or (name not in ours and any(word in name for word in _SECRET_WORDS))
            shown.append(f"{name}={'<hidden>' if is_secret else without_passwords(value)}")
    return one_line(", ".join(shown)) or "none set"


def _size(count: int | None) -> str:
    return "N/A" if count is None else f"{count / 2**30:.1f} GiB"


def _cache(environ: Mapping[str, str]) -> str:
    path = hub_cache(environ)
    nearest = nearest_folder(path)
    try:
        free = _size(shutil.disk_usage(nearest).free)
    except OSError:
        free = "N/A"
    state = "" if nearest == path else ", not there yet"
    writable = "" if os.access(nearest, os.W_OK | os.X_OK) else ", not writable"
    return f"{path} ({free} free{state}{writable})"


def _compilers() -> str:
    found = [path for path in map(shutil.which, _COMPILERS) if path is not None]
    return ", ".join(found) or "none"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "N/A"


def _nvidia_smi() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "N/A"
    try:
        answer = subprocess.run(
            [tool], capture_output=True, text=True, errors="replace", timeout=_TOOL_LIMIT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return "N/A"
    return answer.stdout.rstrip() or "N/A" if answer.returncode == os.EX_OK else "N/A"
