"""What is sent next. Synchronous."""

# Run ahead: the shards say how many steps of the running batch may be in flight, so that the device never waits for the
# router. Calls are numbered by the pool and executed in that order, so a Prefill or FilterBatch needs no pause before
# it, and the Decode after a Prefill is sent before its answer: who is in the batch then, and how much of each prompt is
# left, follows from the numbers. Only a step that others could join beside the last tokens of a prompt is sent when no
# other is in flight.
#
# The stages of a pipeline work on several micro-batches: for each the same rules hold, with one Decode in flight.
#
# Newcomers join the running batch in one of two ways. Chunking: their Prefill names the running batch and computes its
# next tokens too. Otherwise they are prefilled alone, and the next Decode names both batches.

from __future__ import annotations

from router.limits import ShardInfo
from router.scheduling.batch import RunningBatch
from router.scheduling.batches import Batches, MicroBatch
from router.scheduling.cache.states import StatePlace
from router.scheduling.delivery import server_error
from router.scheduling.entry import Entry
from router.scheduling.growth import Grower
from router.scheduling.health import Probe
from router.scheduling.pipeline import Call, Pipeline
from router.scheduling.queue.admission import Admission
from router.scheduling.queue.request_queue import NextBatch
from router.scheduling.step_metrics import StepMetrics
from router.shards.interface import (
    PROBE_ID,
    DecodeCall,
    NewBatch,
    NewRequest,
    PrefillCall,
    Shards,
    StateRef,
    UnsendableError,
)


class Sender:
    """The rules by which calls follow; `grower` is None if all is reserved."""

    def __init__(
        self,
        shards: Shards,
        info: ShardInfo,
        batches: Batches,
        admission: Admission,
        grower: Grower | None,
        pipeline: Pipeline,
        probe: Probe,
        metrics: StepMetrics,
    ) -> None:
        self._shards = shards
        self._chunking = info.chunks
        self._pipeline_depth = info.pipeline_depth
        self._draft_tokens = info.speculate
        self._overlaps_joining = info.overlaps and info.chunks
        self._batches = batches
        self._admission = admission
        self._grower = grower
        self._pipeline = pipeline
        self._probe = probe
        self._metrics = metrics
        self._look_into_queue = True  # not twice for the same step
        self._out_of_blocks: MicroBatch | None = None  # nothing is sent for the others until it has got some

    def send_calls(self) -> None:
        """Send all that may be, after an answer or arrival."""
        self._batches.discard_left()
        self._look_into_queue = True
        while self._send_one():
            pass

    def _send_one(self) -> bool:
        """Send the most urgent call, if any."""
        batches = self._batches
        if (failed_id := batches.next_to_clear()) is not None:
            self._send_clear(failed_id)
            return True
        if self._send_filters():
            return True
        if self._probe.pop():
            self._pipeline.append(Call("probe", self._shards.probe(), None, (PROBE_ID,)))
            return True
        return any(self._send_of(one) for one in self._in_turn())

    def _in_turn(self) -> list[MicroBatch]:
        starved = self._out_of_blocks
        if starved is not None and starved.running is not None:
            return [starved]
        self._out_of_blocks = None
        return self._batches.smallest_first

    def _send_of(self, micro_batch: MicroBatch) -> bool:
        """Send the next call of this micro-batch."""
        if micro_batch.joining is not None:
            return self._follow(micro_batch) or self._send_merged(micro_batch)
        if micro_batch.running is None:
            return self._admit(micro_batch)
        return self._send_step(micro_batch, micro_batch.running)

    def _send_step(self, micro_batch: MicroBatch, running: RunningBatch) -> bool:
        """Send the running batch's next step, perhaps with newcomers."""
        in_flight = running.num_decodes
        if in_flight >= self._most_decodes() or (in_flight and not running.may_run_ahead):
            return False
        if self._grower is not None and running.growing:
            has_room = self._grower.make_room(running)
            self._out_of_blocks = None if has_room else micro_batch
            if self._send_filters():
                return True  # who was preempted, here or in another micro-batch, is gone before its blocks are used
            if not has_room:
                return False
        if not (in_flight and running.is_cut) and self._admit(micro_batch):
            return True
        if in_flight and running.is_exhausted:
            return False  # the Decode in flight ends them all
        self._send_decode(running, (running.batch_id,))
        return True

    def _most_decodes(self) -> int:
        """Return a batch's decodes in flight: one beside others."""
        return self._pipeline_depth if len(self._batches.in_use) < 2 else 1

    def _follow(self, micro_batch: MicroBatch) -> bool:
        """Send the Decode after a Prefill in flight."""
        # Requests in the queue go first where the device gains nothing from a call that comes early: one Prefill
        # follows the other. A GPU would be idle until then, and with requests that keep arriving some wait at nearly
        # every step: they join after the Decode.
        joining = micro_batch.joining
        assert joining is not None
        batch = joining.into or joining
        if not (self._most_decodes() > 1 and joining.num_unanswered) or batch.num_decodes:
            return False
        if micro_batch.running not in (None, joining.into):
            return False  # the Prefill made a batch of its own, which the running one joins after the answer
        if self._admission.has_waiting and not (batch.is_cut or self._overlaps_joining):
            return False
        if joining.dirty or batch.dirty or not batch.may_run_ahead or batch.short or batch.is_exhausted:
            return False
        self._send_decode(batch, (batch.batch_id,))
        return True

    def _admit(self, micro_batch: MicroBatch) -> bool:
        """Prefill the heads that fit."""
        batches, running = self._batches, micro_batch.running
        room = batches.room(micro_batch, self._admission.num_waiting)
        if not self._look_into_queue or room == 0:
            return False
        self._look_into_queue = False
        elsewhere = [batch for one in batches.micro_batches if one is not micro_batch for batch in one.batches]
        found = self._admission.next_batch(
            running,
            batches.waiting_tokens,
            batches.last_end_at,
            elsewhere=elsewhere,
            most=room,
            num_steps=batches.num_steps,
        )
        if found is None:
            return False
        self._look_into_queue = room is not None  # for the next micro-batch
        batch = RunningBatch(
            found.batch_id, found.entries, into=running if self._chunking else None, draft_tokens=self._draft_tokens
        )
        self._batches.join(micro_batch, batch)
        try:
            self._send_prefill(batch, _new_batch(found))
        except UnsendableError as error:
            for request_id, reason in error.reasons.items():
                self._batches.lose(batch, batch.entries[request_id], server_error(str(reason)))
            self._batches.put_back(batch)
            self._look_into_queue = True  # nothing was sent, so no answer would bring the next look
        return True

    def _send_prefill(self, batch: RunningBatch, new: NewBatch) -> None:
        running, unanswered = batch.into, len(self._pipeline)
        chunk_tokens = self._chunk_tokens(len(batch.entries) + (0 if running is None else len(running.entries)))
        if running is None:
            reply = self._shards.prefill(PrefillCall(new, chunk_tokens=chunk_tokens, unanswered=unanswered))
            ids: tuple[int, ...] = (batch.batch_id,)
        else:
            call = PrefillCall(new, running.batch_id, running.new_blocks, chunk_tokens, unanswered)
            reply = self._shards.prefill(call)
            ids = (running.batch_id, batch.batch_id)
        of_steps = running or batch
        of_steps.step_sent(chunk_tokens, batch.entries.values())
        self._pipeline.append(Call("prefill", reply, batch, ids, of_steps.num_steps))

    def _send_merged(self, micro_batch: MicroBatch) -> bool:
        """Merge the new batch, once all about both is settled: a FilterBatch in flight answers with old
        members alone.
        """
        joining, running = micro_batch.joining, micro_batch.running
        assert joining is not None
        if joining.num_unanswered or (running is not None and running.num_unanswered):
            return False
        ids = self._batches.merge(micro_batch)
        if running is None:
            return self._send_one()
        self._send_decode(running, ids)
        return True

    def _send_decode(self, batch: RunningBatch, ids: tuple[int, ...]) -> None:
        running = {batch, *(one.running for one in self._batches.micro_batches if one.running is not None)}
        self._metrics.current_batch(sum(one.size for one in running), sum(one.max_tokens for one in running))
        chunk_tokens = None
        if batch.computes_prompts:
            chunk_tokens = self._chunk_tokens(len(batch.entries))
            self._look_into_queue = True  # there may be more room in the step after this one
        reply = self._shards.decode(DecodeCall(ids, batch.new_blocks, chunk_tokens, len(self._pipeline)))
        batch.step_sent(chunk_tokens)
        self._pipeline.append(Call("decode", reply, batch, ids, batch.num_steps))

    def _chunk_tokens(self, num_rows: int) -> int | None:
        """Return the prompt tokens of the step after next."""
        return self._admission.chunk_tokens(num_rows, self._batches.last_end_at)

    def _send_filters(self) -> bool:
        """Filter unwanted rows, except of batches being joined."""
        for one in self._batches.micro_batches:
            if one.joining is not None and one.joining.into is not None:
                continue
            for batch in one.batches:
                if batch.dirty and (batch is one.running or not batch.num_unanswered):
                    self._send_filter(batch)
                    return True
        return False

    def _send_filter(self, batch: RunningBatch) -> None:
        """Filter a batch, or forget it if empty."""
        batch.filter_sent()
        if not batch.entries:
            self._batches.end(batch)
            self._send_clear(batch.batch_id)
            return
        reply = self._shards.filter_batch(batch.batch_id, list(batch.entries))
        self._pipeline.append(Call("filter", reply, batch, (batch.batch_id,)))

    def _send_clear(self, batch_id: int) -> None:
        self._pipeline.append(Call("clear", self._shards.clear_cache(batch_id), None, (batch_id,)))


def _new_batch(found: NextBatch) -> NewBatch:
    """Return the shards' form of new requests."""
    requests = [_new_request(entry) for entry in found.entries]
    return NewBatch(found.batch_id, requests)


def _new_request(entry: Entry) -> NewRequest:
    allocation = entry.allocation
    assert allocation is not None
    return NewRequest(
        entry.request_id,
        entry.request,
        allocation.blocks,
        allocation.prefix_length,
        entry.chunk_len,
        tuple(entry.generated_ids),
        _state_of(allocation.state),
    )


def _state_of(state: StatePlace | None) -> StateRef | None:
    if state is None:
        return None
    return StateRef(state.slot, state.restored_from, [(save.position, save.slot) for save in state.saves])
