"""The stages, in the order in which they run: what each is, its module, and the seconds it may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """module: has `run(context)`, or `PARTS`, a mapping of names to such functions, each run in a process of its own
    beside the others. box_s: with a GPU. for_model: also measures a user's own model."""

    name: str
    what: str
    module: str
    box_s: float
    for_model: bool = False


STAGES = (
    Stage("S0", "probe: versions, bandwidth, matrix rate, gap per kernel", "probe", 60, for_model=True),
    Stage("S1", "kernels against float64", "kernels", 120),
    Stage("S2", "CUDA graphs", "graphs", 90),
    Stage("S3", "end-to-end equality", "equality", 120),
    Stage("S4", "engine against the roofline", "speed", 210, for_model=True),
    Stage("S5", "the whole server", "served", 150, for_model=True),
    Stage("S6", "peers on the same card", "peers", 180, for_model=True),
    Stage("S7", "memory", "memory", 90),
    Stage("S8", "several ranks on one card", "ranks", 60),
    Stage("S9", "faults", "faults", 90),
    Stage("S10", "smoke: what Triton needs, first steps compared with plain torch", "smoke", 90),
    Stage("S11", "the server while requests keep arriving", "arrivals", 360, for_model=True),
    Stage("S12", "other tiles of attention and products", "tiles", 240),
    Stage("S13", "the demo model served: its text, many clients at once", "demo_served", 90),
    Stage("S14", "the kernels' tests, a process for each file", "kernel_tests", 180),
    Stage("S15", "decode and prompts against the roofline, kernels by time", "quick_speed", 110, for_model=True),
    Stage("S16", "a server under load", "quick_served", 120, for_model=True),
    Stage("S17", "a tiny model of every type against transformers", "model_types", 180),
)
BY_NAME = {stage.name: stage for stage in STAGES}
