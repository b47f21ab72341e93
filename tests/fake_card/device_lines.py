"""Which lines of src touch a GPU's driver, and which of them ran: device_lines.py COVERAGE_FILE... [--least SHARE].

A line counts if it calls or reads something of `torch.cuda` (types in annotations apart), asks for or about pinned
memory, queues a copy, records, asks or awaits an event or a stream, or captures or replays a graph. Device code
(functions of Triton) does not: `make kernels` runs it.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
# Attributes by which pinned memory, events and graphs are used, whatever the object is called.
NAMES = {"pin_memory", "is_pinned", "capture_begin", "capture_end", "capture_pieces", "warm_up", "replay"}
NAMES |= {"record", "synchronize", "wait_stream", "elapsed_time", "used_bytes"}
KEYWORDS = {"pin_memory", "non_blocking"}
# `warm_up` and `replay` are common words: they count where graphs are.
OF_GRAPHS = {"warm_up", "replay", "capture_pieces"}


def lines_of(path: Path) -> set[int]:
    """Line numbers of one file."""
    tree = ast.parse(path.read_text())
    return {line for node in _runs(tree) for line in _touches(node, path)}


def device_lines() -> dict[Path, set[int]]:
    """Of every file of src that has any."""
    found = {path: lines_of(path) for path in sorted((SOURCE / "model_server").rglob("*.py"))}
    return {path: lines for path, lines in found.items() if lines}


def _runs(node: ast.AST) -> Iterator[ast.AST]:
    """What runs on the host: neither annotations nor functions of Triton."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _is_kernel(child):
                continue
            yield child
            yield from _runs(child)


def _is_kernel(node: ast.AST) -> bool:
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in decorators)


def _touches(node: ast.AST, path: Path) -> Iterator[int]:
    if isinstance(node, ast.keyword) and node.arg in KEYWORDS:
        yield node.value.lineno
    if isinstance(node, ast.Call) and ast.unparse(node).endswith(".query()"):  # a product of that name takes something
        yield node.lineno
    if not isinstance(node, ast.Attribute):
        return
    is_named = node.attr in NAMES and (node.attr not in OF_GRAPHS or path.parent.name == "runner")
    if is_named or ast.unparse(node).startswith("torch.cuda."):
        yield node.lineno


def executed(coverage_files: list[str]) -> dict[Path, set[int]]:
    """Lines that ran, by file."""
    from coverage import CoverageData

    ran: dict[Path, set[int]] = {}
    for name in coverage_files:
        data = CoverageData(name)
        data.read()
        for file in data.measured_files():
            ran.setdefault(Path(file), set()).update(data.lines(file) or ())
    return ran


def _starts(path: Path) -> dict[int, int]:
    """The first line of the statement that each line belongs to: coverage counts by those."""
    starts: dict[int, int] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.stmt):
            end = node.body[0].lineno - 1 if getattr(node, "body", None) else node.end_lineno or node.lineno
            for line in range(node.lineno, end + 1):
                starts[line] = max(starts.get(line, 0), node.lineno)
    return starts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--least", type=float, default=0.0, help="the share below which the exit status is 1")
    options = parser.parse_args()
    ran, missing, count = executed(options.files), [], 0
    for path, lines in device_lines().items():
        starts, seen = _starts(path), ran.get(path, set())
        count += len(lines)
        text = path.read_text().splitlines()
        missing += [
            f"{path.relative_to(ROOT)}:{line}: {text[line - 1].strip()}"
            for line in sorted(lines)
            if line not in seen and starts.get(line) not in seen
        ]
    share = 1 - len(missing) / count
    print(f"{count - len(missing)} of {count} lines that touch a GPU's driver ran: {share:.1%}")
    print("\n".join(["Not:", *missing] if missing else []))
    return int(share < options.least)


if __name__ == "__main__":
    sys.exit(main())
