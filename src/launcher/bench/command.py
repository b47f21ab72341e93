"""`launcher bench` from its options to its report."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from launcher.bench import report
from launcher.bench.apis import Sampling, choose_api
from launcher.bench.config import BenchConfig
from launcher.bench.facts import Served, command_line, machine, served
from launcher.bench.live import LiveView, table
from launcher.bench.load import Load, Progress, Target
from launcher.bench.prompts import PromptMaker, measured_tokens_per_word, offsets_of
from launcher.bench.results import Cell, median_cell
from launcher.bench.run import Run
from launcher.http_stream import BadAnswerError, Connection
from wire.text.escape import shown_in_line

# Requests of a closed-loop cell for each client, the least of any cell, and those of an open-loop cell.
PER_CLIENT, LEAST, OPEN_LOOP = 3, 16, 64


def run_bench(config: BenchConfig) -> int:
    """Measures every cell, prints the table, writes the report; returns the exit status: 130 when interrupted."""
    run = Run(options=_options(config), tool=f"launcher bench {version('tercet')}", command=command_line(config))

    def keep() -> None:
        """What is measured is not lost with what follows."""
        with _naming_folder(config):
            report.write(config.out, run)

    try:
        with _naming_folder(config):
            report.prepare(config.out)
        run.machine = machine(config.url)
        run.measured_at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        uvloop.run(_measure(config, run, keep))
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted\n")
        status = 128 + signal.SIGINT
    except (BadAnswerError, OSError, ValueError) as error:
        sys.stderr.write(f"Error: {config.url}: {shown_in_line(str(error)) or type(error).__name__}\n")
        status = 1
    except _FolderError as error:
        sys.stderr.write(f"Error: --out {error}\n")
        status = 1
    else:
        status = 0
    failed = _report(config, run)
    return status or failed


def _report(config: BenchConfig, run: Run) -> int:
    """Whatever has been measured, and where it is; 1 if requests failed in it."""
    if not run.cells:
        return 0
    if config.table or not sys.stdout.isatty():
        sys.stdout.write(report.markdown(run))
    else:
        Console().print(table(run))
    sys.stderr.write(f"Chart: {config.out / 'bench.svg'} (table: bench.md, figures: bench.json)\n")
    failed = next((cell for cell in run.cells if cell.errors), None)
    if failed is None:
        return 0
    first = shown_in_line(failed.first_error or "")
    sys.stderr.write(f"Error: some requests failed ({failed.load}), the first: {first}\n")
    return 1


class _FolderError(Exception):
    """The report cannot be written."""


@contextlib.contextmanager
def _naming_folder(config: BenchConfig) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _FolderError(f"{error.filename or config.out}: {error.strerror}") from None


async def _measure(config: BenchConfig, run: Run, keep: Callable[[], None]) -> None:
    """Fills in what the server says of itself and one cell after the other, and calls `keep` after each."""
    headers = {} if config.api_key is None else {"authorization": f"Bearer {config.api_key}"}
    try:
        async with asyncio.timeout(config.timeout):
            target, prompts, answering = await _prepare(config, headers)
    except TimeoutError:
        raise BadAnswerError(f"no answer in {config.timeout:g} s (--timeout)") from None
    run.model, run.server = answering.model, answering.server
    progress = Progress()
    numbers = iter(range(sys.maxsize))

    def take(count: int) -> list[str]:
        return [prompts.prompt(next(numbers)) for _ in range(count)]

    with LiveView(run, progress, Console(stderr=True)):
        for warm, measure in _plan(config, target, progress, take):
            await warm()
            run.cells.append(median_cell([await measure() for _ in range(config.repeats)]))
            keep()


async def _prepare(config: BenchConfig, headers: dict[str, str]) -> tuple[Target, PromptMaker, Served]:
    connection = Connection(config.url, headers)
    try:
        sampling = Sampling(config.temperature, config.ignore_eos)
        api = await choose_api(config.api, connection, sampling, config.model)
        target = Target(url=config.url, api=api, headers=headers, timeout_s=config.timeout)
        answering = await served(connection, api)
        if config.tokenizer is not None:
            return target, PromptMaker(config.prompt, config.seed, cut=offsets_of(str(config.tokenizer))), answering
        per_word = await measured_tokens_per_word(connection, api)
        return target, PromptMaker(config.prompt, config.seed, cut=None, tokens_per_word=per_word), answering
    finally:
        connection.close()


_Measurement = Callable[[], Coroutine[Any, Any, Cell]]


def _plan(
    config: BenchConfig, target: Target, progress: Progress, take: Callable[[int], list[str]]
) -> list[tuple[_Measurement, _Measurement]]:
    """For each cell its warm-up and its measurement."""

    def load() -> Load:
        return Load(target, config.output, progress)

    def closed(clients: int, count: int) -> _Measurement:
        return lambda: load().closed(take(count), clients)

    def at_rate(rate: float, count: int) -> _Measurement:
        return lambda: load().open(take(count), rate, config.seed)

    if config.rate:
        count = config.num_requests or OPEN_LOOP
        return [(closed(1, config.warmup), at_rate(rate, count)) for rate in config.rate]
    return [
        (closed(n, config.warmup * n), closed(n, config.num_requests or max(PER_CLIENT * n, LEAST)))
        for n in config.concurrency
    ]


def _options(config: BenchConfig) -> dict[str, Any]:
    """All that have a value, as JSON knows them, without the key."""
    given = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name != "api_key"}
    return {
        name: str(value) if isinstance(value, Path) else value for name, value in given.items() if value is not None
    }
