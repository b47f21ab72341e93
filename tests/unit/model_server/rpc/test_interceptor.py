"""Which errors end the process, and error texts that always fit a gRPC trailer."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_server.errors import FatalError, OutOfMemoryError, RequestError
from model_server.rpc.interceptor import MAX_ENCODED_TEXT, fit_text, is_fatal


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
