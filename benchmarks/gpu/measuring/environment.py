"""What a figure depends on besides the code: versions, the card, and which code it was."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "accelerate", "flash-attn", "vllm", "grpcio",
    "protobuf", "fastapi", "uvicorn", "pydantic", "orjson", "uvloop", "httptools", "llguidance",
)  # fmt: skip


def tree_hash() -> str:
    """Of all source files of the packages and the benchmarks: which code was measured, also where there is no git."""
    digest = hashlib.sha256()
    for folder in ("src", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def git_state() -> str:
    """`git describe --always --dirty`; empty where there is no git or no repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def describe(device: str, git: str | None) -> dict[str, Any]:
    """The header of a report. git: what to write where the tree came without its repository."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    header: dict[str, Any] = {
        "git": git or git_state(),
        "tree": tree_hash(),
        "python": platform.python_version(),
        "versions": versions,
        "cpus": len(os.sched_getaffinity(0)),
        "device": device,
    }
    return header | (_card() if device == "cuda" else {})


def _card() -> dict[str, Any]:
    """Read with nvidia-smi, so that the process that only starts the stages holds no memory of the card."""
    fields = "name,driver_version,memory.total,clocks.max.sm,power.limit,mig.mode.current,compute_cap"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
    try:
        line = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return {"card": f"unknown: {error}", "cuda": torch.version.cuda}
    return {"card": dict(zip(fields.split(","), line.split(", "), strict=False)), "cuda": torch.version.cuda}
