"""The figures as a Markdown table, with what was aimed at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.router import arrivals, endpoints, stages

Figures = dict[str, Any]


def markdown(report: Figures) -> str:
    """One row per figure."""
    lines = ["| What | Figure | Aim |", "|---|---|---|"]
    lines += [f"| {what} | {figure} | {aim} |" for what, figure, aim in _rows(report)]
    return "\n".join(lines)


def _rows(report: Figures) -> Iterator[tuple[str, str, str]]:
    yield from _limits(report["limits"])
    yield from _streams(report["streams"])
    for kind, cell in report["latency"].items():
        yield f"shard's answer to client's token, 1 row, {kind}", _latency(cell), ""
    yield from _requests(report["requests"])
    for rows, name in (("1", "1 row"), ("64", "64 rows")):
        for number, cell in report["queue"][rows].items():
            yield from _queue(name, number, cell)
    for name, cell in report["many_blocks"]["streams"].items():
        yield f"1,000,000 blocks: {name}", _stream(cell), ""
    yield from arrivals.lines(report["arrivals"])
    yield from stages.lines(report["stages"])
    yield from endpoints.lines(report["endpoints"])
    churn = report["many_blocks"]["churn"]
    yield "1,000,000 blocks: 16 tokens streamed, 64 clients", _closed(churn), ""


def _limits(limits: Figures) -> Iterator[tuple[str, str, str]]:
    call = limits["grpc"]
    yield (
        "machine: bare gRPC call",
        f"{call['round_trip_us']:.0f} us, {call['client_cpu_us']:.0f} us CPU; "
        f"two in flight {call['two_in_flight_per_s']:,.0f}/s",
        "",
    )
    for rows, cell in limits["sse"].items():
        figure = f"{cell['cpu_us_per_event']:.1f} us CPU, {cell['events_per_s']:,.0f}/s"
        yield f"machine: bare event through uvicorn, {rows} connections", figure, ""


def _streams(streams: Figures) -> Iterator[tuple[str, str, str]]:
    starved = ", ".join(f"{cell['starved_share'] * 100:.0f} %" for cell in streams.values())
    yield "machine: the router waited for a core (no figure below is to be trusted above 5 %)", starved, ""
    one, many = streams["1 row, hot"], streams["64 rows, hot"]
    one_paced, many_paced = streams["1 row, 3.7 ms steps"], streams["64 rows, 5 ms steps"]
    yield "steps/s, 1 row, hot", f"{one['steps_per_s']:,.0f}", "2,500"
    yield "CPU per token, 1 row, hot", f"{one['cpu_us_per_token']:.0f} us", ""
    yield "steps/s and tokens/s, 64 rows, hot", f"{many['steps_per_s']:,.0f}, {many['tokens_per_s']:,.0f}", ""
    yield "added to a token, 1 row, hot (time between tokens)", f"{1e3 / one['tokens_per_s']:.2f} ms", "0.5 ms"
    for name, aim in (("64 rows, hot", "20 us"), ("64 rows, 5 ms steps", "30 us")):
        yield f"CPU per token, {name}", _cpu(streams[name]), aim
        yield f"CPU per token, {name}, client wakes every 4 KiB", _cpu(streams[name + ", portions"]), aim
    yield "device efficiency, 1 row, 3.7 ms steps", _share(one_paced), "95 % (must: 93 %)"
    yield "device efficiency, 64 rows, 5 ms steps", _share(many_paced), "97 % (must: 95 %)"


def _requests(requests: Figures) -> Iterator[tuple[str, str, str]]:
    for name, cell in requests.items():
        if "request_us" not in cell:
            yield f"request, {name}", _closed(cell), ""
            continue
        aim = "150 us" if name.startswith("54 ") else ""
        yield f"CPU per validated request (first byte to queue), {name}", f"{cell['request_us']:.0f} us", aim
        rest = (
            f"{cell['answer_us']:.0f} us, {cell['drain_per_s']:,.0f} requests/s; connection {cell['connection_us']:.0f}"
        )
        yield f"CPU from the queue to an answer of one token, {name}", f"{rest} us", ""


def _queue(name: str, number: str, cell: Figures) -> Iterator[tuple[str, str, str]]:
    start = f"{name}, {int(number):,} queued"
    yield f"{start}: hot", _stream(cell["hot"]), ""
    yield f"{start}: paced", _stream(cell["paced"]), ""
    lag = f"{_lag(cell['hot_lag'])} hot, {_lag(cell['paced_lag'])} paced; filling {cell['fill_lag_max_ms']:.0f} max"
    yield f"{start}: loop late by (p99 / max ms)", lag, ""
    yield (
        f"{start}: memory, all hang up",
        f"{cell['router_mib_before']:.0f} to {cell['router_mib']:.0f} MiB; {cell['storm']['cpu_s']:.2f} s CPU, "
        f"loop late by {cell['storm']['lag_max_ms']:.0f} ms",
        "",
    )


def _stream(cell: Figures) -> str:
    busy = f", device {_share(cell)}" if cell["busy_share"] else ""
    return f"{cell['steps_per_s']:,.0f} steps/s, {_cpu(cell)} a token{busy}"


def _closed(cell: Figures) -> str:
    return f"{cell['requests_per_s']:,.0f}/s, {cell['cpu_us_per_request']:.0f} us CPU"


def _latency(cell: Figures) -> str:
    return f"p50 {cell['p50_ms']:.2f} ms, p99 {cell['p99_ms']:.2f} ms"


def _lag(cell: Figures) -> str:
    return f"{cell['p99_ms']:.1f} / {cell['max_ms']:.1f}"


def _cpu(cell: Figures) -> str:
    return f"{cell['cpu_us_per_token']:.1f} us"


def _share(cell: Figures) -> str:
    return f"{cell['busy_share'] * 100:.1f} %"
