"""Counts what `test_layout.py` limits: size, docstrings, unclear names, and files that name a feature."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
GENERATED = (SOURCE / "wire" / "v3", SOURCE / "wire" / "node" / "v1")

# The packages that every request passes, and what names a feature there.
SPINE = re.compile(
    r"router/(generation|scheduling|shards)/|router/(request|limits)\.py|model_server/shard\.py"
    r"|model_server/(rpc|engine|batch|runner|models/decoder|sampling|layers|attention|memory|text)/"
)
FEATURES = {
    "adapters": re.compile("lora|adapter"),
    "images": re.compile("image|vision|picture"),
    "drafts": re.compile("draft|specul|window_rows|verify"),
    "stages": re.compile("num_stage|stage_links|stagelinks|micro_batch"),
    "states": re.compile("keeps_state|requeststate|recurrent|state_slot"),
}
# Beginnings of a docstring that is not a sentence.
FRAGMENT = re.compile(r"(As|Of|Those|The same|None|Where|Which|It)\b")

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class SourceFile:
    path: Path
    text: str

    @property
    def name(self) -> str:
        """Return the path from `src`."""
        return self.path.relative_to(SOURCE).as_posix()

    @property
    def package(self) -> str:
        return self.name.partition("/")[0]

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def num_code_lines(self) -> int:
        """Count the lines that are neither empty nor a comment."""
        lines = (line.strip() for line in self.text.splitlines())
        return sum(bool(line) and not line.startswith("#") for line in lines)

    @property
    def is_spine(self) -> bool:
        return SPINE.match(self.name) is not None

    @cached_property
    def features(self) -> frozenset[str]:
        return frozenset(feature for feature, named in FEATURES.items() if named.search(self.text.lower()))

    @cached_property
    def documented(self) -> list[Documented]:
        return [node for node in _statements(ast.parse(self.text)) if isinstance(node, Documented)]

    @property
    def functions(self) -> Iterator[str]:
        """Yield the name of each function and method, without leading underscores."""
        for node in self.documented:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name.lstrip("_")

    @property
    def docstrings(self) -> Iterator[tuple[str, bool]]:
        """Yield each docstring, and whether it begins with a fragment."""
        for node in self.documented:
            if text := ast.get_docstring(node):
                yield text, not isinstance(node, ast.Module) and FRAGMENT.match(text) is not None


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and the statements below it, without their expressions."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _statements(child)


def read_source() -> list[SourceFile]:
    """Read every module of `src` that is not generated."""
    paths = sorted(path for path in SOURCE.rglob("*.py") if path.parent not in GENERATED)
    return [SourceFile(path, path.read_text()) for path in paths]


def figures(files: list[SourceFile]) -> Counter[str]:
    """Count over all files what a commit may only make better."""
    functions = Counter(name for file in files for name in file.functions)
    docstrings = [found for file in files for found in file.docstrings]
    num_words = sum(len(text.split()) for text, _ in docstrings)
    found = Counter(
        {
            "files": len(files),
            "files below 50 lines": sum(0 < file.num_lines < 50 for file in files),
            "folders": len({file.path.parent for file in files}),
            "docstrings that begin with a fragment": sum(is_fragment for _, is_fragment in docstrings),
            "words of docstrings for 100 lines": 100 * num_words // sum(file.num_code_lines for file in files),
            "files of the spine that name a feature": sum(file.is_spine and bool(file.features) for file in files),
        }
    )
    for name in ("begin", "take", "keeps", "saw", "settle", "leave", "brought"):
        found[f"functions named {name}"] = functions[name]
    for feature in FEATURES:
        found[f"files that name {feature}"] = sum(feature in file.features for file in files)
    return found


def lines_by_package(files: list[SourceFile]) -> Counter[str]:
    lines: Counter[str] = Counter()
    for file in files:
        lines[file.package] += file.num_lines
    return lines
