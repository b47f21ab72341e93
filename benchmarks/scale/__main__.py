"""`python -m benchmarks.scale`: a 405B model on 1 to 64 nodes, from formulas beside a simulation, as Markdown.

Nothing is measured: the rates are those of `formulas.Node`. The figures that are known from our own runs are the
router's cost of a call and the share of the bandwidth that decode steps reach.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.scale.formulas import BACK_S, Fleet, Group
from benchmarks.scale.simulation import simulate

OUT = Path(__file__).parent.parent / "results" / "scale.json"
GROUPS = (
    Group(), Group(num_nodes=2), Group(num_nodes=2, is_pipeline=False), Group(num_nodes=4), Group(num_nodes=8),
)  # fmt: skip
FLEETS = (
    *(Fleet(num_nodes=nodes, group=Group(num_nodes=2)) for nodes in (2, 4, 8, 16, 32, 64)),
    Fleet(num_nodes=64, group=Group(num_nodes=8)),
)
PIPELINES = ((2, (1, 2, 3)), (4, (1, 4, 5, 8)), (8, (1, 8, 9, 16)))
_HOP, _BACK, _SPREAD = 0.02, 0.1, 0.2  # of the time of a stage


def figures() -> dict[str, Any]:
    return {
        "groups": {group.name: of_group(group) for group in GROUPS},
        "fleets": [of_fleet(fleet) for fleet in FLEETS],
        "pipelines": [of_pipeline(stages, count) for stages, counts in PIPELINES for count in counts],
    }


def of_group(group: Group) -> dict[str, float]:
    simulated = simulate(group.num_stages, group.num_micro_batches, group.stage_s, group.hop_s, BACK_S)
    ranks = group.num_nodes * group.node.num_gpus
    return {
        "stage_ms": group.stage_s * 1e3,
        "rows": group.total_rows,
        "tokens_per_s": group.tokens_per_s,
        "simulated_tokens_per_s": group.total_rows / simulated.cycle_s,
        "between_tokens_ms": group.cycle_s * 1e3,
        "simulated_between_tokens_ms": simulated.cycle_s * 1e3,
        "million_kv_tokens": group.kv_tokens / 1e6,
        "router_cores_by_rank": group.router_cores(ranks),
        "router_cores_by_endpoint": group.router_cores(group.num_nodes),
    }


def of_fleet(fleet: Fleet) -> dict[str, float]:
    from_disk, from_volume = fleet.cold_starts_s
    return {
        "nodes": fleet.num_nodes,
        "groups": fleet.num_groups,
        "nodes_of_a_group": fleet.group.num_nodes,
        "tokens_per_s": fleet.tokens_per_s,
        "away_share": fleet.away_share,
        "lost_by_one_failure": 1 / fleet.num_groups,
        "cold_start_disk_s": from_disk,
        "cold_start_volume_s": from_volume,
    }


def of_pipeline(num_stages: int, num_micro_batches: int) -> dict[str, float]:
    cycle = max(num_micro_batches, num_stages + (num_stages - 1) * _HOP + _BACK)
    exact = simulate(num_stages, num_micro_batches, 1.0, _HOP, _BACK)
    spread = simulate(num_stages, num_micro_batches, 1.0, _HOP, _BACK, spread=_SPREAD)
    return {
        "stages": num_stages,
        "micro_batches": num_micro_batches,
        "efficiency": num_micro_batches / cycle,
        "simulated": exact.efficiency,
        "simulated_with_spread": spread.efficiency,
    }


def markdown(report: dict[str, Any]) -> Iterator[str]:
    yield "| Nodes of a group | stage, ms | rows | tokens/s | simulated | ms between tokens | simulated |" + (
        " KV tokens, M | router cores, by rank / by endpoint |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, one in report["groups"].items():
        yield (
            f"| {name} | {one['stage_ms']:.1f} | {one['rows']:.0f} | {one['tokens_per_s']:,.0f} | "
            f"{one['simulated_tokens_per_s']:,.0f} | {one['between_tokens_ms']:.0f} | "
            f"{one['simulated_between_tokens_ms']:.0f} | {one['million_kv_tokens']:.1f} | "
            f"{one['router_cores_by_rank']:.2g} / {one['router_cores_by_endpoint']:.2g} |"
        )
    yield ""
    yield "| Nodes | groups of | tokens/s | a group is away | one failure costs | cold start, own disks | one volume |"
    yield "|---|---|---|---|---|---|---|"
    for one in report["fleets"]:
        yield (
            f"| {one['nodes']} | {one['nodes_of_a_group']} | {one['tokens_per_s']:,.0f} | {one['away_share']:.2%} | "
            f"{one['lost_by_one_failure']:.0%} | {one['cold_start_disk_s']:.0f} s | "
            f"{one['cold_start_volume_s']:.0f} s |"
        )
    yield ""
    yield "| Stages | micro-batches | a stage works | simulated | with stage times that vary by 20 % |"
    yield "|---|---|---|---|---|"
    for one in report["pipelines"]:
        yield (
            f"| {one['stages']} | {one['micro_batches']} | {one['efficiency']:.2f} | {one['simulated']:.2f} | "
            f"{one['simulated_with_spread']:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    report = figures()
    print("\n".join(markdown(report)))
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
