"""When a running batch yields; the knob scenarios of TGI."""

from __future__ import annotations

import pytest
from support.factories import make_limits

from router.scheduling.queue.budget import (
    BACKLOG_STEPS,
    backlog_tokens,
    round_up,
    when_idle,
    while_running,
    while_running_in_chunks,
)


@pytest.mark.parametrize(
    ("ratio", "num_running", "minimum"),
    [(0.3, 10, 3), (1.2, 10, 12), (0.3, 3, 0), (0.5, 4, 2), (2.0, 1, 2), (0.0, 9, 0)],
)
def test_k1_to_k3_the_ratio_sets_the_minimum(ratio, num_running, minimum):
    allowed = while_running(make_limits(waiting_served_ratio=ratio), num_running, waiting_tokens=1)
    assert (allowed.min_size, allowed.reason) == (minimum, "backpressure")


@pytest.mark.parametrize(("knob", "waited", "dropped"), [(5, 4, False), (5, 5, True), (0, 1, True), (1, 1, True)])
def test_k4_the_minimum_is_dropped_after_enough_steps(knob, waited, dropped):
    allowed = while_running(make_limits(max_waiting_tokens=knob), 10, waited)
    assert (allowed.min_size is None) is dropped
    assert (allowed.reason == "wait_exceeded") is dropped


def test_what_runs_counts_against_the_size():
    limits = make_limits(max_batch_size=8)
    allowed = while_running(limits, 6, 1)
    assert (allowed.max_size, allowed.prefill_tokens) == (2, 4096)
    assert while_running(limits, 9, 1).max_size == 0


def test_an_idle_server_gives_everything():
    allowed = when_idle(make_limits(max_batch_size=8))
    assert (allowed.min_size, allowed.max_size) == (None, 8)


@pytest.mark.parametrize(("backlog", "tokens"), [(False, 512), (True, 1024)])
def test_a_backlog_gets_longer_steps_than_a_few(backlog, tokens):
    limits = make_limits(max_batch_prefill_tokens=1024, default_prefill_tokens=512)
    assert while_running_in_chunks(limits, 8, 30, 10, backlog=backlog).prefill_tokens == min(tokens - 10, 1024 - 30)


def test_images_are_encoded_up_to_the_largest_step_less_the_prompts_that_run():
    limits = make_limits(max_batch_prefill_tokens=1024, default_prefill_tokens=512)
    assert when_idle(limits).image_rows == 1024
    for prompt_tokens in (0, 100):
        allowed = while_running_in_chunks(limits, 8, prompt_tokens + 7, prompt_tokens, backlog=False)
        assert (allowed.image_rows, allowed.takes_any_image) == (1024 - prompt_tokens, not prompt_tokens)


def test_a_backlog_is_eight_steps_of_prompts_unless_all_steps_are_alike():
    assert backlog_tokens(make_limits(max_batch_prefill_tokens=1024, default_prefill_tokens=512)) == 512 * BACKLOG_STEPS
    assert backlog_tokens(make_limits(max_batch_prefill_tokens=1024, default_prefill_tokens=1024)) is None


def test_a_backlog_before_an_idle_server_gets_short_steps_so_that_its_first_need_not_wait_for_the_rest():
    assert when_idle(make_limits(max_batch_prefill_tokens=1024, default_prefill_tokens=512)).prefill_tokens == 512


@pytest.mark.parametrize(
    ("value", "multiple", "rounded"), [(20, 16, 32), (4059, 1, 4059), (4059, 16, 4064), (4059, 256, 4096)]
)
def test_budgets_are_rounded_up_to_blocks(value, multiple, rounded):
    assert round_up(value, multiple) == rounded
