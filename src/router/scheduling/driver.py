"""What is sent next, and what an answer means. Synchronous: `loop.Scheduler` waits, the driver decides.

Run ahead: at most two Decodes of the running batch are in flight, so the device never waits for the router (one while a
prompt is computed in chunks). Calls are numbered by the pool and executed in that order, hence a Prefill or FilterBatch
needs no pause before it; only what follows a merge waits for its Prefill's answer. With a stock shard (no `run_ahead`
in Info) one call is in flight at a time, and finished requests are filtered away as TGI's router does.

Newcomers join the running batch in one of two ways. Chunking: their Prefill names the running batch and computes its
next tokens too. Otherwise they are prefilled alone, and the next Decode names both batches.

After every answer the same three things happen in this order: membership is settled (who ended), the next calls are
sent, and only then tokens are delivered, so that waking hundreds of readers never delays the device.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from dataclasses import dataclass

from router.errors import UnhealthyError
from router.events import Failed
from router.limits import ServingLimits
from router.scheduling import budget
from router.scheduling.batch import RunningBatch
from router.scheduling.blocks import BlockAllocator
from router.scheduling.delivery import deliver_columns, deliver_row, server_error
from router.scheduling.entry import Entry
from router.scheduling.growth import Growing
from router.scheduling.pipeline import Call, Pipeline
from router.scheduling.request_queue import RequestQueue
from router.scheduling.step_metrics import DrainRate, StepMetrics
from router.scheduling.steps import first_tokens, keep_ids, new_batch
from router.shards.interface import PROBE_ID, CachedBatch, NewBatch, Row, ShardError, Shards, StepReply

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """run_ahead: numbered calls are executed in order, and a request leaves its batch the moment it ends. chunking:
    newcomers share a step with the running requests, and prompts may be split. share: prompts are looked up among the
    tokens of others.
    """

    run_ahead: bool
    chunking: bool
    share: bool


class Driver:
    """The batches on the shards and the calls about them.

    growing: gets blocks for requests that hold fewer than they can come to need; None where all is reserved at
    admission. See `Abilities` for what the shards can do.
    """

    def __init__(
        self,
        shards: Shards,
        queue: RequestQueue,
        pipeline: Pipeline,
        limits: ServingLimits,
        metrics: StepMetrics,
        allocator: BlockAllocator | None,
        growing: Growing | None,
        *,
        can: Abilities,
    ) -> None:
        self.drain_rate = DrainRate()
        self.num_failures = 0  # generations that failed so far
        self._shards = shards
        self._queue = queue
        self._pipeline = pipeline
        self._limits = limits
        self._metrics = metrics
        self._allocator = allocator
        self._growing = growing
        self._run_ahead = can.run_ahead
        self._chunking = can.chunking
        self._keeps_ids = can.share or growing is not None
        self._running: RunningBatch | None = None
        self._joining: RunningBatch | None = None  # prefilled, or being prefilled, and not merged yet
        self._waiting_tokens = 0  # see budget.while_running
        self._left: list[Entry] = []  # closed since the last look
        self._to_clear: deque[int] = deque()  # ids of batches that an error left behind
        self._probe_answer: asyncio.Future[bool] | None = None
        self._probe_wanted = False
        self._look_into_queue = True  # not twice at the same boundary

    @property
    def num_running(self) -> int:
        return sum(len(batch.entries) for batch in (self._running, self._joining) if batch is not None)

    def ask_probe(self) -> asyncio.Future[bool]:
        """A one-token generation through the same numbered order as everything else; sent at the next boundary."""
        if self._probe_answer is None:
            self._probe_answer = asyncio.get_running_loop().create_future()
            self._probe_wanted = True
        return self._probe_answer

    def caller_left(self, entry: Entry) -> None:
        """Called by `Entry.close`, at any time; acted upon at the next boundary."""
        if entry.done:
            return
        if entry.batch is None:
            self._queue.caller_left()
        else:
            self._left.append(entry)

    def give_up(self, error: Exception | None) -> None:
        """The loop is over: everything that is left fails, and nothing is held any more."""
        reason = server_error(str(error)) if error is not None else UnhealthyError()
        batches = [batch for batch in (self._running, self._joining) if batch is not None]
        entries = [entry for batch in batches for entry in batch.entries.values()]
        for batch in batches:
            self._end_batch(batch)
        for entry in [*entries, *self._queue.drain()]:
            with contextlib.suppress(Exception):
                self._fail(entry, reason)
        self._left.clear()
        self._pipeline.abandon()
        self._answer_probe(False)

    # Sending.

    def send_calls(self) -> None:
        """Send whatever the rules allow at this boundary: after an answer, or when something arrived while idle."""
        self._drop_left()
        self._look_into_queue = True
        while (self._run_ahead or not self._pipeline) and self._send_one():
            pass

    def _send_one(self) -> bool:
        """Send the most urgent call; False if nothing may be sent before another answer or event."""
        if self._to_clear:
            self._send_clear(self._to_clear.popleft())
            return True
        if self._send_filters():
            return True
        if self._probe_wanted:
            self._probe_wanted = False
            self._pipeline.append(Call("probe", self._shards.probe(), None, (PROBE_ID,)))
            return True
        if self._joining is not None:
            return self._send_merged(self._joining)
        running = self._running
        if running is None:
            return self._admit(budget.when_idle(self._limits), None)
        if running.num_decodes >= self._max_decodes(running):
            return False
        if self._growing is not None and running.growing:
            has_room = self._growing.make_room(running)
            if running.dirty:
                self._send_filter(running)
                return True
            if not has_room:
                return False
        if self._admit(self._while_running(running), running):
            return True
        if running.num_decodes and running.is_exhausted:
            return False  # the Decode in flight ends them all
        self._send_decode(running, (running.batch_id,))
        return True

    def _max_decodes(self, running: RunningBatch) -> int:
        return 2 if self._run_ahead and not running.prefilling else 1

    def _while_running(self, running: RunningBatch) -> budget.Admission:
        if self._chunking:
            return budget.while_running_in_chunks(self._limits, len(running.entries), running.current_tokens)
        # In paged mode the allocator alone knows what is free; the shard's sum counts shared blocks repeatedly.
        used_tokens = 0 if self._allocator is not None else running.max_tokens
        return budget.while_running(self._limits, len(running.entries), used_tokens, self._waiting_tokens)

    def _admit(self, admission: budget.Admission, running: RunningBatch | None) -> bool:
        """Prefill the heads of the queue that fit."""
        if not self._look_into_queue or not self._queue:
            return False
        self._look_into_queue = False
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
        self._joining = batch
        try:
            self._send_prefill(batch, new_batch(found))
        except (ValueError, TypeError) as error:  # something in a request that cannot be put on the wire
            self._end_batch(batch)
            for entry in found.entries:
                self._fail(entry, server_error(str(error)))
            self._look_into_queue = True  # nothing was sent, so no answer would bring the next look
        return True

    def _send_prefill(self, batch: RunningBatch, new: NewBatch) -> None:
        running = batch.into
        if running is None:
            reply = self._shards.prefill(new)
            ids: tuple[int, ...] = (batch.batch_id,)
        else:
            reply = self._shards.prefill(new, running.batch_id, running.growth)
            ids = (running.batch_id, batch.batch_id)
            running.stepped()
        self._metrics.sent("prefill")
        self._pipeline.append(Call("prefill", reply, batch, ids))

    def _send_merged(self, joining: RunningBatch) -> bool:
        """The new batch joins the running one, once everything about both is settled.

        A FilterBatch of the running batch that is still under way will answer with its old members alone: merged
        before that answer, the newcomers would look lost.
        """
        if joining.num_unanswered or (self._running is not None and self._running.num_unanswered):
            return False
        self._joining = None
        if self._running is None:
            self._running = joining
            return self._send_one()
        ids = (self._running.batch_id, joining.batch_id)
        self._running.absorb(joining)
        self._send_decode(self._running, ids)
        return True

    def _send_decode(self, batch: RunningBatch, ids: tuple[int, ...]) -> None:
        self._metrics.current_batch(batch.size, batch.max_tokens)
        self._metrics.sent("decode")
        batch.num_decodes += 1
        reply = self._shards.decode(ids, batch.growth)
        batch.stepped()
        self._pipeline.append(Call("decode", reply, batch, ids))

    def _send_filters(self) -> bool:
        """Tell the shards of a batch with rows that nobody wants. A batch whose newcomers are just being prefilled
        waits: its members are not settled."""
        running, joining = self._running, self._joining
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
            self._end_batch(batch)
            self._send_clear(batch.batch_id)
            return
        batch.num_unanswered += 1
        reply = self._shards.filter_batch(batch.batch_id, list(batch.entries))
        self._pipeline.append(Call("filter", reply, batch, (batch.batch_id,)))

    def _send_clear(self, batch_id: int) -> None:
        self._pipeline.append(Call("clear", self._shards.clear_cache(batch_id), None, (batch_id,)))

    # Answers.

    def apply(self, call: Call) -> None:
        """Take an answered call's answer. Raises `ShardError` if the shards are lost."""
        try:
            reply = call.reply.result()
        except ShardError as error:
            if error.fatal:
                raise
            self._apply_failure(call, error)
            return
        if call.kind in ("prefill", "decode"):
            self._apply_step(call, reply)
        elif call.kind == "filter":
            assert call.batch is not None
            call.batch.num_unanswered -= 1
            self._settle_batch(call.batch, reply)
            self._metrics.filtered(time.monotonic() - call.sent_at)
        elif call.kind == "probe":
            # A row that fails is no failed call: a model without usable scores answers every call.
            self._answer_probe(all(row.error is None for row in reply.rows))
            if reply.batch is not None:
                self._to_clear.append(PROBE_ID)

    def _apply_step(self, call: Call, reply: StepReply) -> None:
        batch = call.batch
        assert batch is not None
        answered_at = time.monotonic()
        if call.kind == "prefill":
            batch.num_unanswered -= 1
            self._waiting_tokens = 1
            batch = self._joined(batch)
        else:
            batch.num_decodes -= 1
            self._waiting_tokens += 1
        entries = batch.entries  # before a merge moves them
        if self._keeps_ids:
            keep_ids(reply, entries)
        if batch.prefilling:
            self._settle_first_tokens(reply, batch)
        rows = [(row, entries[row.request_id]) for row in reply.rows if row.request_id in entries]
        for row, entry in rows:
            self._settle_row(row, entry, batch)
        self._settle_batch(batch, reply.batch)
        if reply.batch is not None and any(
            row.error is not None and row.request_id in reply.batch.request_ids for row, _ in rows
        ):
            batch.dirty = True  # only one of several ranks knew of the failure: all keep the row until they are told
        readers = dict(entries) if batch.growing else entries  # some may have to yield
        self.send_calls()
        delivered_from = time.monotonic()
        for columns in reply.columns:
            deliver_columns(columns, readers)
        for row, entry in rows:
            deliver_row(row, entry)
        now = time.monotonic()
        self._metrics.answered(
            call.kind, reply, now - max(call.sent_at, self._pipeline.last_answer_at), now - delivered_from
        )
        self._pipeline.last_answer_at = answered_at

    def _joined(self, batch: RunningBatch) -> RunningBatch:
        """The batch that a prefilled one belongs to from now on."""
        running = batch.into
        if running is None:
            return batch
        # The shards keep the running batch's id, also when nothing else was left of it.
        batch.into, batch.batch_id = None, running.batch_id
        self._joining = None
        if running is self._running:
            running.absorb(batch)
            return running
        self._running = batch
        return batch

    def _settle_first_tokens(self, reply: StepReply, batch: RunningBatch) -> None:
        """Prompts that are in the cache now may be shared."""
        for entry in first_tokens(reply, batch.prefilling):
            entry.prefilled = True
            batch.prefilled(entry, entry.request.stopping.max_new_tokens - max(len(entry.generated_ids), 1))
            if entry.allocation is not None and self._allocator is not None:
                self._allocator.commit(
                    entry.allocation, entry.token_ids[: entry.num_tokens - bool(entry.generated_ids)]
                )
            if self._growing is not None:
                self._growing.prefilled(batch, entry)

    def _settle_row(self, row: Row, entry: Entry, batch: RunningBatch) -> None:
        """If this row is its request's last, the request leaves the batch."""
        if row.error is not None:
            self.num_failures += 1
            if not entry.closed:
                self._metrics.request_failed("generation")
        elif row.ended is not None:
            self.drain_rate.ended()
        else:
            return
        batch.remove(entry)
        self._pipeline.retire(entry)
        if entry.closed and not entry.done:
            self.dropped(entry)

    def _settle_batch(self, batch: RunningBatch, cached: CachedBatch | None) -> None:
        """What the shards keep against what the router wants."""
        if batch.ended:
            return
        lost = list(batch.entries.values()) if cached is None else batch.update(cached)
        for entry in lost:
            log.error("the shards lost request %d", entry.request_id)
            batch.remove(entry)
            self._fail(entry, server_error("the shards no longer know this request"))
        if cached is None:
            self._end_batch(batch)
        elif not batch.entries or not self._run_ahead:
            # Our shards drop what ends by themselves; a stock shard keeps it until told.
            batch.dirty = batch.size != len(batch.entries)

    def _apply_failure(self, call: Call, error: ShardError) -> None:
        """A call failed and the shards live on: exactly the requests of its batch fail, once."""
        if call.kind == "clear":
            log.warning("ClearCache failed: %s", error.detail)
            return
        if call.kind == "probe":
            self._answer_probe(False)
            self._to_clear.append(PROBE_ID)
            return
        batch = call.batch
        assert batch is not None
        if call.kind == "prefill":
            self._waiting_tokens = 1
            if batch.into is not None and batch.into.failed:
                self._put_back(batch)
                return
        if batch.ended:
            return  # behind a call that failed before, or nobody is left
        log.error("%s failed: %s", call.kind, error.detail)
        if call.kind != "filter":
            self._metrics.failed(call.kind)
        self._to_clear.extend(call.batch_ids)
        for failed in (batch.into, batch):
            if failed is None or failed.ended:
                continue
            entries = list(failed.entries.values())
            self._end_batch(failed)
            failed.failed = True
            for entry in entries:
                self._fail(entry, server_error(str(error)))

    def _put_back(self, batch: RunningBatch) -> None:
        """The step of these requests was lost with the batch that they were to join, through no fault of theirs."""
        entries = list(batch.entries.values())
        self._end_batch(batch)
        for entry in reversed(entries):
            entry.batch = None
            self._pipeline.retire(entry)
            self._queue.put_first(entry)

    def _end_batch(self, batch: RunningBatch) -> None:
        batch.ended = True
        batch.entries = {}
        if self._running is batch:
            self._running = None
        if self._joining is batch:
            self._joining = None

    # Ends of requests.

    def _fail(self, entry: Entry, error: Exception) -> None:
        self._pipeline.retire(entry)
        self.num_failures += 1
        if entry.closed:
            self.dropped(entry)
            return
        self._metrics.request_failed("generation")
        entry.put(Failed(error))

    def _drop_left(self) -> None:
        """Take abandoned requests out of their batch; the FilterBatch follows before the next Decode."""
        for entry in self._left:
            batch = entry.batch
            if batch is None or entry.done:
                continue  # it ended in the meantime
            batch.remove(entry)
            batch.dirty = True
            self._pipeline.retire(entry)
            self.dropped(entry)
        self._left.clear()

    def dropped(self, entry: Entry) -> None:
        """Nobody hears of this request's end."""
        entry.done = True
        self._metrics.request_failed("dropped")

    def _answer_probe(self, healthy: bool) -> None:
        if self._probe_answer is not None and not self._probe_answer.done():
            self._probe_answer.set_result(healthy)
        self._probe_answer = None
