"""OpenAI's own client keeps files and batches here, which are answered, ended and found again after a restart."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch
from router_fakes import Router, failing, says, until

from router.api.batches import folder, routes, service
from router.config import RouterConfig
from router.errors import GenerationError
from router.events import Event
from router.keys.accounts import Accounts
from router.keys.charges import charging
from router.metrics import Metrics
from router.request import ValidRequest
from wire import batch_lines
from wire.keys import Key, digest_of

MakeRouter = Callable[..., Router]
URL = "/v1/completions"


class Server:
    """A router that keeps batches, and a client of it."""

    def __init__(self, router: Router, api_key: str) -> None:
        self.router = router
        self.client = self.client_of(api_key)

    def client_of(self, api_key: str) -> openai.AsyncOpenAI:
        transport = httpx.ASGITransport(app=self.router.app, raise_app_exceptions=False)
        http = httpx.AsyncClient(transport=transport)
        return openai.AsyncOpenAI(base_url="http://router/v1", api_key=api_key, http_client=http, max_retries=0)

    @property
    def metrics(self) -> list[str]:
        return self.router.metrics.render().decode().splitlines()

    async def upload(self, content: bytes, **options: Any) -> str:
        options = {"purpose": "batch"} | options
        return (await self.client.files.create(file=("in.jsonl", content), **options)).id

    async def begin(self, *rows: Any, endpoint: Any = URL, **options: Any) -> Batch:
        file_id = await self.upload(lines(*rows))
        return await self.client.batches.create(
            input_file_id=file_id, endpoint=endpoint, completion_window="24h", **options
        )

    async def ended(self, batch: Batch) -> Batch:
        assert self.router.batches is not None
        record = self.router.batches.folder.batches[batch.id]
        await until(lambda: record.status in ("completed", "failed", "expired", "cancelled"))
        return await self.client.batches.retrieve(batch.id)

    async def rows(self, file_id: str | None) -> dict[str, Any]:
        assert file_id is not None
        text = (await self.client.files.content(file_id)).text
        found = [json.loads(line) for line in text.splitlines()]
        assert len({row["custom_id"] for row in found}) == len(found)
        return {row["custom_id"]: row for row in found}


def row(name: str, prompt: str = "x", **changes: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": URL, "body": {"prompt": prompt, "max_tokens": 2}} | changes


def lines(*rows: Any) -> bytes:
    return "".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in rows).encode()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_TICK_S", 0.01)
    monkeypatch.setattr(service, "_LONGEST_PAUSE_S", 0.01)


@pytest.fixture
def serving(make_router: MakeRouter, tmp_path: Path) -> Callable[..., Any]:
    @asynccontextmanager
    async def serve(
        script: Any = None, *, keys: Sequence[Key] = (), client_key: str = "one", **options: Any
    ) -> AsyncIterator[Server]:
        config = RouterConfig(tokenizer_name="some/model", batch_dir=tmp_path / "batches", **options)
        router = make_router(script, config=config, keys=keys)
        assert router.batches is not None
        async with router.batches.running(router.app):
            yield Server(router, client_key)
        router.assert_idle()

    return serve


def hanging(*prompts: str) -> Callable[[ValidRequest], Sequence[Event | None]]:
    """A script that never ends these prompts."""
    return lambda request: [None] if request.inputs in prompts else says(" one", " two")


async def test_a_batch_is_answered(serving: Callable[..., Any]) -> None:
    async with serving() as server:
        client = server.client
        batch = await server.begin(row("a"), row("b"), row("bad", "", body={"prompt": 1}), metadata={"of": "me"})
        assert batch.status == "validating" and batch.request_counts is not None and batch.completion_window == "24h"
        ended = await server.ended(batch)
        assert ended.status == "completed" and ended.metadata == {"of": "me"} and ended.errors is None
        assert ended.request_counts is not None and ended.request_counts.to_dict() == {
            "total": 3, "completed": 2, "failed": 1,
        }  # fmt: skip
        assert ended.created_at <= ended.in_progress_at <= ended.finalizing_at <= ended.completed_at
        answers, failures = await server.rows(ended.output_file_id), await server.rows(ended.error_file_id)
        assert answers.keys() == {"a", "b"} and failures.keys() == {"bad"}
        assert answers["a"]["response"]["body"]["choices"][0]["text"] == " one two"
        assert answers["a"]["response"]["status_code"] == 200 and answers["a"]["error"] is None
        assert answers["a"]["response"]["request_id"]
        assert failures["bad"]["response"]["status_code"] == 400
        assert failures["bad"]["response"]["body"]["error"]["param"] == "prompt"
        output = await client.files.retrieve(ended.output_file_id)
        assert output.purpose == "batch_output" and output.filename == f"{batch.id}_output.jsonl"
        assert output.bytes == len((await client.files.content(output.id)).content)

        again = await server.ended(await server.begin(row("c")))
        assert again.error_file_id is None
        assert [one.id async for one in await client.batches.list(limit=1)] == [again.id, batch.id]
        purposes = [one.purpose async for one in await client.files.list(limit=2, order="asc")]
        assert sorted(purposes) == ["batch", "batch", "batch_output", "batch_output", "batch_output"]
        assert len((await client.files.list(purpose="batch")).data) == 2


async def test_others_come_first(serving: Callable[..., Any]) -> None:
    async with serving() as server:
        await server.ended(await server.begin(row("a"), row("b", body={"prompt": "x", "service_tier": "default"})))
        assert {request.priority for request in server.router.scheduler.submitted} == {1}
        await server.client.completions.create(model="tgi", prompt="x")
        assert server.router.scheduler.last.priority == 0


async def test_half_of_the_permits_are_left(serving: Callable[..., Any]) -> None:
    async with serving(hanging("x")) as server:
        batch = await server.begin(*(row(str(number)) for number in range(9)))
        await until(lambda: len(server.router.scheduler.open) == 2)
        assert (await server.client.completions.create(model="tgi", prompt="y")).choices[0].text == " one two"
        assert len(server.router.scheduler.open) == 2
        await server.client.batches.cancel(batch.id)
        await server.ended(batch)


@pytest.mark.parametrize(
    ("rows", "line", "says"),
    [
        ([row("a"), "{"], 2, "not JSON"),
        ([row("a"), row("a")], 2, "custom_id is that of line 1 too"),
        ([row("a", url="/v1/embeddings")], 1, "endpoint"),
        ([row("a", method="GET")], 1, "`method` must be POST"),
        ([row("a", body={"prompt": "x", "stream": True})], 1, "`stream` must be false"),
        ([], None, "no requests"),
    ],
)
async def test_a_wrong_file_fails_as_a_whole(
    serving: Callable[..., Any], rows: list[Any], line: int | None, says: str
) -> None:
    async with serving() as server:
        ended = await server.ended(await server.begin(*rows))
        assert ended.status == "failed" and ended.failed_at and ended.errors is not None
        [error] = ended.errors.data
        assert says in error.message and error.line == line and "/" not in error.message.split("`")[0]
        assert server.router.scheduler.submitted == []


async def test_all_faults_of_a_file_are_said(serving: Callable[..., Any]) -> None:
    async with serving() as server:
        wrong = row("b", method="GET", url="/v1/embeddings")
        ended = await server.ended(await server.begin(row("a"), wrong, "{", row("a")))
        assert [(one.line, one.code, one.param) for one in ended.errors.data] == [
            (2, "invalid_request", "method"), (2, "url_mismatch", "url"), (3, "invalid_json_line", None),
            (4, "duplicate_custom_id", "custom_id"),
        ]  # fmt: skip
        ended = await server.ended(await server.begin(*["{"] * 1000))
        assert [one.line for one in ended.errors.data] == list(range(1, 101))


class FullDisk:
    """Has no room while `is_full`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = True
        self.num_refused = 0
        monkeypatch.setattr(folder, "_sync", self.guarding(folder._sync))
        monkeypatch.setattr(batch_lines, "_write", self.guarding(batch_lines._write))

    def guarding(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any) -> Any:
            if not self.is_full:
                return write(*arguments)
            if write.__name__ == "_write":
                os.write(arguments[0], arguments[1][:5])  # the beginning of a line still finds room
            self.num_refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        return guarded


def stored(path: Path) -> set[str]:
    return {str(one.relative_to(path)) for one in path.rglob("*") if one.is_file()} - {"lock"}


async def test_a_full_disk_keeps_nothing(
    serving: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving() as server:
        file_id = await server.upload(lines(row("a")))
        before = stored(tmp_path / "batches")
        disk = FullDisk(monkeypatch)
        for ask in (
            lambda: server.upload(lines(row("b"))),
            lambda: server.client.batches.create(input_file_id=file_id, endpoint=URL, completion_window="24h"),
        ):
            with pytest.raises(openai.InternalServerError, match="disk for batches is full") as refused:
                await ask()
            assert refused.value.status_code == 507
            assert (refused.value.code, refused.value.type) == ("insufficient_storage", "server_error")
            assert stored(tmp_path / "batches") == before
        assert [one.id for one in (await server.client.files.list()).data] == [file_id]
        assert (await server.client.batches.list()).data == []
        assert 'tgi_request_refused{reason="disk_full"} 2' in server.metrics
        disk.is_full = False
        await server.ended(await server.begin(row("a")))


async def test_an_upload_that_fills_the_disk_leaves_nothing(
    serving: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read_form(body: AsyncIterator[bytes], boundary: bytes, write: Callable[[bytes], object]) -> Any:
        def filling(content: bytes) -> None:
            write(content[:100])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        return await real(body, boundary, filling)

    real = routes.read_form
    async with serving() as server:
        before = stored(tmp_path / "batches")
        monkeypatch.setattr(routes, "read_form", read_form)
        with pytest.raises(openai.InternalServerError, match="disk for batches is full"):
            await server.upload(b"x" * 1_000_000)
        assert stored(tmp_path / "batches") == before
        assert "tgi_batch_api_disk_errors 1" in server.metrics


async def test_a_batch_waits_for_room(serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as server:
        file_id = await server.upload(lines(*(row(str(number)) for number in range(3))))
        batch = await server.client.batches.create(input_file_id=file_id, endpoint=URL, completion_window="24h")
        disk = FullDisk(monkeypatch)
        await until(lambda: disk.num_refused > 5)
        shown = await server.client.batches.retrieve(batch.id)
        assert shown.status in ("in_progress", "finalizing")
        [error] = shown.errors.data
        assert error.code == "insufficient_storage" and "No space left on device" in error.message
        assert shown.request_counts.completed < 3
        disk.is_full = False
        ended = await server.ended(batch)
        assert ended.status == "completed" and ended.errors is None
        assert (await server.rows(ended.output_file_id)).keys() == {"0", "1", "2"}
        assert "tgi_batch_api_disk_errors 0" not in server.metrics


async def test_a_batch_ends_once_there_is_room(serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(hanging("wait")) as server:
        batches = [await server.begin(row("a"), row("b", "wait")) for _ in range(2)]
        records = [server.router.batches.folder.batches[batch.id] for batch in batches]
        await until(lambda: all(record.num_answered for record in records))
        disk = FullDisk(monkeypatch)
        assert (await server.client.batches.cancel(batches[0].id)).status == "cancelling"
        records[1].expires_at = 0
        await until(lambda: disk.num_refused > 5)
        disk.is_full = False
        first, second = [await server.ended(batch) for batch in batches]
        assert first.status == "cancelled" and second.status == "expired"
        assert (await server.rows(second.error_file_id)).keys() == {"b"}
        failed = await server.begin("{")
    async with serving() as server:  # the ends are on the disk
        assert (await server.client.batches.retrieve(first.id)) == first
        assert (await server.client.batches.retrieve(second.id)) == second
        assert (await server.ended(failed)).status == "failed"


async def test_metrics_tell_how_far_batches_are(serving: Callable[..., Any]) -> None:
    async with serving(hanging("wait")) as server:
        assert 'tgi_batch_api_batches{status="in_progress"} 0' in server.metrics
        ended = await server.ended(await server.begin(row("a"), row("bad", body={"prompt": 1})))
        batch = await server.begin(row("a"), row("b", "wait"), row("c", "wait"), row("d", "wait"))
        await until(lambda: len(server.router.scheduler.open) == 2)
        sizes = [file.bytes for file in (await server.client.files.list()).data]
        half = server.router.batches.folder.batches[batch.id].answers_id
        stored = sum(sizes) + len(server.router.batches.folder.data(half).read_bytes())
        for line in (
            'batches{status="in_progress"} 1', 'batches{status="completed"} 1', 'batches{status="failed"} 0',
            'requests{outcome="completed"} 2', 'requests{outcome="failed"} 1', "requests_waiting 3",
            f"stored_bytes {stored}", "disk_errors 0",
        ):  # fmt: skip
            assert f"tgi_batch_api_{line}" in server.metrics
        server.router.batches.folder.batches[batch.id].expires_at = 0
        await server.ended(batch)
        assert 'tgi_batch_api_requests{outcome="expired"} 3' in server.metrics
        assert "tgi_batch_api_requests_waiting 0" in server.metrics and ended.status == "completed"


async def test_a_batch_is_cancelled(serving: Callable[..., Any]) -> None:
    async with serving(hanging("wait")) as server:
        batch = await server.begin(row("a"), row("b", "wait"), row("c", "wait"), row("d"))
        await until(lambda: len(server.router.scheduler.open) == 2)
        assert (await server.client.batches.retrieve(batch.id)).status == "in_progress"
        with pytest.raises(openai.ConflictError, match="still reads the file"):
            await server.client.files.delete(batch.input_file_id)
        assert (await server.client.batches.cancel(batch.id)).status == "cancelling"
        ended = await server.ended(batch)
        assert ended.status == "cancelled" and ended.cancelled_at and ended.error_file_id is None
        assert (await server.rows(ended.output_file_id)).keys() == {"a"}
        with pytest.raises(openai.ConflictError, match="cancelled cannot be cancelled"):
            await server.client.batches.cancel(batch.id)
        assert (await server.client.files.delete(batch.input_file_id)).deleted
        await server.client.files.delete(ended.output_file_id)
        assert (await server.client.files.list()).data == []


async def test_what_came_too_late_is_said(serving: Callable[..., Any]) -> None:
    async with serving(hanging("wait")) as server:
        batch = await server.begin(row("a"), row("b", "wait"), row("c", "wait"), row("d"))
        await until(lambda: len(server.router.scheduler.open) == 2)
        server.router.batches.folder.batches[batch.id].expires_at = 0
        ended = await server.ended(batch)
        assert ended.status == "expired" and ended.expired_at
        failures = await server.rows(ended.error_file_id)
        assert failures.keys() == {"b", "c", "d"}
        assert {one["error"]["code"] for one in failures.values()} == {"batch_expired"}
        assert (await server.rows(ended.output_file_id)).keys() == {"a"}


async def test_a_batch_outlives_its_server(serving: Callable[..., Any]) -> None:
    names = [str(number) for number in range(12)]
    async with serving(hanging("5")) as server:
        batch = await server.begin(row("bad", body={"prompt": 1}), *(row(name, name) for name in names))
        record = server.router.batches.folder.batches[batch.id]
        await until(lambda: record.num_answered == 11)
        await until(lambda: record.num_failed == 1)
    async with serving() as server:
        ended = await server.ended(batch)
        assert [request.inputs for request in server.router.scheduler.submitted] == ["5"]
        assert ended.status == "completed" and ended.request_counts is not None
        assert (await server.rows(ended.output_file_id)).keys() == set(names)
        assert (await server.rows(ended.error_file_id)).keys() == {"bad"}
    async with serving() as server:  # one that has ended stays as it is
        assert (await server.client.batches.retrieve(batch.id)) == ended
        assert (await server.rows(ended.output_file_id)).keys() == set(names)


async def test_a_stop_while_a_batch_ends_loses_nothing(
    serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = []

    async with serving() as server:
        kept = server.router.batches.folder
        write = kept.write_batch

        def stops(batch_id: str, fields: dict[str, Any]) -> None:
            saved.append(fields["status"])
            if fields["status"] == "completed":
                raise OSError(5, "the server is gone")
            write(batch_id, fields)

        monkeypatch.setattr(kept, "write_batch", stops)
        batch = await server.begin(row("a"), row("b"))
        await until(lambda: "completed" in saved)
    async with serving() as server:
        ended = await server.ended(batch)
        assert ended.status == "completed" and server.router.scheduler.submitted == []
        assert (await server.rows(ended.output_file_id)).keys() == {"a", "b"}


async def test_a_failure_is_tried_again(serving: Callable[..., Any]) -> None:
    asked: list[str] = []

    def script(request: ValidRequest) -> Sequence[Event]:
        asked.append(request.inputs)
        is_well = request.inputs == "twice" and asked.count("twice") == 3
        return says(" one") if is_well else failing(error=GenerationError("the shard is gone"))

    async with serving(script) as server:
        ended = await server.ended(await server.begin(row("a", "twice"), row("b", "always")))
        assert (await server.rows(ended.output_file_id)).keys() == {"a"}
        failures = await server.rows(ended.error_file_id)
        assert failures["b"]["response"]["status_code"] == 500 and asked.count("always") == 4
        assert 'tgi_batch_api_requests{outcome="retried"} 5' in server.metrics


async def test_a_busy_server_is_waited_for(serving: Callable[..., Any]) -> None:
    async with serving() as server:
        permits = server.router.inference.permit_pool
        assert permits.acquire(4)
        batch = await server.begin(row("a"))
        record = server.router.batches.folder.batches[batch.id]
        await until(lambda: record.status == "in_progress")
        await until(lambda: 'tgi_batch_api_requests{outcome="limited"} 0' not in server.metrics)
        assert record.num_failed == 0
        permits.give_back(4)
        ended = await server.ended(batch)
        assert ended.request_counts is not None and ended.request_counts.completed == 1


KEYS = [
    Key(name="first", digest=digest_of(b"one"), concurrent=1),
    Key(name="second", digest=digest_of(b"two")),
]


async def test_a_key_sees_its_own(serving: Callable[..., Any]) -> None:
    async with serving(keys=KEYS) as server:
        batch = await server.begin(row("a"))
        other = server.client_of("two")
        for ask in (
            other.files.retrieve(batch.input_file_id), other.files.content(batch.input_file_id),
            other.files.delete(batch.input_file_id), other.batches.retrieve(batch.id), other.batches.cancel(batch.id),
            other.batches.create(input_file_id=batch.input_file_id, endpoint=URL, completion_window="24h"),
        ):  # fmt: skip
            with pytest.raises(openai.NotFoundError) as refused:
                await ask
            assert refused.value.code == "not_found" and refused.value.type == "invalid_request_error"
        assert (await other.files.list()).data == [] and (await other.batches.list()).data == []
        for ask in (server.client_of("no").files.list(), server.client_of("no").batches.list()):
            with pytest.raises(openai.AuthenticationError):
                await ask
        await server.ended(batch)
        assert [request.key for request in server.router.scheduler.submitted] == ["first"]


async def test_a_batch_does_not_hold_up_its_key(serving: Callable[..., Any]) -> None:
    async with serving(hanging("wait"), keys=KEYS) as server:
        batch = await server.begin(row("a", "wait"), row("b", "wait"))
        await until(lambda: len(server.router.scheduler.open) == 2)
        assert (await server.client.completions.create(model="tgi", prompt="y")).choices[0].text == " one two"
        server.router.accounts.set(KEYS[1:])
        for entry in list(server.router.scheduler.open):
            entry.interrupt(failing(error=GenerationError("gone"))[0])
        await until(lambda: server.router.batches.folder.batches[batch.id].num_failed == 2)
    async with serving(keys=KEYS) as server:
        failures = await server.rows((await server.ended(batch)).error_file_id)
        assert {one["response"]["status_code"] for one in failures.values()} == {401}


async def test_behind_a_front_its_limits_hold(serving: Callable[..., Any], tmp_path: Path) -> None:
    now = [0.0]
    keys = [Key(name="first", digest=digest_of(b"one"), requests_per_minute=60)]
    front = Accounts(keys, Metrics(), lambda: now[0], part="front")
    limits = await charging(tmp_path / "limits", front)
    async with serving(keys=keys, front_uds=tmp_path / "limits") as server:
        batch = await server.begin(*(row(str(number)) for number in range(62)))
        record = server.router.batches.folder.batches[batch.id]
        await until(lambda: 'tgi_batch_api_requests{outcome="limited"} 0' not in server.metrics)
        assert record.num_failed == 0 and len(server.router.scheduler.submitted) <= 60
        now[0] = 60.0
        assert (await server.ended(batch)).request_counts.completed == 62
    limits.close()
    await asyncio.sleep(0.01)  # for the transports to close


async def test_without_keys_the_front_is_not_asked(serving: Callable[..., Any], tmp_path: Path) -> None:
    async with serving(front_uds=tmp_path / "nothing") as server:
        assert (await server.ended(await server.begin(row("a")))).request_counts.completed == 1
        assert 'tgi_batch_api_requests{outcome="limited"} 0' in server.metrics


async def test_a_file_says_whether_batches_have_not_ended(serving: Callable[..., Any], tmp_path: Path) -> None:
    mark = tmp_path / "batches" / "unfinished"
    async with serving(hanging("wait")) as server:
        assert not mark.exists()
        ended, waiting = await server.begin(row("a")), await server.begin(row("a", "wait"))
        await server.ended(ended)
        assert mark.exists()
    assert mark.exists()
    mark.unlink()
    async with serving() as server:
        assert mark.exists()
        await server.ended(waiting)
        await until(lambda: not mark.exists())
        refused = await server.begin("{")
        await server.ended(refused)
        await until(lambda: not mark.exists())


async def test_one_key_guards_files(serving: Callable[..., Any]) -> None:
    async with serving(api_key="one") as server:
        ended = await server.ended(await server.begin(row("a")))
        assert (await server.rows(ended.output_file_id)).keys() == {"a"}
        with pytest.raises(openai.AuthenticationError):
            await server.client_of("two").files.content(ended.output_file_id)


async def test_what_is_too_large_is_refused(serving: Callable[..., Any], tmp_path: Path) -> None:
    async with serving(batch_file_size=1000, batch_storage=1500) as server:
        for size in (1001, 80_000):
            with pytest.raises(openai.APIStatusError, match="must not exceed 1000 bytes") as refused:
                await server.upload(b"x" * size)
            assert refused.value.status_code == 413
        kept = await server.upload(b"x" * 1000)
        with pytest.raises(openai.APIStatusError, match="delete some first") as refused:
            await server.upload(b"x" * 501)
        assert refused.value.status_code == 413
        await server.client.files.delete(kept)
        await server.upload(b"x" * 501)
        assert list((tmp_path / "batches" / "incoming").iterdir()) == []


async def test_files_do_not_stay_for_ever(serving: Callable[..., Any]) -> None:
    async with serving() as server:
        file_id = await server.upload(b"x", expires_after={"anchor": "created_at", "seconds": 3600})
        file = await server.client.files.retrieve(file_id)
        assert file.expires_at == file.created_at + 3600
        kept = server.router.batches.folder
        object.__setattr__(kept.files[file_id], "expires_at", 0)
        await until(lambda: file_id not in kept.files)
        with pytest.raises(openai.NotFoundError):
            await server.client.files.content(file_id)
        batch = await server.begin(
            row("a"), extra_body={"output_expires_after": {"anchor": "created_at", "seconds": 7200}}
        )
        output = await server.client.files.retrieve((await server.ended(batch)).output_file_id)
        assert output.expires_at == output.created_at + 7200
        kept.batches[batch.id].moments = {"completed": 0}
        await until(lambda: batch.id not in kept.batches)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"purpose": "assistants"}, "`purpose` must be batch"),
        ({"expires_after": {"anchor": "created_at", "seconds": 5}}, "expires_after"),
        ({"extra_body": {"more": "x"}}, "unknown field `more`"),
    ],
)
async def test_a_wrong_upload_is_refused(serving: Callable[..., Any], options: dict[str, Any], says: str) -> None:
    async with serving() as server:
        with pytest.raises(openai.BadRequestError, match=says):
            await server.upload(b"x", **options)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"completion_window": "30m"}, "completion_window"), ({"completion_window": "31d"}, "completion_window"),
        ({"endpoint": "/v1/moderations"}, "endpoint"), ({"metadata": {"x" * 65: ""}}, "metadata"),
        ({"input_file_id": 3}, "input_file_id"),
    ],
)  # fmt: skip
async def test_a_wrong_batch_is_refused(serving: Callable[..., Any], fields: dict[str, Any], param: str) -> None:
    async with serving() as server:
        asked = {"input_file_id": await server.upload(b"x"), "endpoint": URL, "completion_window": "24h"} | fields
        with pytest.raises(openai.BadRequestError) as refused:
            await server.client.post("/batches", body=asked, cast_to=Batch)
        assert refused.value.param == param


async def test_pages_are_bounded(serving: Callable[..., Any]) -> None:
    async with serving() as server:
        for path in ("/v1/files?limit=0", "/v1/batches?limit=101", "/v1/batches?limit=x"):
            answer = await server.router.get(path)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "limit"
        for query in ("order=x", "order=", "after=file-of-another"):
            answer = await server.router.get(f"/v1/files?{query}")
            assert answer.status_code == 400 and answer.json()["error"]["param"] == query.partition("=")[0]


async def test_a_folder_has_one_server(serving: Callable[..., Any], make_router: MakeRouter, tmp_path: Path) -> None:
    config = RouterConfig(tokenizer_name="some/model", batch_dir=tmp_path / "batches")
    async with serving() as server:
        with pytest.raises(Exception, match="another server that runs"):
            make_router(config=config)
        await server.ended(await server.begin(row("a")))
    [record] = (tmp_path / "batches" / "batches").glob("*.json")
    record.write_text("{")
    with pytest.raises(Exception, match="is damaged"):
        make_router(config=config)


async def test_without_a_folder_another_way_is_named(make_router: MakeRouter) -> None:
    router = make_router()
    for path in ("/v1/files", "/v1/batches", "/v1/files/x/content"):
        answer = await router.get(path)
        assert answer.status_code == 404 and "`--batch-dir`" in answer.json()["error"]["message"]
