"""What a scrape of /metrics says."""

from __future__ import annotations


def metrics_of(text: str) -> dict[str, float]:
    """Every series of a Prometheus text, by its name and labels."""
    pairs = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}
