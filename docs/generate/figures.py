"""The README's figures: the table of speed from benchmarks/peers, and how many types of models are served.

Each is between `<!-- figures: NAME -->` and `<!-- end of figures -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers.report import US, best
from docs.generate.markdown import table

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
_BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(\n<!-- end of figures -->)", re.DOTALL)
_TITLES = {"vllm": "vLLM", "openvino": "OpenVINO", "llama.cpp": "llama.cpp"}
_CELLS = tuple(f"128->64 c={clients}" for clients in (1, 8, 32))


class _Line(NamedTuple):
    """A line of the table of speed: its words, the file of results, the shape and the weights there."""

    title: str
    file: str
    shape: str
    weights: str


_LINES = (
    _Line("135M, bfloat16", "peers", "135M", "plain"),
    _Line("0.5B, bfloat16", "peers", "0.5B", "plain"),
    _Line("0.5B, 8 bits", "quantized", "0.5B", "int8"),
    _Line("0.5B, 4 bits", "quantized", "0.5B", "int4"),
    _Line("0.5B, GGUF Q4_K_M", "gguf_zen4", "0.5B", "q4_k_m"),
    _Line("1.1B, GGUF Q4_K_M", "gguf_zen4", "1.1B", "q4_k_m"),
)


def readme() -> Mapping[Path, str]:
    """Path → text of the README with its figures as they are now."""
    return {README: _BLOCK.sub(_filled, README.read_text(encoding="utf-8"))}


def _filled(found: re.Match[str]) -> str:
    begin, name, end = found.groups()
    return f"{begin}{ {'speed': _speed, 'models': _models}[name]() }{end}"


def _speed() -> str:
    head = ["Model", *(f"{cell.partition('c=')[2]} client{'' if cell.endswith('=1') else 's'}" for cell in _CELLS)]
    return table(head, [[line.title, *(_compared(line, cell) for cell in _CELLS)] for line in _LINES])


def _compared(line: _Line, cell: str) -> str:
    """Our output tokens/s, and how many times those of the best other server they are; bold where they are fewer."""
    path = ROOT / "benchmarks" / "peers" / "results" / f"{line.file}.json"
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    rates = {
        peer: entry.rate
        for peer in sorted({run["peer"] for run in results["runs"]})
        if (entry := best(results, peer, line.shape, cell, line.weights)) is not None
    }
    ours = rates.pop(US)
    peer, theirs = max(rates.items(), key=lambda item: item[1])
    ratio = f"{ours / theirs:.2f}"
    return f"{ours:.0f}, {f'**{ratio}**' if ours < theirs else ratio} × {_TITLES[peer]}"


def _models() -> str:
    """From the first lines of docs/models.md, which is generated from the parity tests."""
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    found = re.search(r"Of \d+ types: (\d+) native, (\d+) transformers, (\d+) stateful", text)
    assert found is not None
    native, paged, stateful = found.groups()
    return (
        f"- **Models:** {native} types by our own decoder, {paged} by transformers' modelling in the same batches, "
        f"{stateful} by\n  transformers with one request after another ([which](docs/models.md)); pictures, LoRA "
        "adapters, drafts."
    )
