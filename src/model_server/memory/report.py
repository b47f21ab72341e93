"""What a device's memory is used for, as text."""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes; None: not measured."""

    weights: int | None
    # What the largest step takes beyond the rest.
    activations: int | None = None
    states: int | None = None
    cache: int | None = None
    graphs: int | None = None
    # What is left of `total`.
    free: int | None = None
    total: int | None = None

    def table(self, cache_note: str = "", step_note: str = "") -> str:
        """A line for each use, in MiB."""
        return "\n".join(
            f"{name:<12}{size / _MIB:>10.1f}  {note}".rstrip() for name, size, note in self._rows(cache_note, step_note)
        )

    def line(self) -> str:
        """Summarize in a few words."""
        return "MiB: " + ", ".join(f"{name} {size / _MIB:.1f} {note}".rstrip() for name, size, note in self._rows())

    def _rows(self, cache_note: str = "", step_note: str = "") -> list[tuple[str, int, str]]:
        rows = (
            ("weights", self.weights, ""),
            ("activations", self.activations, step_note),
            ("states", self.states, "" if self.states is None else "of the requests that may run at once"),
            ("KV cache", self.cache, cache_note),
            ("CUDA graphs", self.graphs, ""),
            ("free", self.free, "" if self.total is None else f"of {self.total / _MIB:.1f}"),
        )
        return [(name, size, note) for name, size, note in rows if size is not None]
