"""Which errors end the process, and error texts that always fit a gRPC trailer."""

from __future__ import annotations

from typing import Any, cast
from urllib.parse import quote

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_server.errors import BatchGoneError, FatalError, LostPeerError, OutOfMemoryError, RequestError
from model_server.rpc.interceptor import MAX_ENCODED_TEXT, answering_errors, fit_text, is_fatal


@pytest.mark.parametrize(
    ("error", "fatal"),
    [
        (RequestError("x"), False),
        (OutOfMemoryError("x"), False),
        (ValueError("x"), False),
        (KeyError("x"), False),
        (FatalError("x"), True),
        (RuntimeError("CUDA error"), True),
        (SystemExit(1), True),
    ],
)
def test_only_what_leaves_the_device_in_doubt_is_fatal(error: BaseException, fatal: bool) -> None:
    assert is_fatal(error) is fatal


@given(st.text(max_size=3000) | st.text(alphabet="ü日🙂%", min_size=1000, max_size=9000))
def test_texts_are_cut_to_what_fits(text: str) -> None:
    cut = fit_text(text)
    assert len(quote(cut)) <= MAX_ENCODED_TEXT
    assert cut == text or (cut.endswith("…") and text.startswith(cut[:-1]))


_GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711"


class _Aborted(Exception):
    pass


class _Context:
    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        raise _Aborted(code, text)


async def _said(error: Exception, name: str) -> tuple[grpc.StatusCode, str]:
    async def method(servicer: None, request: None, context: grpc.aio.ServicerContext) -> None:
        raise error

    method.__name__ = name
    with pytest.raises(_Aborted) as aborted:
        await answering_errors(method)(None, None, cast(Any, _Context()))
    code, text = aborted.value.args
    return code, text


@pytest.mark.parametrize(
    "error",
    [LostPeerError(f"rank 0 lost rank 1: {_GLOO}"), FatalError(_GLOO), RuntimeError(_GLOO), OSError(2, "x", "/a/path")],
)
@pytest.mark.parametrize("name", ["Prefill", "Decode", "FilterBatch", "ClearCache", "Health"])
async def test_what_others_say_is_for_the_log(error: Exception, name: str, caplog: pytest.LogCaptureFixture) -> None:
    code, text = await _said(error, name)
    assert (code, text) == (grpc.StatusCode.INTERNAL, "the model server failed; its log says why")
    assert str(error) in caplog.text


@pytest.mark.parametrize(
    ("error", "name", "text"),
    [
        (BatchGoneError(3), "Decode", str(BatchGoneError(3))),
        (OutOfMemoryError("out of memory in one step"), "Prefill", "out of memory in one step"),
        (RuntimeError("no kernel image for /dev/nvidia0"), "Warmup", "no kernel image for /dev/nvidia0"),
        (KeyError(), "Info", "KeyError"),
    ],
)
async def test_our_own_words_and_what_the_operator_reads_are_passed_on(error: Exception, name: str, text: str) -> None:
    assert await _said(error, name) == (grpc.StatusCode.INTERNAL, text)
