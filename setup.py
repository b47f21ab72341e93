"""The C++ operators, a library for each instruction set; all else about the package is in pyproject.toml."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent / "src"))

from model_server.cpp import instruction_sets as sets

# The libraries that are compiled: of all sets (for a wheel), of those that this CPU has, or of the best of these.
WANTED = ("all", "supported", "best")


class BuildLibraries(build_ext):
    """Compiles each library from its one source file, by g++ or what CXX names, with our own flags alone: Python's are
    for code that was written for Python, and a caller's might ask for the instructions of the machine that builds."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", os.sep) + ".so"

    def build_extension(self, ext: Extension) -> None:
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        library.unlink(missing_ok=True)  # an older one must not stay where this one cannot be compiled
        compiler = shlex.split(os.environ.get("CXX") or "g++")
        self.spawn([*compiler, *ext.extra_compile_args, *ext.sources, "-o", str(library)])

    def run(self) -> None:
        self.is_checkout = bool(self.inplace)  # which the base class hides while it builds
        super().run()

    def build_extensions(self) -> None:
        """Compile what is wanted: a library takes a minute or more, and a checkout's run on this machine alone."""
        features, *libraries = self.extensions
        wanted = os.environ.get("OPERATOR_SETS") or ("best" if self.is_checkout else "all")
        if wanted not in WANTED:
            raise SystemExit(f"OPERATOR_SETS is {wanted!r}: it may be {', '.join(WANTED)}")
        self._compile([features])
        if wanted != "all":
            here = self._of_this_cpu(features)
            libraries = [ext for ext in libraries if ext.name in here]
        if wanted == "best":
            libraries = next(([ext] for ext in libraries if self._compile([ext])), [])
        else:
            self._compile(libraries)
        self.extensions = [features, *libraries]

    def _compile(self, extensions: list[Extension]) -> bool:
        """Return whether all could be compiled."""
        self.extensions = extensions
        super().build_extensions()
        return all(Path(self.get_ext_fullpath(ext.name)).exists() for ext in extensions)

    def _of_this_cpu(self, features: Extension) -> set[str]:
        try:
            supported = sets.supported(Path(self.get_ext_fullpath(features.name)).parent)
        except OSError:  # it could not be compiled, and neither can the others
            supported = ()
        return {f"{sets.__package__}.{sets.module(name)}" for name in supported}

    def copy_extensions_to_source(self) -> None:
        """Beside their sources too: of an editable install. Others would be of other sources."""
        for library in (Path(__file__).parent / "src" / "model_server" / "cpp").glob("*.so"):
            library.unlink()
        super().copy_extensions_to_source()


class Wheel(bdist_wheel):
    """For any Python: the libraries are called through ctypes and know nothing of it."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def extension(name: str, source: str, flags: tuple[str, ...]) -> Extension:
    """Optional: what cannot be compiled here is left out."""
    return Extension(
        f"{sets.__package__}.{name}",
        [f"src/model_server/cpp/source/{source}"],
        extra_compile_args=list(flags),
        optional=True,
    )


# Separate libraries, not one of several object files: of an inline function that was compiled for AVX2 and for AVX-512
# the linker keeps one, and a CPU without AVX-512 might run it.
extensions = [extension(sets.FEATURES, "cpu_features.cpp", sets.FEATURES_FLAGS)]
extensions += [extension(sets.module(name), "operators.cpp", sets.flags(name)) for name in sets.SETS]

setup(
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": Wheel},
    ext_modules=extensions if sets.is_served() else [],
    options={"build_ext": {"parallel": True}},
)
