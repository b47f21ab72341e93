"""Forms are read as they come, in whatever pieces, and what is wrong with them is said."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Sequence

import httpx
import pytest

from router.api.batches.upload import Form, boundary_of, read_form
from router.errors import RouterError, ValidationError

BOUNDARY = b"b"
FILES = [
    b"",
    b"x",
    b"\r\n",
    b"--b",
    b"\r\n--",
    b"\r\n--c--\r\n",
    b"one\r\n\r\n--two",
    bytes(range(256)) * 20,
    b"\r" * 50,
]


def form_of(*parts: tuple[str, bytes], end: bytes = b"\r\n--b--\r\n") -> bytes:
    heads = [f"Content-Disposition: form-data; {head}\r\n\r\n".encode() + content for head, content in parts]
    return b"--b\r\n" + b"\r\n--b\r\n".join(heads) + end


async def read(raw: bytes, cuts: Sequence[int] = ()) -> tuple[Form, bytes]:
    async def pieces() -> AsyncIterator[bytes]:
        places = [0, *sorted(cuts), len(raw)]
        for start, end in itertools.pairwise(places):
            yield raw[start:end]

    written = bytearray()
    return await read_form(pieces(), BOUNDARY, written.extend), bytes(written)


@pytest.mark.parametrize("content", FILES)
async def test_a_file_comes_in_any_pieces(content: bytes) -> None:
    raw = form_of(('name="purpose"', b"batch"), ('name="file"; filename="in.jsonl"', content), ('name="x"', b""))
    chosen = random.Random(len(content))
    splits = [range(len(raw)), *(chosen.sample(range(len(raw)), 5) for _ in range(50)), ()]
    for cuts in splits:
        form, written = await read(raw, list(cuts))
        assert written == content and form == Form("in.jsonl", {"purpose": "batch", "x": ""})


async def test_a_client_of_forms_is_understood() -> None:
    name = 'two words; "quoted" ü.jsonl'
    request = httpx.Request(
        "POST", "http://x/", data={"purpose": "batch"}, files={"file": (name, b"a\nb\n", "application/jsonl")}
    )
    raw = request.read()

    async def whole() -> AsyncIterator[bytes]:
        yield raw + b"an epilogue" * 1000

    written = bytearray()
    form = await read_form(whole(), boundary_of(request.headers["content-type"]), written.extend)
    assert bytes(written) == b"a\nb\n" and form.fields == {"purpose": "batch"}
    assert form.filename is not None and form.filename.startswith("two words; ") and "ü.jsonl" in form.filename


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "before its closing boundary"),
        (form_of(('name="file"; filename="x"', b"x"), end=b""), "before its closing boundary"),
        (b"--bb\r\n", "not a form"),
        (b"a preamble\r\n" + form_of(('name="file"; filename="x"', b"x")), "not a form"),
        (b"\r\n" * 9000, "before its closing boundary"),
        (b"--b\r\n\r\nx\r\n--b--", "no name"),
        (form_of(("filename=x", b"x")), "no name"),
        (form_of(('name="file"', b"x")), "with a name"),
        (form_of(*[('name="file"; filename="x"', b"x")] * 2), "two fields"),
        (form_of(('name="a"', b"x" * 1025)), "`a` is too long"),
        (form_of(*[(f'name="{number}"', b"x") for number in range(17)]), "more than 16"),
        (b"--b\r\n" + b"x" * 9000, "header size"),
        (b"--b\r\n" + b"x: " + b"x" * 9000, "header size"),
        (b"--b\r\nx:" + b" " * 9000, "header size"),
        (b"--b\r\n" + b"x: y\r\n" * 9, "header count"),
        (b"--b\r\nno header\r\n\r\n", "invalid character"),
        (b"--b\r\nContent-Disposition\r\n\r\n", "invalid character"),
    ],
)
async def test_a_wrong_form_is_refused(raw: bytes, says: str) -> None:
    for cuts in (range(len(raw)), ()):
        with pytest.raises(ValidationError, match=says):
            await read(raw, list(cuts))


@pytest.mark.parametrize("content", [b"\r\n--bx", b"\r\n--b-x", b"\r\n--b\rx", b"\r\n--", b"\r"])
async def test_what_looks_like_a_boundary_is_content(content: bytes) -> None:
    raw = form_of(('name="file"; filename="x"', content * 200))
    for cuts in (range(len(raw)), range(0, len(raw), 7), ()):
        assert (await read(raw, list(cuts)))[1] == content * 200


async def test_a_form_without_parts_has_no_file() -> None:
    assert await read(b"--b--\r\n") == (Form(), b"")


async def test_of_a_form_that_is_refused_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValidationError):
        await read(b"--secret\r\n")
    assert caplog.records == []


@pytest.mark.parametrize(
    "content_type", ["", "application/json", "multipart/form-data", "multipart/form-data; boundary=" + "x" * 71]
)
def test_another_content_type_is_refused(content_type: str) -> None:
    with pytest.raises(RouterError, match="multipart/form-data"):
        boundary_of(content_type)
