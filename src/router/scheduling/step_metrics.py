"""What the scheduler counts, and how fast requests leave."""

from __future__ import annotations

import time
from collections import deque

from router.metrics import Metrics
from router.scheduling.cache.states import StateSlots
from router.shards.interface import StepReply
from wire.step_phases import PHASES

# Of `StateCounts`.
_STATE_COUNTS = ("tgi_state_saves", "tgi_state_restores", "tgi_state_recomputed_tokens")


class StepMetrics:
    """Metrics of queue, batches and steps, by `method`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._current = (-1, -1)
        self._blocks = (-1, -1)
        self._slot_loads = 0
        self._states: tuple[int, ...] = (0, 0, 0, -1, -1)

    def queue_size(self, size: int) -> None:
        self._metrics.gauge("tgi_queue_size", size)

    def request_failed(self, err: str) -> None:
        self._metrics.count("tgi_request_failure", err=err)

    def admitted(self, size: int, concat_reason: str) -> None:
        """Count a new batch; an empty `concat_reason`: none ran."""
        self._metrics.observe("tgi_batch_next_size", size)
        if concat_reason:
            self._metrics.count("tgi_batch_concat", reason=concat_reason)

    def current_batch(self, size: int, max_tokens: int) -> None:
        if self._current == (size, max_tokens):
            return
        self._current = (size, max_tokens)
        self._metrics.gauge("tgi_batch_current_size", size)
        self._metrics.gauge("tgi_batch_current_max_tokens", max_tokens)

    def kv_blocks(self, num_free: int, num_cached: int, num_usable: int) -> None:
        """`num_free` counts the cached ones too."""
        if self._blocks == (num_free, num_cached):
            return
        self._blocks = (num_free, num_cached)
        self._metrics.gauge("tgi_kv_blocks_free", num_free)
        self._metrics.gauge("tgi_kv_blocks_cached", num_cached)
        self._metrics.gauge("tgi_kv_blocks_live", num_usable - num_free)
        self._metrics.gauge("tgi_kv_cache_usage", (num_usable - num_free) / num_usable)

    def states(self, slots: StateSlots) -> None:
        """Count slots of states, and what has changed since the last call."""
        counts, saved, free = slots.counts, slots.num_checkpoints, slots.num_free
        # A saved state's slot may go to a request, while as many as before are free.
        now, seen = (counts.saved, counts.restored, counts.recomputed, saved, free), self._states
        if now == seen:
            return
        self._states = now
        for name, value, before in zip(_STATE_COUNTS, now, seen, strict=False):
            self._metrics.count(name, value - before)
        for use, number in (("live", slots.num_slots - saved - free), ("saved", saved), ("free", free)):
            self._metrics.gauge("tgi_state_slots", number, use=use)

    def preempted(self) -> None:
        self._metrics.count("tgi_request_preempted")

    def computed(self, method: str) -> None:
        self._metrics.count("tgi_batch_inference_count", method=method)

    def failed(self, method: str) -> None:
        self.computed(method)
        self._metrics.count("tgi_batch_inference_failure", method=method)

    def filtered(self, seconds: float) -> None:
        self._metrics.observe("tgi_batch_filter_duration", seconds, method="decode")

    def answered(self, method: str, reply: StepReply, step_s: float, delivery_s: float) -> None:
        """Count a step; `step_s` since it was sent, or the last answer."""
        observe = self._metrics.observe
        timings = reply.timings
        observe("tgi_batch_forward_duration", timings.forward_s, method=method)
        observe("tgi_batch_decode_duration", timings.decode_s, method=method)
        # A newer shard may know phases that we do not: they come last.
        for phase, phase_s in zip(PHASES, timings.phases_s, strict=False):
            observe("tgi_batch_phase_duration", phase_s, phase=phase)
        if timings.concat_s is not None:
            observe("tgi_batch_concat_duration", timings.concat_s, method="decode")
        observe("tgi_batch_filter_duration", delivery_s, method=method)
        observe("tgi_batch_inference_duration", step_s, method=method)
        self._metrics.count("tgi_batch_inference_success", method=method)
        if reply.images is not None:
            self._metrics.count("tgi_encoder_cache_hits", reply.images.hits)
            self._metrics.count("tgi_encoder_cache_misses", reply.images.misses)
            if reply.images.misses:
                observe("tgi_image_encode_duration", reply.images.encode_s)
        if reply.adapter_slots is not None:
            slots = reply.adapter_slots
            self._metrics.count("tgi_lora_slot_loads", max(0, slots.loads - self._slot_loads))
            self._slot_loads = slots.loads
            self._metrics.gauge("tgi_lora_adapters", slots.held, state="slot")
        if reply.drafted is not None:
            for kind, (num_tokens, num_right) in reply.drafted.labelled().items():
                self._metrics.count("tgi_speculation_drafted_tokens", num_tokens, kind=kind)
                self._metrics.count("tgi_speculation_accepted_tokens", num_right, kind=kind)
            self._metrics.gauge("tgi_speculation_window", reply.drafted.longest)
        num_plain = sum(len(columns.ids) for columns in reply.columns)
        if num_plain:
            observe("tgi_request_skipped_tokens", 0, num_plain)
        for row in reply.rows:
            if row.tokens:
                observe("tgi_request_skipped_tokens", len(row.tokens) - 1)


class DrainRate:
    """How fast requests ended lately."""

    _WINDOW_S = 30.0
    _MAX_WAIT_S = 60.0

    def __init__(self, max_samples: int = 256) -> None:
        self._ends: deque[float] = deque(maxlen=max_samples)

    def ended(self) -> None:
        self._ends.append(time.monotonic())

    def wait_s(self, num_requests: int) -> float:
        """Estimate the seconds until `num_requests` end; 1 unobserved."""
        now = time.monotonic()
        while self._ends and now - self._ends[0] > self._WINDOW_S:
            self._ends.popleft()
        if len(self._ends) < 2:
            return 1.0
        rate = (len(self._ends) - 1) / max(now - self._ends[0], 1e-6)
        return min(num_requests / rate, self._MAX_WAIT_S)
