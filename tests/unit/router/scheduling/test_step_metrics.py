"""TGI's names for what a step did, and the estimate for Retry-After."""

from __future__ import annotations

import pytest
from support.factories import RecordingMetrics
from support.fake_rows import Script
from support.fake_shard import FakeShard
from support.scheduler_harness import running_scheduler

from router.scheduling import step_metrics
from router.scheduling.cache.prefix_cache import PrefixCache
from router.scheduling.cache.states import StateSlots
from router.scheduling.step_metrics import DrainRate
from router.shards.interface import EncodedImages, StepReply


async def test_names_of_a_short_run():
    async with running_scheduler(FakeShard(pipeline_depth=1), waiting_served_ratio=0.0) as h:
        h.submit("a", 3, 4)
        assert h.metrics.gauges["tgi_queue_size"] == 1
        await h.step(1)
        h.submit("b", 3, 2)
        await h.step(2)
        assert h.metrics.gauges["tgi_queue_size"] == 0
        await h.step(1)
        assert h.metrics.gauges["tgi_batch_current_size"] == 1  # b has ended
        assert h.metrics.gauges["tgi_batch_current_max_tokens"] == 6
        assert h.metrics.gauges["tgi_kv_blocks_live"] == 6
        assert h.metrics.gauges["tgi_kv_cache_usage"] == 6 / h.scheduler.allocator.num_usable
        await h.finish()
        assert h.metrics.gauges["tgi_batch_current_size"] == 0
        assert h.metrics.gauges["tgi_batch_current_max_tokens"] == 0
        assert h.metrics.gauges["tgi_kv_blocks_live"] == 0
        assert h.metrics.gauges["tgi_kv_blocks_free"] == h.scheduler.allocator.num_usable
        assert h.metrics.counts == {
            "tgi_batch_inference_count{prefill}": 2,
            "tgi_batch_inference_count{decode}": 3,
            "tgi_batch_inference_success{prefill}": 2,
            "tgi_batch_inference_success{decode}": 3,
            "tgi_batch_concat{backpressure}": 1,
        }
        observed = h.metrics.observed
        assert observed["tgi_batch_next_size"] == [1, 1]
        assert observed["tgi_batch_forward_duration{decode}"] == pytest.approx([0.002] * 3)
        assert observed["tgi_batch_decode_duration{prefill}"] == pytest.approx([0.001] * 2)
        assert observed["tgi_batch_concat_duration{decode}"] == pytest.approx([0.0005])
        assert len(observed["tgi_batch_inference_duration{decode}"]) == 3
        assert observed["tgi_request_skipped_tokens"] == [0] * 6


async def test_steps_that_ran_ahead_of_the_last_answer_are_not_counted():
    async with running_scheduler(FakeShard(pipeline_depth=2, scripts={"a": Script(eos_after=3)})) as h:
        h.submit("a", 3, 9)
        await h.finish()
        assert h.trace.count("D(a)") + h.trace.count("D()") > 2, "one ran ahead"
        assert h.metrics.counts["tgi_batch_inference_count{decode}"] == 2
        assert h.metrics.counts["tgi_batch_inference_success{decode}"] == 2
        assert len(h.metrics.observed["tgi_batch_forward_duration{decode}"]) == 2


def test_every_name_is_known_to_the_real_metrics():
    from router.metrics import Metrics

    real, recorded = Metrics(), RecordingMetrics()
    for metrics in (real, recorded):
        step = step_metrics.StepMetrics(metrics)
        step.queue_size(3)
        step.request_failed("dropped")
        step.request_failed("generation")
        step.admitted(2, "backpressure")
        step.current_batch(1, 2)
        step.kv_blocks(3, 1, 5)
        for method in ("prefill", "decode"):
            step.failed(method)
        step.filtered(0.1)
    text = real.render().decode()
    for key in [*recorded.counts, *recorded.observed, *recorded.gauges]:
        assert key.split("{")[0] in text


def test_slots_of_states():
    recorded, cache = RecordingMetrics(), PrefixCache(100, 16, StateSlots(4, 16))
    step = step_metrics.StepMetrics(recorded)
    for length in (200, 260):
        prompt = [*range(length)]
        found = cache.allocate(length, prompt)
        step.states(cache.states)
        live = recorded.gauges["tgi_state_slots{live}"]
        cache.free(found, prompt)
        step.states(cache.states)
        step.states(cache.states)
    assert live == 2 and recorded.gauges["tgi_state_slots{live}"] == 0
    assert (recorded.gauges["tgi_state_slots{saved}"], recorded.gauges["tgi_state_slots{free}"]) == (2, 2)
    assert (recorded.counts["tgi_state_saves"], recorded.counts["tgi_state_restores"]) == (2, 1)
    assert recorded.counts["tgi_state_recomputed_tokens"] == 16


def test_a_saved_states_slot_that_a_request_takes():
    recorded, cache = RecordingMetrics(), PrefixCache(100, 16, StateSlots(2, 16))
    step = step_metrics.StepMetrics(recorded)
    prompt = [*range(200)]
    cache.free(cache.allocate(200, prompt), prompt)
    cache.allocate(1, [500])
    step.states(cache.states)
    cache.allocate(1, [501])
    step.states(cache.states)
    assert [recorded.gauges[f"tgi_state_slots{{{use}}}"] for use in ("live", "saved", "free")] == [2, 0, 0]


def test_images_of_a_step():
    recorded = RecordingMetrics()
    step = step_metrics.StepMetrics(recorded)
    for misses in (2, 0):
        step.answered("prefill", StepReply(images=EncodedImages(hits=1, misses=misses, encode_s=0.5)), 1.0, 0.1)
    assert recorded.counts["tgi_encoder_cache_hits"] == 2 and recorded.counts["tgi_encoder_cache_misses"] == 2
    assert recorded.observed["tgi_image_encode_duration"] == [0.5]


class TestDrainRate:
    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        now = [100.0]
        monkeypatch.setattr(step_metrics.time, "monotonic", lambda: now[0])
        return now

    def test_nothing_seen(self, clock):
        assert DrainRate().wait_s(5) == 1.0

    def test_a_steady_rate(self, clock):
        rate = DrainRate()
        for _ in range(11):
            rate.ended()
            clock[0] += 0.5
        clock[0] -= 0.5
        assert rate.wait_s(10) == pytest.approx(5.0)

    def test_old_ends_do_not_count(self, clock):
        rate = DrainRate()
        rate.ended()
        rate.ended()
        clock[0] += 1000
        assert rate.wait_s(10) == 1.0

    def test_the_estimate_is_bounded(self, clock):
        rate = DrainRate()
        rate.ended()
        clock[0] += 20
        rate.ended()
        assert rate.wait_s(1000) == 60.0
