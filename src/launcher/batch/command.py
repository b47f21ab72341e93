"""`launcher batch`: OpenAI's files of requests, answered by a server that runs, or by one of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping

import uvloop

from launcher.batch.config import BatchConfig
from launcher.batch.run import Batch, Sending, UnreachableError
from launcher.chat.client import ChatError
from launcher.chat.server import Server, served
from launcher.http_stream import Connection, server_url
from wire.batch_lines import Answers, FileError, read_requests
from wire.text.counting import counted
from wire.text.escape import as_error

_CONTINUES = "the same command continues the batch"


class _OptionError(Exception):
    """Options that exclude each other, or mean nothing."""


def run_batch(config: BatchConfig, environ: Mapping[str, str]) -> int:
    """Answer the requests; 0: all, 1: not all, 2: nothing, since a file or an option is wrong, 130: interrupted."""
    try:
        _check(config)
        lines = read_requests(config.requests)
        answers = Answers.open(config.answers, frozenset(line.custom_id for line in lines))
    except (FileError, _OptionError) as error:
        for text in str(error).splitlines():
            _refuse(text, 2)
        return 2
    with contextlib.closing(answers):
        left = [line for line in lines if line.custom_id not in answers.done]
        _say(f"{counted(len(lines), 'request')}, {len(answers.done)} of them answered already")
        if not left:
            return 0
        try:
            with _server_of(config, environ) as server, config.requests.open("rb") as requests:
                batch = Batch(requests.fileno(), iter(left), answers, _sending(config, server))
                try:
                    _run(batch)
                except UnreachableError as error:
                    return _refuse(f"{server.failure() or error}; {_CONTINUES}", 1)
        except (ChatError, OSError) as error:
            return _refuse(str(error), 1)
        except KeyboardInterrupt:
            return _refuse(f"interrupted; {_CONTINUES}", 128 + signal.SIGINT)
    _say(f"{batch.num_answered} answered, {batch.num_failed} failed: {config.answers}")
    return 1 if batch.num_failed else 0


def _run(batch: Batch) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(batch.run())


def _check(config: BatchConfig) -> None:
    """Raises _OptionError."""
    if (config.url is None) == (config.model_id is None):
        raise _OptionError("give --url with a server that runs, or --model-id with a model to serve during the batch")
    if config.url is not None:
        if config.server_options:
            raise _OptionError("options after -- are for --model-id")
        try:
            Connection(server_url(config.url), {})
        except ValueError as error:
            raise _OptionError(f"--url {error}") from None
    if config.answers.exists() and config.requests.exists() and os.path.samefile(config.requests, config.answers):
        raise _OptionError(f"{config.answers} is the file of the requests: name another one for the answers")


def _sending(config: BatchConfig, server: Server) -> Sending:
    return Sending(
        url=server_url(server.url),
        headers={} if config.api_key is None else {"authorization": f"Bearer {config.api_key}"},
        concurrency=config.concurrency,
        retries=config.retries,
        timeout_s=config.timeout,
    )


@contextlib.contextmanager
def _server_of(config: BatchConfig, environ: Mapping[str, str]) -> Iterator[Server]:
    """The one that runs already, or one for as long as the block runs. Raises ChatError."""
    if config.model_id is None:
        yield Server(config.url or "")
        return
    key = {} if config.api_key is None else {"API_KEY": config.api_key}
    _say(f"starting {config.model_id}")
    options = config.server_options
    with served(config.model_id, options, {**environ, **key}, lambda said: None, needs_template=False) as server:
        yield server


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


def _refuse(text: str, status: int) -> int:
    _say(as_error(text))
    return status
