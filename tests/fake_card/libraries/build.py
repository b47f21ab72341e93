"""Builds the stand-in libraries: build.py TORCH_LIB_FOLDER INCLUDE_FOLDER OUTPUT_FOLDER.

libcudart, libcuda and libnvidia-ml are written. The others (cuBLAS, cuDNN, NCCL, ...) get one function for each name
that torch's libraries leave undefined: the one in the C files named in LIBRARIES, else one that does nothing and
returns 0, "success" in all of these interfaces. With FAKE_CARD_STUBS=1 in the environment of a run each of those says
so when it is first called.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUNTIME = ("runtime.c", "streams.c", "memory.c", "graphs.c", "kernels.c", "devices.c")
DRIVER = ("driver.c", "driver_memory.c", "driver_refused.c")
# The library's name up to ".so": the prefix of its functions, and its C files. cublasLt comes before cublas.
LIBRARIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "libcublasLt": ("cublasLt", ("cublasLt.c",)),
    "libcublas": ("cublas", ("cublas.c",)),
    "libcudnn": ("cudnn", ("cudnn.c",)),
    "libcufft": ("cufft", ()),
    "libcufile": ("cuFile", ()),
    "libcusparseLt": ("cusparseLt", ()),
    "libcusparse": ("cusparse", ()),
    "libnccl": ("nccl", ("nccl.c", "nccl_ranks.c")),
    "libcurand": ("curand", ()),
    "libcupti": ("cupti", ()),
    "libnvrtc": ("nvrtc", ("nvrtc.c",)),
    "libcusolver": ("cusolver", ()),
    "libnvshmem_host": ("nvshmem", ()),
}
_DRIVER_FUNCTION = re.compile(r"cu[A-Z]\w*$")
_STUB = """long {name}() {{
  static int said;
  if (!said++ && getenv("FAKE_CARD_STUBS"))
    fprintf(stderr, "FAKE CARD stub {name}\\n");
  return 0;
}}
"""


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Builder:
    """Compiles into one folder; what is generated on the way is in its subfolder `generated`."""

    def __init__(self, include: Path, output: Path) -> None:
        self._flags = ["-O1", "-fPIC", "-w", f"-I{include}", f"-I{HERE}"]
        self._output = output
        self._scratch = output / "generated"
        self._scratch.mkdir(parents=True, exist_ok=True)

    def library(self, name: str, sources: list[Path], *options: str) -> None:
        """One shared library."""
        command = ["gcc", "-shared", *self._flags, *map(str, sources), "-o", str(self._output / name)]
        subprocess.run([*command, f"-Wl,-soname,{name}", *options, "-ldl", "-lpthread", "-lrt"], check=True)

    def functions_of(self, sources: list[Path]) -> set[str]:
        """What C files define."""
        found: set[str] = set()
        for source in sources:
            compiled = self._scratch / f"{source.stem}.o"
            subprocess.run(["gcc", *self._flags, "-c", str(source), "-o", str(compiled)], check=True)
            found |= {line.split()[-1] for line in _output("nm", "--defined-only", "-g", str(compiled)).splitlines()}
        return found

    def stubs(self, name: str, functions: list[str]) -> Path:
        """A C file of functions that do nothing."""
        path = self._scratch / f"{name}_stubs.c"
        head = "#include <stdio.h>\n#include <stdlib.h>\n"
        path.write_text(head + "".join(_STUB.format(name=function) for function in functions))
        return path

    def version_script(self, name: str, version: str) -> str:
        """The linker's option that gives all functions of a library that version."""
        path = self._scratch / f"{name}.map"
        path.write_text(version + " { global: *; };\n")
        return f"-Wl,--version-script={path}"


def _undefined_in(libraries: list[str]) -> dict[str, str]:
    """Names that they leave undefined, each with its version or an empty string."""
    listed = _output("nm", "-D", "--undefined-only", *libraries)
    names = [line.split()[-1] for line in listed.splitlines() if line.strip() and not line.endswith(":")]
    return {name: version for name, _, version in (text.partition("@") for text in names)}


def _needed_by(libraries: list[str]) -> set[str]:
    """The file names that they are linked with."""
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", _output("readelf", "-d", *libraries)))


def main() -> None:
    torch_folder, include, output = map(Path, sys.argv[1:])
    torch_libraries = list(map(str, sorted(torch_folder.glob("*.so"))))
    undefined, needed = _undefined_in(torch_libraries), _needed_by(torch_libraries)
    builder = Builder(include, output)
    link = (f"-L{output}", "-l:libcudart.so.13")

    sources = [HERE / name for name in RUNTIME]
    builder.library("libcudart.so.13", sources, builder.version_script("cudart", "libcudart.so.13"))
    written = builder.functions_of(sources)
    missing = sorted(name for name in undefined if name.startswith(("cuda", "__cuda")) and name not in written)
    if missing:
        print("The stand-in runtime lacks what this torch asks for: " + ", ".join(missing))

    sources = [HERE / name for name in DRIVER]
    written = builder.functions_of(sources)
    others = ("cuda", *(prefix for prefix, _ in LIBRARIES.values()))
    asked = [name for name in undefined if _DRIVER_FUNCTION.match(name) and not name.startswith(others)]
    stubs = builder.stubs("cuda", sorted(set(asked) - written))
    builder.library("libcuda.so.1", [*sources, stubs], *link)
    (output / "libcuda.so").unlink(missing_ok=True)
    (output / "libcuda.so").symlink_to("libcuda.so.1")
    builder.library("libnvidia-ml.so.1", [HERE / "nvml.c"])

    taken: set[str] = set()
    for stem, (prefix, files) in LIBRARIES.items():
        name = next((name for name in needed if name.startswith(stem + ".so")), None)
        if name is None:
            continue
        asked = sorted(function for function in undefined if function.startswith(prefix) and function not in taken)
        taken.update(asked)
        sources = [HERE / file for file in files]
        written = builder.functions_of(sources)
        stubs = builder.stubs(prefix, [function for function in asked if function not in written])
        versions = {undefined[function] for function in asked if undefined[function]}
        if len(versions) > 1:
            raise SystemExit(f"{name}: functions of several versions: {sorted(versions)}")
        options = [builder.version_script(prefix, versions.pop())] if versions else []
        builder.library(name, [*sources, stubs], *link, *options)
    left = sorted(name for name in needed if re.match(r"lib(cu[a-z]|nv|nccl)", name) and not (output / name).exists())
    if left:
        raise SystemExit("This torch is linked with libraries that have no stand-in: " + ", ".join(left))


if __name__ == "__main__":
    main()
