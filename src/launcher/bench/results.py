"""What was measured: requests, and what a cell of the table says of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(slots=True)
class RequestTimes:
    """One answered request. Times in seconds; gaps: between events, each of which brings a token or more."""

    first_token_s: float
    last_token_s: float
    gaps_s: list[float]
    output_tokens: int
    prompt_tokens: int | None


@dataclass
class Cell:
    """One measured cell; latencies in seconds, NaN without answers."""

    load: str
    output_tokens_per_s: float
    requests_per_s: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    # Seconds per output token after the first, of whole requests: gaps between tokens mislead where a server sends
    # several at once.
    tpot_p50: float
    tpot_p99: float
    num_requests: int
    short_requests: int  # answered with fewer tokens than were asked for
    prompt_tokens: float | None  # on average, as the server counts
    errors: int
    first_error: str | None = None
    # Output tokens/s of each repeat.
    repeats: list[float] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """With None for NaN, which JSON does not know."""
        return {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in asdict(self).items()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Cell:
        """From `as_json`, with NaN for times that it lacks. Raises LookupError, TypeError, ValueError."""
        times = {name: math.nan if fields.get(name) is None else float(fields[name]) for name in _TIMES}
        return cls(
            load=str(fields["load"]),
            output_tokens_per_s=float(fields["output_tokens_per_s"]),
            requests_per_s=float(fields["requests_per_s"]),
            num_requests=int(fields["num_requests"]),
            short_requests=int(fields["short_requests"]),
            prompt_tokens=fields.get("prompt_tokens"),
            errors=int(fields["errors"]),
            first_error=fields.get("first_error"),
            repeats=list(fields.get("repeats", [])),
            **times,
        )


_TIMES = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "tpot_p50", "tpot_p99")


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile; NaN for no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1]


def summarise(
    load: str, times: Sequence[RequestTimes], errors: Sequence[str], elapsed_s: float, wanted_tokens: int
) -> Cell:
    """The cell of one measured stretch of `elapsed_s` seconds."""
    gaps = [gap for t in times for gap in t.gaps_s]
    per_token = [
        (t.last_token_s - t.first_token_s) / (t.output_tokens - 1) for t in times if t.output_tokens > 1
    ]  # fmt: skip
    prompts = [t.prompt_tokens for t in times if t.prompt_tokens is not None]
    first = [t.first_token_s for t in times]
    return Cell(
        load=load,
        output_tokens_per_s=sum(t.output_tokens for t in times) / elapsed_s,
        requests_per_s=len(times) / elapsed_s,
        ttft_p50=percentile(first, 0.5),
        ttft_p99=percentile(first, 0.99),
        itl_p50=percentile(gaps, 0.5),
        itl_p99=percentile(gaps, 0.99),
        tpot_p50=percentile(per_token, 0.5),
        tpot_p99=percentile(per_token, 0.99),
        num_requests=len(times),
        short_requests=sum(t.output_tokens < wanted_tokens for t in times),
        prompt_tokens=statistics.fmean(prompts) if prompts else None,
        errors=len(errors),
        first_error=errors[0] if errors else None,
    )


_MEDIANS = ("output_tokens_per_s", "requests_per_s", *_TIMES, "prompt_tokens")


def median_cell(cells: Sequence[Cell]) -> Cell:
    """Merge the repeats of a cell: the median of each figure, the sum of each count."""
    figures: dict[str, Any] = {}
    for name in _MEDIANS:
        values = [v for cell in cells if (v := getattr(cell, name)) is not None and not math.isnan(v)]
        if values:
            figures[name] = statistics.median(values)
    return replace(
        cells[0],
        **figures,
        num_requests=sum(cell.num_requests for cell in cells),
        short_requests=sum(cell.short_requests for cell in cells),
        errors=sum(cell.errors for cell in cells),
        first_error=next((cell.first_error for cell in cells if cell.first_error), None),
        repeats=[cell.output_tokens_per_s for cell in cells],
    )
