"""Keeps files and batches, and answers the requests of these while the server runs.

Each request goes to the application as a client's would, with one priority less: so limits, errors and logs are the
same. Batches take turns, request by request, and together never take more than half of the server's permits.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import orjson
from starlette.types import ASGIApp

from router.api.batches.dispatch import Answer, ask
from router.api.batches.folder import BatchFolder, FolderError
from router.api.batches.job import Job, Pending
from router.api.batches.records import ENDED, LONGEST_S, BatchRecord, Ended, FileRecord, fault
from router.errors import StartupError
from router.keys.charges import wait_of
from router.metrics import Metrics
from wire.batch_lines import Fault, FileError
from wire.cli.batch_options import DEFAULT_FILE_SIZE, DEFAULT_STORAGE, BatchOptions
from wire.text.counting import counted

logger = logging.getLogger(__name__)

MOST_REQUESTS = 50_000
"""Of a batch; OpenAI's bound."""
MOST_UNENDED = 100
"""Batches of an owner that have not ended."""
_RETRIES = 3
_LONGEST_PAUSE_S = 30.0
_TICK_S = 1.0
_OK, _LIMITED, _FAILED, _UNAVAILABLE = 200, 429, 500, 503
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """What clients may ask for."""

    file_size: int = DEFAULT_FILE_SIZE
    storage: int = DEFAULT_STORAGE
    num_requests: int = MOST_REQUESTS
    num_unended: int = MOST_UNENDED


class Batches:
    """All batches; used on one event loop."""

    def __init__(
        self, folder: BatchFolder, limits: BatchLimits, metrics: Metrics, *, concurrency: int, front: Path | None = None
    ) -> None:
        """Take over a folder.

        Args:
            concurrency: Requests of all batches at once.
            front: Socket of what holds API keys to their limits of requests, if that is not this server.
        """
        self._front = front
        self.folder = folder
        self.limits = limits
        # One thread, so that what is written is written in order, and whole before the server ends.
        self._disk = ThreadPoolExecutor(1, "batches")
        self._slots = asyncio.Semaphore(concurrency)
        self._jobs: deque[Job] = deque()
        self._has_changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._metrics = metrics
        metrics.follow_gauge("tgi_batch_api_batches", self._by_status)
        metrics.follow_gauge("tgi_batch_api_requests_waiting", self._num_waiting)
        metrics.follow_gauge("tgi_batch_api_stored_bytes", lambda: {(): folder.num_bytes})

    @classmethod
    def open(cls, options: BatchOptions, num_permits: int, metrics: Metrics, front: Path | None = None) -> Self | None:
        """Return what `--batch-dir` asks for, if anything. Raises StartupError."""
        if options.batch_dir is None:
            return None
        try:
            folder = BatchFolder.open(options.batch_dir)
        except FolderError as error:
            raise StartupError(f"`--batch-dir`: {error}") from None
        limits = BatchLimits(
            file_size=options.batch_file_size or DEFAULT_FILE_SIZE, storage=options.batch_storage or DEFAULT_STORAGE
        )
        return cls(folder, limits, metrics, concurrency=max(1, num_permits // 2), front=front)

    def _by_status(self) -> Mapping[tuple[str, ...], int]:
        return Counter((batch.status,) for batch in self.folder.batches.values())

    def _num_waiting(self) -> Mapping[tuple[str, ...], int]:
        return {(): sum(len(job.left) + len(job.running) for job in self._jobs)}

    # What clients ask for

    def files_of(self, owner: str) -> Iterable[FileRecord]:
        return [file for file in self.folder.files.values() if file.owner == owner]

    def batches_of(self, owner: str) -> Iterable[BatchRecord]:
        return [batch for batch in self.folder.batches.values() if batch.owner == owner]

    def unended_with(self, file: FileRecord) -> BatchRecord | None:
        """Return a batch that still reads a file."""
        batches = self.folder.batches.values()
        return next((one for one in batches if one.input_file_id == file.id and one.status not in ENDED), None)

    async def add_file(self, file: FileRecord) -> None:
        """Keep an upload that is in `incoming`. Raises OSError."""
        await self._on_disk(self.folder.accept, file)
        self.folder.files[file.id] = file

    async def remove_file(self, file: FileRecord) -> None:
        """Raises OSError."""
        self.folder.files.pop(file.id, None)
        await self._on_disk(self.folder.unlink_file, file.id)

    async def add_batch(self, batch: BatchRecord) -> None:
        """Keep a batch, and begin it. Raises OSError."""
        self.folder.batches[batch.id] = batch  # counts from now on
        try:
            await self._on_disk(partial(self.folder.mark, has_unfinished=True))
            await self._save(batch)
        except BaseException:
            del self.folder.batches[batch.id]
            with suppress(OSError):
                self.folder.unlink_batch(batch.id)
            await self._unmark()
            raise
        self._spawn(self._start(batch))

    async def cancel(self, batch: BatchRecord) -> None:
        """End a batch that has not ended."""
        batch.enter("cancelling")
        await self._try_to_save(batch)
        for job in [one for one in self._jobs if one.record is batch]:
            self._end(job, "cancelled")

    # How they are answered

    @asynccontextmanager
    async def running(self, app: ASGIApp) -> AsyncIterator[None]:
        """Answer requests as long as the block runs, those of an earlier server first."""
        unended = [batch for batch in self.folder.batches.values() if batch.status not in ENDED]
        if unended:
            logger.info("--batch-dir: unfinished batches are continued: %d", len(unended))
        for batch in sorted(unended, key=lambda one: one.created_at):
            self._spawn(self._start(batch))
        self._spawn(self._send_all(app))
        self._spawn(self._tick_forever())
        try:
            yield
        finally:
            jobs = list(self._jobs)
            tasks = [*self._tasks, *(task for job in jobs for task in job.running)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(self._disk.shutdown)
            for job in jobs:
                job.close()
            self.folder.close()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("work on batches has failed: %s", error, exc_info=error)

    async def _save(self, batch: BatchRecord) -> None:
        """Raises OSError."""
        await self._on_disk(self.folder.write_batch, batch.id, asdict(batch) | {"blocked": ""})

    async def _unmark(self) -> None:
        """Say that all batches have ended, if they have."""
        if not self.folder.has_unfinished:
            await self._on_disk(partial(self.folder.mark, has_unfinished=False))

    async def _try_to_save(self, batch: BatchRecord) -> None:
        """Save a status that a later one follows."""
        try:
            await self._save(batch)
        except OSError as error:
            self._block(batch, error)

    async def _until_written(self, batch: BatchRecord, write: Callable[[], Awaitable[None]]) -> None:
        """Write, and again while that fails."""
        while True:
            try:
                await write()
            except OSError as error:
                self._block(batch, error)
                await asyncio.sleep(_LONGEST_PAUSE_S)
            else:
                batch.blocked = ""
                return

    def _block(self, batch: BatchRecord, error: OSError) -> None:
        self.count_error(error)
        batch.blocked = f"the server cannot write its files ({error.strerror}): the batch continues when it can"
        logger.error("%s waits: its files cannot be used: %s", batch.id, error.strerror)

    def count_error(self, error: OSError) -> bool:
        """Count a write that failed; return whether the disk is full."""
        self._metrics.count("tgi_batch_api_disk_errors")
        return error.errno in _FULL

    async def _on_disk(self, work: Callable[..., None], *arguments: Any) -> None:
        await asyncio.get_running_loop().run_in_executor(self._disk, work, *arguments)

    async def _start(self, batch: BatchRecord) -> None:
        source = self.folder.files.get(batch.input_file_id)
        try:
            if source is None:
                raise FileError(Path(batch.input_file_id), Fault("the file is not there any more"))
            path = self.folder.data(source.id)
            job = await asyncio.to_thread(Job.of, batch, self.folder, path, self.limits.num_requests)
        except (FileError, OSError) as error:
            await self._refuse(batch, error)
            return
        self._jobs.append(job)
        if batch.status == "cancelling":
            self._end(job, "cancelled")
            return
        if batch.status == "validating":
            batch.enter("in_progress")
            await self._try_to_save(batch)
        self._advance(job)

    async def _refuse(self, batch: BatchRecord, error: FileError | OSError) -> None:
        faults = error.faults if isinstance(error, FileError) else [Fault(str(error.strerror))]
        batch.faults = [fault(one.code, one.text, one.param, one.line) for one in faults]
        batch.enter("failed")
        logger.info("%s is refused: %s", batch.id, counted(len(faults), "fault"))
        await self._until_written(batch, partial(self._save, batch))
        await self._unmark()

    async def _send_all(self, app: ASGIApp) -> None:
        while True:
            await self._slots.acquire()
            job = await self._next_job()
            pending = job.left.popleft()
            task = asyncio.get_running_loop().create_task(self._answer(app, job, pending))
            job.running[task] = pending
            task.add_done_callback(partial(self._answered, job))

    async def _next_job(self) -> Job:
        """Wait for the one whose turn it is."""
        loop = asyncio.get_running_loop()
        while True:
            self._has_changed.clear()
            waiting = [job for job in self._jobs if job.left and not job.is_ending]
            for job in waiting:
                if job.not_before <= loop.time():
                    self._jobs.remove(job)
                    self._jobs.append(job)
                    return job
            until = min((job.not_before for job in waiting), default=None)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._has_changed.wait()

    def _answered(self, job: Job, task: asyncio.Task[Pending | None]) -> None:
        """Put a request back that has no answer yet."""
        pending: Pending | None = job.running.pop(task)
        self._slots.release()
        self._ended(task)
        if not task.cancelled():
            if task.exception() is None:
                pending = task.result()
            else:
                job.not_before = asyncio.get_running_loop().time() + _LONGEST_PAUSE_S
        if pending is not None:
            job.left.appendleft(pending)
        self._advance(job)

    def _advance(self, job: Job) -> None:
        """Send more, or end a batch that has all its answers."""
        if job.is_done:
            self._end(job, "completed")
        self._has_changed.set()

    async def _answer(self, app: ASGIApp, job: Job, pending: Pending) -> Pending | None:
        """Write a request's answer; return the request if it is to be sent again."""
        num_failures = pending.num_failures
        try:
            answer = await self._asked(app, job, pending)
            pause_s = _pause_s(answer, num_failures)
            if pause_s is None:
                body = _json(answer.body)
                response = {"status_code": answer.status, "request_id": answer.request_id, "body": body}
                job.answered(pending.line, response)
                job.record.blocked = ""
                self._count("completed" if answer.status == _OK else "failed")
                return None
            has_failed = answer.status not in (_LIMITED, _UNAVAILABLE)
            self._count("retried" if has_failed else "limited")
            num_failures += has_failed
        except OSError as error:
            self._block(job.record, error)
            pause_s = _LONGEST_PAUSE_S
        job.not_before = asyncio.get_running_loop().time() + pause_s
        return Pending(pending.line, num_failures)

    def _count(self, outcome: str, number: int = 1) -> None:
        self._metrics.count("tgi_batch_api_requests", number, outcome=outcome)

    async def _asked(self, app: ASGIApp, job: Job, pending: Pending) -> Answer:
        """Raises OSError of the batch's file."""
        body = job.body(pending.line)
        owner = job.record.owner  # empty without keys, and then there are no limits
        if owner and self._front is not None and (wait_s := await wait_of(self._front, owner)):
            return Answer(_LIMITED, b"", "", wait_s)
        try:
            return await ask(app, job.record.endpoint, body, owner)
        except Exception:
            # The application logs what it did not foresee, and has answered before it raises that again.
            return Answer(_FAILED, b'{"error":{"message":"internal error","type":"server_error"}}', "", None)

    # How they end

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.time()
            for job in list(self._jobs):
                if job.is_ending:
                    continue
                if job.record.expires_at <= now:
                    self._end(job, "expired")
                else:
                    await self._sync(job)
            await self._remove_old(now)

    async def _sync(self, job: Job) -> None:
        try:
            await self._on_disk(job.sync)
        except OSError as error:
            self.count_error(error)
            logger.error("%s: %s", job.record.id, error.strerror)

    async def _remove_old(self, now: float) -> None:
        for file in [one for one in self.folder.files.values() if one.expires_at <= now]:
            if self.unended_with(file) is None:
                await self.remove_file(file)
        for batch in [one for one in self.folder.batches.values() if one.status in ENDED]:
            if max(batch.moments.values()) + LONGEST_S <= now:
                del self.folder.batches[batch.id]
                await self._on_disk(self.folder.unlink_batch, batch.id)

    def _end(self, job: Job, how: Ended) -> None:
        if not job.is_ending:
            job.is_ending = True
            self._spawn(self._finish(job, how))

    async def _finish(self, job: Job, how: Ended) -> None:
        batch = job.record
        running = list(job.running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if how != "cancelled":
            batch.enter("finalizing")
            await self._try_to_save(batch)
        if how == "expired":
            num_left = len(job.left)
            await self._until_written(batch, partial(self._on_disk, job.expire))
            self._count("expired", num_left)
        await self._until_written(batch, partial(self._on_disk, job.sync))
        await self._on_disk(job.close)
        self._jobs.remove(job)
        batch.output_file_id = await self._publish(batch, batch.answers_id, "output")
        batch.error_file_id = await self._publish(batch, batch.failures_id, "error")
        batch.enter(how)
        await self._until_written(batch, partial(self._save, batch))
        await self._unmark()
        logger.info("%s is %s: %d answered, %d failed", batch.id, how, batch.num_answered, batch.num_failed)

    async def _publish(self, batch: BatchRecord, file_id: str, name: str) -> str | None:
        """Make a file of what a batch has written; None: nothing."""
        path = self.folder.data(file_id)
        if not (size := path.stat().st_size):
            path.unlink()
            return None
        now = int(time.time())
        file = FileRecord(
            id=file_id,
            owner=batch.owner,
            filename=f"{batch.id}_{name}.jsonl",
            purpose="batch_output",
            num_bytes=size,
            created_at=now,
            expires_at=now + batch.output_life_s,
        )
        await self._until_written(batch, partial(self._on_disk, self.folder.write_file, file))
        self.folder.files[file_id] = file
        return file_id


def _pause_s(answer: Answer, num_failures: int) -> float | None:
    """Return after which time a request is sent again; None: its answer is the last."""
    if answer.status < _FAILED and answer.status != _LIMITED:
        return None
    # A server that is busy, or is stopping, has not tried.
    if answer.status not in (_LIMITED, _UNAVAILABLE) and num_failures >= _RETRIES:
        return None
    usual = min(2.0**num_failures, _LONGEST_PAUSE_S)
    return usual if answer.retry_after_s is None else max(answer.retry_after_s, 0.1)


def _json(text: bytes) -> Any:
    """Return a body; one that is not JSON as its text."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text.decode(errors="replace")
