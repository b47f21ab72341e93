"""`--batch-dir`: records and files on the disk, of one server at a time.

    files/ID        what a client has sent, or gets          files/ID.json     its FileRecord
    incoming/ID     an upload that has not come whole        batches/ID.json   a BatchRecord
    unfinished      is there while a batch has not ended

A record is written after what it speaks of, and replaced whole, so that a server that is killed leaves no record of
what is not there. What has no record is removed at the next start, but for the answers of batches that have not ended.
Functions that write may run on threads; `files` and `batches` are changed on the event loop alone.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import orjson

from router.api.batches.records import ENDED, BatchRecord, FileRecord
from wire.cli.batch_options import UNFINISHED

Record = TypeVar("Record", FileRecord, BatchRecord)


class FolderError(Exception):
    """A folder that cannot be used; the text names it."""


class BatchFolder:
    """All that is kept; ids in paths are always those of records, never a client's text."""

    def __init__(self, path: Path, lock: int) -> None:
        self._path = path
        self._lock: int | None = lock
        self.files = {one.id: one for one in _read(path / "files", lambda fields: FileRecord(**fields))}
        self.batches = {one.id: one for one in _read(path / "batches", lambda fields: BatchRecord(**fields))}
        self._remove_unrecorded()
        self.mark(has_unfinished=self.has_unfinished)

    @classmethod
    def open(cls, path: Path) -> BatchFolder:
        """Raises FolderError."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in ("files", "batches", "incoming"):
                (path / name).mkdir(mode=0o700, exist_ok=True)
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return cls(path, lock)
            except BaseException:
                os.close(lock)
                raise
        except BlockingIOError:
            raise FolderError(f"{path} is that of another server that runs: give each its own") from None
        except OSError as error:
            raise FolderError(f"{path}: {error.strerror}") from None

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def has_unfinished(self) -> bool:
        return any(batch.status not in ENDED for batch in self.batches.values())

    def mark(self, *, has_unfinished: bool) -> None:
        """Say whether a batch has not ended. Raises OSError."""
        path = self._path / UNFINISHED
        if has_unfinished:
            path.touch()
        else:
            path.unlink(missing_ok=True)

    def data(self, file_id: str) -> Path:
        return self._path / "files" / file_id

    def incoming(self, file_id: str) -> Path:
        return self._path / "incoming" / file_id

    def owned_bytes(self, owner: str) -> int:
        """Return the bytes of an owner's files, and of the answers that batches have by now."""
        return self._num_bytes(lambda record: record.owner == owner)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of everyone's files, and of the answers that batches have by now."""
        return self._num_bytes(lambda record: True)

    def _num_bytes(self, counts: Callable[[FileRecord | BatchRecord], bool]) -> int:
        held = sum(file.num_bytes for file in self.files.values() if counts(file))
        unended = (one for one in self.batches.values() if one.status not in ENDED and counts(one))
        ids = (file_id for one in unended for file_id in one.written_ids if file_id not in self.files)
        return held + sum(_size(self.data(file_id)) for file_id in ids)

    def accept(self, file: FileRecord) -> None:
        """Take over what has come in, or leave nothing of it. Raises OSError."""
        path = self.incoming(file.id)
        _sync(path)
        try:
            os.replace(path, self.data(file.id))
            self.write_file(file)
        except OSError:
            self.unlink_file(file.id)
            raise

    def write_file(self, file: FileRecord) -> None:
        """Raises OSError."""
        _write(self._path / "files" / f"{file.id}.json", asdict(file))

    def unlink_file(self, file_id: str) -> None:
        """Raises OSError."""
        (self._path / "files" / f"{file_id}.json").unlink(missing_ok=True)
        self.data(file_id).unlink(missing_ok=True)

    def write_batch(self, batch_id: str, fields: dict[str, Any]) -> None:
        """Raises OSError."""
        _write(self._path / "batches" / f"{batch_id}.json", fields)

    def unlink_batch(self, batch_id: str) -> None:
        """Raises OSError."""
        (self._path / "batches" / f"{batch_id}.json").unlink(missing_ok=True)

    def _remove_unrecorded(self) -> None:
        running = (one for one in self.batches.values() if one.status not in ENDED)
        written = {file_id for one in running for file_id in one.written_ids}
        for name, known in (
            ("files", self.files.keys() | written), ("batches", self.batches.keys()), ("incoming", frozenset[str]()),
        ):  # fmt: skip
            for path in (self._path / name).iterdir():
                if path.name.removesuffix(".json") not in known:
                    path.unlink()


def _read(folder: Path, made: Callable[[dict[str, Any]], Record]) -> Iterable[Record]:
    """Yield a folder's records. Raises FolderError."""
    for path in folder.glob("*.json"):
        try:
            yield made(orjson.loads(path.read_bytes()))
        except (ValueError, TypeError) as error:
            raise FolderError(f"{path} is damaged ({error}): move it elsewhere") from None


def _write(path: Path, record: dict[str, Any]) -> None:
    """Replace a record whole, so that it is there after a loss of power."""
    new = path.with_suffix(".new")
    try:
        new.write_bytes(orjson.dumps(record))
        _sync(new)
        os.replace(new, path)
        _sync(path.parent)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
