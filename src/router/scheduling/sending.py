"""What is sent next. Synchronous: `loop.Scheduler` waits, `driver.Driver` reads the answers.

Run ahead: at most two Decodes of the running batch are in flight, so the device never waits for the router (one while a
prompt is computed in chunks). Calls are numbered by the pool and executed in that order, hence a Prefill or FilterBatch
needs no pause before it; only what follows a merge waits for its Prefill's answer. With a stock shard (no `run_ahead`
in Info) one call is in flight at a time, and finished requests are filtered away as TGI's router does.

Newcomers join the running batch in one of two ways. Chunking: their Prefill names the running batch and computes its
next tokens too. Otherwise they are prefilled alone, and the next Decode names both batches.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from router.limits import ServingLimits, ShardInfo
from router.scheduling import budget
from router.scheduling.batch import RunningBatch
from router.scheduling.entry import Entry
from router.scheduling.growth import Growing
from router.scheduling.pipeline import Call, Pipeline
from router.scheduling.request_queue import RequestQueue
from router.scheduling.step_metrics import StepMetrics
from router.scheduling.steps import new_batch
from router.shards.interface import PROBE_ID, NewBatch, Shards, UnsendableError


class Sender:
    """The batches on the shards, and the rules by which calls about them follow each other.

    growing: gets blocks for requests that hold fewer than they can come to need; None where all is reserved at
    admission. on_unsendable: told of a request that cannot be put on the wire.
    """

    def __init__(
        self,
        shards: Shards,
        info: ShardInfo,
        queue: RequestQueue,
        pipeline: Pipeline,
        limits: ServingLimits,
        metrics: StepMetrics,
        growing: Growing | None,
        on_unsendable: Callable[[Entry, Exception], None],
    ) -> None:
        self.running: RunningBatch | None = None
        self.joining: RunningBatch | None = None  # prefilled, or being prefilled, and not merged yet
        self.waiting_tokens = 0  # see budget.while_running
        self.last_end_at = -math.inf  # when a request ended last, `time.monotonic`
        self.to_clear: deque[int] = deque()  # ids of batches that an error left behind
        self.probe_wanted = False
        self._shards = shards
        self._queue = queue
        self._pipeline = pipeline
        self._limits = limits
        self._metrics = metrics
        self._growing = growing
        self._on_unsendable = on_unsendable
        self._run_ahead = info.runs_ahead
        self._chunking = info.chunks
        self._paged = not info.requires_padding
        self._look_into_queue = True  # not twice at the same boundary

    def send_calls(self) -> None:
        """Send whatever the rules allow at this boundary: after an answer, or when something arrived while idle."""
        self._look_into_queue = True
        while (self._run_ahead or not self._pipeline) and self._send_one():
            pass

    def end_batch(self, batch: RunningBatch) -> None:
        """Nothing more is sent for this batch."""
        batch.ended = True
        batch.entries = {}
        if self.running is batch:
            self.running = None
        if self.joining is batch:
            self.joining = None

    def _send_one(self) -> bool:
        """Send the most urgent call; False if nothing may be sent before another answer or event."""
        if self.to_clear:
            self._send_clear(self.to_clear.popleft())
            return True
        if self._send_filters():
            return True
        if self.probe_wanted:
            self.probe_wanted = False
            self._pipeline.append(Call("probe", self._shards.probe(), None, (PROBE_ID,)))
            return True
        if self.joining is not None:
            return self._send_merged(self.joining)
        running = self.running
        if running is None:
            return self._admit(None)
        if running.num_decodes >= self._max_decodes(running):
            return False
        if self._growing is not None and running.growing:
            has_room = self._growing.make_room(running)
            if running.dirty:
                self._send_filter(running)
                return True
            if not has_room:
                return False
        if self._admit(running):
            return True
        if running.num_decodes and running.is_exhausted:
            return False  # the Decode in flight ends them all
        self._send_decode(running, (running.batch_id,))
        return True

    def _max_decodes(self, running: RunningBatch) -> int:
        return 2 if self._run_ahead and not running.prefilling else 1

    def _while_running(self, running: RunningBatch) -> budget.Admission:
        if self._chunking:
            return budget.while_running_in_chunks(
                self._limits,
                len(running.entries),
                running.current_tokens,
                running.prompt_tokens,
                crowd=self._a_crowd_waits(),
            )
        # In paged mode the allocator alone knows what is free; the shard's sum counts shared blocks repeatedly.
        used_tokens = 0 if self._paged else running.max_tokens
        return budget.while_running(self._limits, len(running.entries), used_tokens, self.waiting_tokens)

    def _a_crowd_waits(self) -> bool:
        """Many prompts, and a request has ended since the first of them was queued.

        A burst on its own is none: while nobody ends, longer steps only make its first wait for each other.
        """
        many = budget.is_crowd_of(self._limits)
        return many is not None and self._queue.waits_since_before(self.last_end_at) and self._queue.holds_tokens(many)

    def _chunk_tokens(self) -> int | None:
        """What the shards are told of the step after a step with prompts."""
        if not self._chunking or budget.is_crowd_of(self._limits) is None:
            return None
        return budget.prompts_of_a_step(self._limits, crowd=self._a_crowd_waits())

    def _admit(self, running: RunningBatch | None) -> bool:
        """Prefill the heads of the queue that fit."""
        if not self._look_into_queue or not self._queue:
            return False
        self._look_into_queue = False
        admission = budget.when_idle(self._limits) if running is None else self._while_running(running)
        found = self._queue.next_batch(
            admission.min_size,
            admission.max_size,
            admission.prefill_budget,
            admission.token_budget,
            spare_blocks=len(running.growing) if running is not None else 0,
        )
        self._metrics.queue_size(len(self._queue))
        if found is None:
            return False
        self._metrics.admitted(len(found.entries), admission.reason)
        batch = RunningBatch(found.batch_id, found.entries, into=running if self._chunking else None)
        batch.num_unanswered = 1
        self.joining = batch
        try:
            self._send_prefill(batch, new_batch(found))
        except UnsendableError as error:
            for request_id, reason in error.reasons.items():
                entry = batch.entries[request_id]
                batch.remove(entry)
                self._on_unsendable(entry, reason)
            self.put_back(batch)
            self._look_into_queue = True  # nothing was sent, so no answer would bring the next look
        return True

    def put_back(self, batch: RunningBatch) -> None:
        """To the front of the queue with requests that lost their Prefill through no fault of theirs."""
        entries = list(batch.entries.values())
        self.end_batch(batch)
        for entry in reversed(entries):
            entry.batch = None
            self._pipeline.retire(entry)
            self._queue.put_first(entry)

    def _send_prefill(self, batch: RunningBatch, new: NewBatch) -> None:
        running = batch.into
        if running is None:
            reply = self._shards.prefill(new, chunk_tokens=self._chunk_tokens())
            ids: tuple[int, ...] = (batch.batch_id,)
        else:
            reply = self._shards.prefill(new, running.batch_id, running.growth, self._chunk_tokens())
            ids = (running.batch_id, batch.batch_id)
            running.stepped()
        self._metrics.sent("prefill")
        self._pipeline.append(Call("prefill", reply, batch, ids))

    def _send_merged(self, joining: RunningBatch) -> bool:
        """The new batch joins the running one, once everything about both is settled.

        A FilterBatch of the running batch that is still under way will answer with its old members alone: merged
        before that answer, the newcomers would look lost.
        """
        if joining.num_unanswered or (self.running is not None and self.running.num_unanswered):
            return False
        self.joining = None
        if self.running is None:
            self.running = joining
            return self._send_one()
        ids = (self.running.batch_id, joining.batch_id)
        self.running.absorb(joining)
        self._send_decode(self.running, ids)
        return True

    def _send_decode(self, batch: RunningBatch, ids: tuple[int, ...]) -> None:
        self._metrics.current_batch(batch.size, batch.max_tokens)
        self._metrics.sent("decode")
        batch.num_decodes += 1
        reply = self._shards.decode(ids, batch.growth, self._chunk_tokens() if batch.prefilling else None)
        batch.stepped()
        self._pipeline.append(Call("decode", reply, batch, ids))

    def _send_filters(self) -> bool:
        """Tell the shards of a batch with rows that nobody wants. A batch whose newcomers are just being prefilled
        waits: its members are not settled."""
        running, joining = self.running, self.joining
        if joining is not None and joining.into is not None:
            return False
        for batch in (running, joining):
            if batch is not None and batch.dirty and (batch is running or not batch.num_unanswered):
                self._send_filter(batch)
                return True
        return False

    def _send_filter(self, batch: RunningBatch) -> None:
        """Tell the shards which rows are still wanted; forget the batch if none is."""
        batch.dirty = False
        if not batch.entries:
            self.end_batch(batch)
            self._send_clear(batch.batch_id)
            return
        batch.num_unanswered += 1
        reply = self._shards.filter_batch(batch.batch_id, list(batch.entries))
        self._pipeline.append(Call("filter", reply, batch, (batch.batch_id,)))

    def _send_clear(self, batch_id: int) -> None:
        self._pipeline.append(Call("clear", self._shards.clear_cache(batch_id), None, (batch_id,)))
