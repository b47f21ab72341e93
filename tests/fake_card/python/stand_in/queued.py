"""Functions of Python in the queues of the stand-in card, and what became of them."""

from __future__ import annotations

import collections
import itertools
import os
import sys
import traceback
from collections.abc import Callable

import torch

from stand_in.counters import library, set_runner

errors: list[str] = []  # of functions that failed
waits: collections.Counter[str] = collections.Counter()  # where the host waited for the device, other than for an event

_functions: dict[int, tuple[bool, Callable[[], None]]] = {}  # by number: whether it runs once, and what
_numbers = itertools.count(1)
_spoils = os.environ.get("FAKE_CARD_POISON", "1") != "0"
_MOST_SPOILED = 1 << 24


def enqueue(run: Callable[[], None]) -> None:
    """Queue `run` on the current stream; in a capture it runs at every replay."""
    is_captured = torch.cuda.is_current_stream_capturing()
    number = next(_numbers)
    _functions[number] = (not is_captured, run)
    library.card_queue_number(torch.cuda.current_stream().cuda_stream, number)


def spoil(tensor: torch.Tensor) -> None:
    """Queue rubbish for fresh memory: on a card it may be another tensor's, whose stream still uses it."""
    if _spoils and 0 < tensor.untyped_storage().nbytes() <= _MOST_SPOILED:
        storage = tensor.untyped_storage()
        library.card_spoil(storage.data_ptr(), storage.nbytes(), torch.cuda.current_stream().cuda_stream)


def wait_for_stream() -> None:
    """Run what is queued on the current stream."""
    torch.cuda.current_stream().synchronize()


def site() -> str:
    """The line of the project that runs."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/model_server/" in name:
            return f"{name.split('/src/')[-1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


def _run(number: int) -> None:
    """What the runtime calls when the turn of a number comes."""
    try:
        once, run = _functions[number]
        if once:
            del _functions[number]
        with torch._C._DisableTorchDispatch(), torch.inference_mode(False), torch.no_grad():
            run()
    except BaseException:
        text = traceback.format_exc()
        errors.append(text)
        sys.stderr.write("FAKE CARD: emulation failed: " + text + "\n")


def install() -> None:
    """Once, before the first `enqueue`."""
    set_runner(_run)
