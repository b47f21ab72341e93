"""Where the seconds of a start went, as text: one line, or a table with `--verbose-startup`."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.processes.child import Child


def total(child: Child) -> float:
    """Seconds from its start until it was found ready."""
    assert child.ready_at is not None
    return child.ready_at - child.started_at


def one_line(before_s: float, shards: Sequence[Child], router: Child) -> str:
    """Summarize all processes, with details of the slowest shard from a tenth of a second."""
    slowest = max(shards, key=total)
    parts = [f"before the shards {before_s:.2f} s"]
    for child in [*shards, router]:
        named = [(name, took) for name, took in _phases(child) if took >= 0.1]
        detail = ", ".join(f"{name} {took:.2f}" for name, took in named)
        is_told = bool(detail) and (child is slowest or child is router)
        parts.append(f"{child.title} {total(child):.2f} s" + (f" ({detail})" if is_told else ""))
    return ", ".join(parts)


def table(launcher: Sequence[tuple[str, float]], shards: Sequence[Child], router: Child, all_s: float) -> str:
    """List the phases of each process in seconds; shards run side by side."""
    rows = []
    for name, phases in [("launcher", launcher), *((child.title, _phases(child)) for child in [*shards, router])]:
        rows += [(name if not index else "", *row) for index, row in enumerate(phases)]
    rows.append(("total", "", all_s))
    width = max(len(what) for _, what, _ in rows)
    return "\n".join(f"{who:<10} {what:<{width}} {took:8.3f} s" for who, what, took in rows)


def _phases(child: Child) -> list[tuple[str, float]]:
    assert child.ready_at is not None
    return child.logs.progress.durations(child.ready_at)
