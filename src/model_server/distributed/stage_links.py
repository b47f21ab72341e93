"""What passes between the stages of a pipeline in one step.

A header (between hosts) and the residual stream (between devices) go to the next stage, sampled ids from the last to
all others. Ranks run calls in the order of their numbers, so both ends agree; a failed step travels as a header.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.distributed.layout import Ranks
from model_server.errors import FatalError, ModelServerError, OutOfMemoryError, StepFailedError, public_text

# A header: number of the step, number of its call (-1: none), tokens, rows that sample, width of the residual stream,
# its type, status, bytes of the text of an error.
_HEADER = 8
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_GOOD, _FAILED, _OUT_OF_MEMORY = 0, 1, 2


@dataclass(frozen=True, slots=True)
class StageTokens:
    """What the last stage sampled: [num_rows] each."""

    ids: list[int]
    failed: list[bool]


class StageLinks:
    """One rank's connections to the other stages, on the device thread."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.is_first = ranks.layout.stage.rank == 0
        self.is_last = ranks.layout.has_last_stage
        self.num_stages = ranks.layout.stage.size
        self.device = device
        # Called, on another thread, when the ids of a step have come.
        self.on_tokens: Callable[[], object] = lambda: None
        self._ranks = ranks
        self._num_steps = 0
        self._awaited: queue.SimpleQueue[tuple[int, int, Future[StageTokens]]] = queue.SimpleQueue()
        if not self.is_last:
            threading.Thread(target=self._receive_tokens, name="stage-tokens", daemon=True).start()

    def start(self, call_number: int | None, num_rows: int) -> Passage:
        """Begin the next step, in which `num_rows` rows sample."""
        self._num_steps += 1
        tokens: Future[StageTokens] | None = None
        if not self.is_last:
            tokens = Future()
            self._awaited.put((self._num_steps, num_rows, tokens))
        return Passage(self, self._num_steps, -1 if call_number is None else call_number, num_rows, tokens)

    def receive(self, passage: Passage, num_tokens: int | None) -> Tensor:
        """Receive the residual stream [num_tokens, width]; None: any number of tokens.

        Raises:
            StepFailedError, OutOfMemoryError: A stage before failed.
            FatalError: It is of another step.
        """
        header = torch.empty(_HEADER, dtype=torch.int64)
        self._ranks.before.receive(header, 0)
        step, call, tokens, rows, width, dtype, status, size = header.tolist()
        expected = (passage.step, passage.call, passage.num_rows)
        if (step, call, rows) != expected or (status == _GOOD and num_tokens not in (None, tokens)):
            raise FatalError(
                f"the stage before sent step {step} (call {call}, {tokens} tokens, {rows} rows), and this one is at "
                f"step {passage.step} (call {passage.call}, {num_tokens} tokens, {passage.num_rows} rows)"
            )
        if status != _GOOD:
            text = torch.empty(size, dtype=torch.uint8)
            self._ranks.before.receive(text, 0)
            raise _error(status, text)
        try:
            hidden = torch.empty(tokens, width, dtype=_DTYPES[dtype], device=self.device)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise FatalError("out of memory for the residual stream of the stage before") from error
        self._ranks.before.receive(hidden, 0)
        return hidden

    def pass_on(self, passage: Passage, hidden: Tensor | None, status: int = _GOOD, text: Tensor | None = None) -> None:
        """Send the residual stream, or an error, to the stage after."""
        shape, dtype = ((0, 0), 0) if hidden is None else (hidden.shape, _DTYPES.index(hidden.dtype))
        size = 0 if text is None else text.numel()
        header = (passage.step, passage.call, shape[0], passage.num_rows, shape[1], dtype, status, size)
        body = hidden if hidden is not None else text
        assert body is not None
        after = self._ranks.after
        for tensor in (torch.tensor(header, dtype=torch.int64), body.contiguous()):
            after.send(tensor, 1)

    def reply(self, passage: Passage, numbers: list[int], status: int = _GOOD, text: Tensor | None = None) -> None:
        """Send ids and failures of rows, or an error, from the last stage to the others."""
        layout = self._ranks.layout
        size = 0 if text is None else text.numel()
        message = torch.tensor([passage.step, status, size, *numbers], dtype=torch.int64)
        for stage in range(layout.stage.size - 1):
            to = stage * layout.tensor.size + layout.tensor.rank
            for tensor in (message,) if text is None else (message, text):
                self._ranks.world.send(tensor, to)

    def _receive_tokens(self) -> None:
        layout = self._ranks.layout
        last = (layout.stage.size - 1) * layout.tensor.size + layout.tensor.rank
        while True:
            step, num_rows, tokens = self._awaited.get()
            try:
                tokens.set_result(self._tokens_of(step, num_rows, last))
            except BaseException as error:
                tokens.set_exception(error)
            self.on_tokens()

    def _tokens_of(self, step: int, num_rows: int, last: int) -> StageTokens:
        message = torch.empty(3 + 2 * num_rows, dtype=torch.int64)
        self._ranks.world.receive(message, last)
        found, status, size, *numbers = message.tolist()
        if found != step:
            raise FatalError(f"the last stage sent the ids of step {found}, and those of step {step} come next")
        if status != _GOOD:
            text = torch.empty(size, dtype=torch.uint8)
            self._ranks.world.receive(text, last)
            raise _error(status, text)
        return StageTokens(numbers[:num_rows], [bool(value) for value in numbers[num_rows:]])


class Passage:
    """One step on its way through the stages, as one rank sees it."""

    def __init__(
        self, links: StageLinks, step: int, call: int, num_rows: int, tokens: Future[StageTokens] | None
    ) -> None:
        """Take what the last stage will send; None on that stage."""
        self.step = step
        self.call = call
        self.num_rows = num_rows
        self._links = links
        self._tokens = tokens
        self._is_open = True  # the stages that wait for this one have heard nothing of it
        self._has_received = links.is_first

    @property
    def is_last(self) -> bool:
        """On the last stage, which samples."""
        return self._tokens is None

    def receive(self, num_tokens: int) -> Tensor | None:
        """Receive as `StageLinks.receive`; None on the first stage."""
        if self._links.is_first:
            return None
        self._has_received = True
        return self._links.receive(self, num_tokens)

    def send(self, hidden: Tensor) -> None:
        """Send the residual stream, which nothing may write to afterwards."""
        if self._tokens is not None:
            self._is_open = False
            self._links.pass_on(self, hidden)

    def reply(self, tokens: StageTokens) -> None:
        """Send what was sampled to all others."""
        if self._tokens is None:
            self._is_open = False
            self._links.reply(self, [*tokens.ids, *map(int, tokens.failed)])

    def fail(self, error: BaseException) -> None:
        """Make every stage drop its batch, unless they had their message or this process ends."""
        if not self._is_open or isinstance(error, FatalError) or not isinstance(error, Exception):
            return
        self._is_open = False
        if not self._has_received:  # what the stage before has sent must not be taken for the next step's
            with contextlib.suppress(StepFailedError, OutOfMemoryError):
                self._links.receive(self, None)
        is_memory = isinstance(error, (OutOfMemoryError, torch.OutOfMemoryError, MemoryError))
        text = torch.frombuffer(bytearray(public_text(error).encode()[:1000] or b" "), dtype=torch.uint8)
        status = _OUT_OF_MEMORY if is_memory else _FAILED
        if self._tokens is None:
            self._links.reply(self, [0] * (2 * self.num_rows), status, text)
        else:
            self._links.pass_on(self, None, status, text)

    def is_over(self) -> bool:
        """Whether `tokens` would not wait."""
        return self._tokens is None or self._tokens.done()

    def tokens(self) -> StageTokens:
        """Wait for what the last stage sampled.

        Raises:
            StepFailedError, OutOfMemoryError: A stage failed.
        """
        assert self._tokens is not None, "the last stage has sampled itself"
        return self._tokens.result()


def _error(status: int, text: Tensor) -> ModelServerError:
    message = bytes(text.tolist()).decode(errors="replace")
    return OutOfMemoryError(message) if status == _OUT_OF_MEMORY else StepFailedError(message)
