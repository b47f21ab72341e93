"""Files of requests are checked whole, and files of answers are continued."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from wire.batch_lines import Answers, FileError, read_requests


def request(name: str, **changes: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}} | changes


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def answered(name: str, status: int = 200) -> dict[str, Any]:
    return {"id": "x", "custom_id": name, "response": {"status_code": status, "body": {}}, "error": None}


def test_requests_are_found_again_by_their_places(tmp_path: Path) -> None:
    rows = [request("a"), request("ü", url="/v1/embeddings", body={"input": "ü"}), request("c")]
    path = written(tmp_path / "in", rows[0], "", *rows[1:])
    raw = path.read_bytes()
    lines = read_requests(path)
    assert [json.loads(raw[line.start : line.start + line.size]) for line in lines] == rows
    assert [line.custom_id for line in lines] == ["a", "ü", "c"]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ({"custom_id": "b"}, "it has no `method`"),
        (request("a"), "its custom_id is that of line 1 too"),
        (request(""), "`custom_id` must be a text"),
        (request("b", method="GET"), "`method` must be POST"),
        (request("b", url="/generate"), "`url` must be one of /v1/chat/completions"),
        (request("b", body=[]), "`body` must be an object"),
        (request("b", body={"stream": True}), "`stream` must be false"),
        (request("b", priority=1), "unknown field `priority`"),
    ],
)
def test_every_wrong_line_is_named(tmp_path: Path, row: Any, says: str) -> None:
    with pytest.raises(FileError) as refused:
        read_requests(written(tmp_path / "in", request("a"), row, request("c"), "{"))
    *first, last = str(refused.value).splitlines()
    assert all(text.startswith(f"{tmp_path / 'in'}, line 2: ") for text in first) and says in "\n".join(first)
    assert last.startswith(f"{tmp_path / 'in'}, line 4: not JSON")
    assert [fault.line for fault in refused.value.faults] == [2] * len(first) + [4]


def test_a_line_may_have_several_faults(tmp_path: Path) -> None:
    rows = {"method": "GET", "url": "/v1/rerank", "body": {"stream": True}}, {}, request("a", url=3, more=1)
    with pytest.raises(FileError) as refused:
        read_requests(written(tmp_path / "in", *rows), url="/v1/completions")
    assert [(fault.line, fault.code, fault.param) for fault in refused.value.faults] == [
        (1, "invalid_request", "custom_id"), (1, "invalid_request", "method"), (1, "url_mismatch", "url"),
        (1, "invalid_request", "body.stream"),
        *((2, "invalid_request", name) for name in ("custom_id", "method", "url", "body")),
        (3, "invalid_request", "more"), (3, "url_mismatch", "url"),
    ]  # fmt: skip


def test_faults_are_bounded(tmp_path: Path) -> None:
    with pytest.raises(FileError) as refused:
        read_requests(written(tmp_path / "in", *["{"] * 1000))
    assert [fault.line for fault in refused.value.faults] == list(range(1, 101))
    assert {fault.code for fault in refused.value.faults} == {"invalid_json_line"}
    rows = [request("a"), "{", request("b"), request("c"), "{"]
    with pytest.raises(FileError) as refused:
        read_requests(written(tmp_path / "in", *rows), most=3)
    assert [(fault.line, fault.code) for fault in refused.value.faults] == [
        (2, "invalid_json_line"), (4, "too_many_tasks"),
    ]  # fmt: skip


def test_there_must_be_requests(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no requests"):
        read_requests(written(tmp_path / "in", ""))
    with pytest.raises(FileError, match="No such file"):
        read_requests(tmp_path / "absent")


def test_successes_are_kept_and_failures_and_a_torn_end_are_dropped(tmp_path: Path) -> None:
    path = written(
        tmp_path / "out", answered("a"), answered("b", 400), answered("c"), answered("d") | {"response": None}
    )
    path.chmod(0o640)
    with path.open("a") as file:
        file.write('{"id":"x","custom_id":"e","respo')
    answers = Answers.open(path, "abcdef")
    assert answers.done == {"a", "c"}
    answers.add(answered("b"))
    answers.close()
    assert [json.loads(line)["custom_id"] for line in path.read_text().splitlines()] == ["a", "c", "b"]
    assert path.stat().st_mode & 0o777 == 0o640 and [one.name for one in tmp_path.iterdir()] == ["out"]


def test_a_whole_file_is_left_as_it_is(tmp_path: Path) -> None:
    path = written(tmp_path / "out", answered("a"))
    number = path.stat().st_ino
    Answers.open(path, "a").close()
    assert path.stat().st_ino == number


@pytest.mark.parametrize(
    ("row", "says"), [(answered("z"), "no answer to a request of this batch"), ("{", "not JSON"), ("1", "not a JSON")]
)
def test_another_file_is_not_overwritten(tmp_path: Path, row: Any, says: str) -> None:
    path = written(tmp_path / "out", answered("a"), row)
    before = path.read_bytes()
    with pytest.raises(FileError, match=f"line 2: {says}"):
        Answers.open(path, "ab")
    assert path.read_bytes() == before


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    path = written(tmp_path / "out", answered("a", 500))
    answers = Answers.open(path, "a")
    with pytest.raises(FileError, match="another batch is writing it"):
        Answers.open(path, "a")
    answers.close()
    Answers.open(path, "a").close()


@pytest.mark.parametrize("seed", range(10))
def test_a_run_that_is_cut_anywhere_ends_with_the_same_lines(tmp_path: Path, seed: int) -> None:
    chosen, path, names = random.Random(seed), tmp_path / "out", [str(number) for number in range(20)]
    while True:
        answers = Answers.open(path, names)
        left = [name for name in names if name not in answers.done]
        for name in left[: chosen.randint(1, 8)]:
            answers.add(answered(name))
        answers.close()
        if not left:
            break
        if (cut := path.stat().st_size - chosen.randint(0, 150)) > 0 and chosen.random() < 0.7:
            with path.open("r+b") as file:
                file.truncate(cut)
    assert sorted(path.read_text().splitlines()) == sorted(
        json.dumps(answered(name), separators=(",", ":")) for name in names
    )
