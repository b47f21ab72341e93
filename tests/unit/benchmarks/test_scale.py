"""The table of `benchmarks.scale`: what is known of it by hand, and formulas against the simulation."""

from __future__ import annotations

import pytest

from benchmarks.scale.__main__ import PIPELINES, figures, markdown, of_group, of_pipeline
from benchmarks.scale.formulas import Fleet, Group, Node
from benchmarks.scale.simulation import simulate


@pytest.mark.parametrize(
    ("group", "stage_ms", "rows", "tokens_per_s", "between_ms", "kv"),
    [
        (Group(), 28.6, 64, 2160, 30, 0.5),
        (Group(num_nodes=2), 14.3, 192, 4480, 43, 2.5),
        (Group(num_nodes=2, is_pipeline=False), 26.5, 64, 2330, 27, 2.5),
        (Group(num_nodes=4), 7.2, 320, 8950, 36, 6.6),
        (Group(num_nodes=8), 3.6, 576, 17900, 32, 14.8),
    ],
)
def test_a_405b_model_on_eight_gpus_a_node(
    group: Group, stage_ms: float, rows: int, tokens_per_s: float, between_ms: float, kv: float
) -> None:
    assert group.stage_s * 1e3 == pytest.approx(stage_ms, abs=0.06)
    assert group.total_rows == rows
    assert group.tokens_per_s == pytest.approx(tokens_per_s, rel=0.005)
    assert group.cycle_s * 1e3 == pytest.approx(between_ms, abs=0.6)
    assert group.kv_tokens / 1e6 == pytest.approx(kv, abs=0.1)
    assert of_group(group)["simulated_tokens_per_s"] == pytest.approx(group.tokens_per_s, rel=0.01)


def test_a_slow_network_costs_tensor_parallelism_and_not_a_pipeline() -> None:
    ethernet = Node(links=(450e9, 3.125e9 / 8))
    sliced = Group(num_nodes=2, is_pipeline=False, node=ethernet)
    assert 0.3 < sliced.stage_s < 0.45
    staged = Group(num_nodes=2, node=ethernet)
    assert staged.cycle_s == pytest.approx(Group(num_nodes=2).cycle_s, rel=0.02)


@pytest.mark.parametrize(("num_stages", "counts"), PIPELINES)
def test_one_micro_batch_more_than_stages_hides_what_is_between_them(num_stages: int, counts: tuple[int, ...]) -> None:
    for count in counts:
        one = of_pipeline(num_stages, count)
        assert one["simulated"] == pytest.approx(one["efficiency"], abs=0.01)
        assert one["simulated_with_spread"] <= one["simulated"] + 0.01
    assert of_pipeline(num_stages, num_stages + 1)["simulated"] > 0.99
    assert of_pipeline(num_stages, num_stages + 1)["simulated_with_spread"] > 0.94


def test_a_step_passes_through_the_stages_one_after_the_other() -> None:
    assert simulate(3, 1, 1.0, 0.5, 0.25, num_steps=1).cycle_s == pytest.approx(3 + 2 * 0.5)


def test_groups_side_by_side() -> None:
    fleet = Fleet(num_nodes=64, group=Group(num_nodes=8))
    assert fleet.num_groups == 8
    assert fleet.tokens_per_s == pytest.approx(8 * Group(num_nodes=8).tokens_per_s)
    assert fleet.cold_starts_s[1] > 60 * fleet.cold_starts_s[0]


def test_the_tables_have_a_row_for_each() -> None:
    text = "\n".join(markdown(figures()))
    assert text.count("| 2, PP=2 |") == 1 and text.count("| 64 | 8 |") == 1 and text.count("| 8 | 9 |") == 1
