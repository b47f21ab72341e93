"""The case "stages" of the router's benchmark: when a step has been through all of them."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.router.null_shard import Device, Job
from benchmarks.router.stages import lines


@pytest.mark.parametrize(("num_steps_at_once", "end"), [(1, 3 + 2 * 0.5 + 0.25), (3, 3 + 2 * 0.5 + 0.25 + 2)])
def test_each_stage_works_on_another_step(num_steps_at_once: int, end: float) -> None:
    async def ends() -> list[float]:
        device = Device(num_stages=3)
        device.step_s, device.hop_s, device.back_s = 1.0, 0.5, 0.25
        return [device._end_of(Job(is_step=True)) for _ in range(num_steps_at_once)]

    assert asyncio.run(ends())[-1] == pytest.approx(end)


def test_the_report_names_what_is_possible() -> None:
    cell = {"rows": 8, "busy_share": 0.893, "possible_share": 0.9434, "starved_share": 0.01}
    ((what, figure, aim),) = lines({"2 stages, 2 micro-batches": cell})
    assert (what, aim) == ("2 stages, 2 micro-batches", "")
    assert figure == ("each stage busy 89.3 % of the time, 94 % possible; 8 rows, router waited for a core 1 %")
