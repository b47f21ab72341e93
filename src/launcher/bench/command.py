"""`launcher bench` from its options to its report."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console, RenderableType

from launcher.bench import compare, report
from launcher.bench.apis import Sampling, choose_api, explained
from launcher.bench.compare import Comparison
from launcher.bench.config import BenchConfig
from launcher.bench.facts import Served, command_line, given_options, machine, served
from launcher.bench.live import LiveView, table, table_of
from launcher.bench.load import Load, Progress, Target
from launcher.bench.made_up_prompts import MadeUpPrompts, vocabulary_of
from launcher.bench.prompts import PromptMaker, measured_tokens_per_word, offsets_of
from launcher.bench.replay import Replay, cache_counters, comparison, hit_rate, requests_of
from launcher.bench.replay_log import Recording, read_log
from launcher.bench.results import Cell, median_cell
from launcher.bench.run import Run, read_run
from launcher.http_stream import BadAnswerError, Connection, server_url
from wire.text.counting import counted
from wire.text.escape import shown_in_line

# Requests of a closed-loop cell for each client, the least of any cell, and those of an open-loop cell.
PER_CLIENT, LEAST, OPEN_LOOP = 3, 16, 64


def run_bench(config: BenchConfig) -> int:
    """Measure every cell, or compare two runs, and return the exit status: 130 when interrupted."""
    try:
        config = _with_whole_url(config)
        earlier = _runs_to_compare(config)
        recording = _recording(config)
        with _naming_folder(config):
            report.prepare(config.out)
    except (ValueError, _FolderError) as error:
        sys.stderr.write(f"Error: {error}\n")
        return 1
    if len(earlier) == 2:
        return _compare(config, earlier[0], earlier[1])
    run, status = _measured(config, recording)
    failed = _report(config, run)
    if earlier and run.cells:
        failed = _compare(config, earlier[0], run) or failed
    return status or failed


def _with_whole_url(config: BenchConfig) -> BenchConfig:
    """Raises ValueError with a sentence."""
    url = server_url(config.url)
    try:
        Connection(url, {})
    except ValueError as error:
        raise ValueError(f"--url {error}") from None
    return dataclasses.replace(config, url=url)


def _runs_to_compare(config: BenchConfig) -> list[Run]:
    """Raises ValueError with a sentence."""
    if len(config.compare) > 2:
        raise ValueError("--compare takes one bench.json, to compare this run with it, or two")
    if len(config.compare) == 2:
        useless = [opt.flag for opt in given_options(config) if opt.name not in ("compare", "table", "out")]
        if useless:
            raise ValueError(f"--compare with two files measures nothing: leave out {', '.join(useless)}")
    elif any(path.resolve() == (config.out / "bench.json").resolve() for path in config.compare):
        raise ValueError(f"--compare {config.compare[0]} would be overwritten by this run: choose another --out")
    try:
        return [read_run(path) for path in config.compare]
    except ValueError as error:
        raise ValueError(f"--compare {error}") from None


_NOT_OF_A_REPLAY = ("api", "concurrency", "rate", "prompt", "output", "warmup", "repeats", "temperature", "ignore_eos")


def _recording(config: BenchConfig) -> Recording | None:
    """Read what is replayed. Raises ValueError with a sentence."""
    if config.replay is None:
        if config.speed != 1:
            raise ValueError("--speed is for --replay: name the log, or give --rate")
        return None
    useless = [opt.flag for opt in given_options(config) if opt.name in _NOT_OF_A_REPLAY]
    if useless:
        raise ValueError(f"--replay takes loads and lengths from the log: leave out {', '.join(useless)}")
    try:
        return read_log(config.replay, config.num_requests)
    except ValueError as error:
        raise ValueError(f"--replay {error}") from None


def _measured(config: BenchConfig, recording: Recording | None) -> tuple[Run, int]:
    """What has been measured, written after every cell; and the exit status."""
    run = Run(
        options=_options(config),
        tool=f"launcher bench {version('tercet')}",
        command=command_line(config),
        machine=machine(config.url),
        measured_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )

    def keep() -> None:
        """What is measured is not lost with what follows."""
        with _naming_folder(config):
            report.write(config.out, run)

    try:
        uvloop.run(_measure(config, run, keep) if recording is None else _replay(config, run, recording, keep))
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted\n")
        return run, 128 + signal.SIGINT
    except (BadAnswerError, OSError) as error:
        sys.stderr.write(f"Error: {config.url}: {shown_in_line(explained(error))}\n")
        return run, 1
    except (ValueError, _FolderError) as error:
        sys.stderr.write(f"Error: {error}\n")
        return run, 1
    return run, 0


def _report(config: BenchConfig, run: Run) -> int:
    """Whatever has been measured, and where it is; 1 if requests failed in it."""
    if not run.cells:
        return 0
    _print(config, report.markdown(run), [table_of(run)])
    sys.stderr.write(f"Chart: {config.out / 'bench.svg'} (table: bench.md, figures: bench.json)\n")
    failed = next((cell for cell in run.cells if cell.errors), None)
    if failed is None:
        return 0
    first = shown_in_line(failed.first_error or "")
    sys.stderr.write(f"Error: some requests failed ({failed.load}), the first: {first}\n")
    return 1


def _compare(config: BenchConfig, a: Run, b: Run) -> int:
    """Run B beside run A, and where it is written; 1 if they have no load in common."""
    both = Comparison(a, b)
    if not both.rows():
        loads = (", ".join(cell.load for cell in run.cells) or "none" for run in (a, b))
        sys.stderr.write("Error: --compare: the runs have no load in common: {} (A), {} (B)\n".format(*loads))
        return 1
    try:
        with _naming_folder(config):
            chart = f"\n![{both.heading}](compare.svg)\n"
            report.write_texts(config.out, {"compare.md": both.markdown() + chart, "compare.svg": both.chart()})
    except _FolderError as error:
        sys.stderr.write(f"Error: {error}\n")
        return 1
    _print(config, both.markdown(), [table(both.heading, compare.COLUMNS, both.rows()), *both.notes()])
    sys.stderr.write(f"Chart: {config.out / 'compare.svg'} (table: compare.md)\n")
    return 0


def _print(config: BenchConfig, markdown: str, shown: Sequence[RenderableType]) -> None:
    """`shown` on a terminal, unless --table asks for Markdown, which a pipe or a file always gets."""
    if config.table or not sys.stdout.isatty():
        sys.stdout.write(markdown)
    else:
        Console().print(*shown, sep="\n", highlight=False, markup=False)
    sys.stdout.flush()


class _FolderError(Exception):
    """The report cannot be written."""


@contextlib.contextmanager
def _naming_folder(config: BenchConfig) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _FolderError(f"--out {error.filename or config.out}: {error.strerror}") from None


async def _measure(config: BenchConfig, run: Run, keep: Callable[[], None]) -> None:
    """Fill in the server's facts and the cells one by one, and call `keep` after each."""
    headers = {} if config.api_key is None else {"authorization": f"Bearer {config.api_key}"}
    try:
        async with asyncio.timeout(config.timeout):
            target, prompts, answering = await _prepare(config, headers)
    except TimeoutError:
        raise BadAnswerError(f"no answer in {config.timeout:g} s (--timeout)") from None
    run.model, run.server = answering.model, answering.server
    progress = Progress()
    numbers = iter(range(sys.maxsize))

    def next_prompts(count: int) -> list[str]:
        return [prompts.prompt(next(numbers)) for _ in range(count)]

    with LiveView(run, progress, Console(stderr=True)):
        for warm, measure in _plan(config, target, progress, next_prompts):
            await warm()
            run.cells.append(median_cell([await measure() for _ in range(config.repeats)]))
            keep()


async def _replay(config: BenchConfig, run: Run, recording: Recording, keep: Callable[[], None]) -> None:
    """Send what the log has."""
    headers = {} if config.api_key is None else {"authorization": f"Bearer {config.api_key}"}
    connection = Connection(config.url, headers)
    try:
        async with asyncio.timeout(config.timeout):
            api = await choose_api("openai", connection, Sampling(None, ignore_eos=True), config.model)
            answering = await served(connection, api)
            made_up = None
            if any(arrival.hashed is not None for arrival in recording.arrivals):
                tokenizer = None if config.tokenizer is None else str(config.tokenizer)
                made_up = MadeUpPrompts(await vocabulary_of(connection, tokenizer), config.seed)
    except TimeoutError:
        connection.close()
        raise BadAnswerError(f"no answer in {config.timeout:g} s (--timeout)") from None
    run.model, run.server = answering.model, answering.server
    fixed = {name: value for name, value in api.body("", 1).items() if name not in ("prompt", "max_tokens")}
    requests = requests_of(recording, config.speed, config.model, made_up, fixed)
    progress = Progress()
    replay = Replay(config.url, headers, config.timeout, progress)
    before = await cache_counters(connection)
    with LiveView(run, progress, Console(stderr=True)):
        run.cells.append(await replay.run(requests, f"replay x{config.speed:g}"))
    after = await cache_counters(connection)
    connection.close()
    run.replayed = comparison(recording, replay.outcome, hit_rate(before, after))
    keep()
    for why, count in recording.left_out.items():
        sys.stderr.write(f"Left out: {counted(count, 'line')} {why}\n")


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
    config: BenchConfig, target: Target, progress: Progress, next_prompts: Callable[[int], list[str]]
) -> list[tuple[_Measurement, _Measurement]]:
    """For each cell its warm-up and its measurement."""

    def load() -> Load:
        return Load(target, config.output, progress)

    def closed(clients: int, count: int) -> _Measurement:
        return lambda: load().closed(next_prompts(count), clients)

    def at_rate(rate: float, count: int) -> _Measurement:
        return lambda: load().open(next_prompts(count), rate, config.seed)

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
    return {name: _for_json(value) for name, value in given.items() if value is not None}


def _for_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_for_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value
