"""The bars. Shares of what S0 measured on the same card in the same run, unless `on` says otherwise."""

from __future__ import annotations

from benchmarks.gpu.record import Target

# What runs without Tercet's kernels has no bar; a shape's name is the one in `shapes`.
TARGETS: dict[str, Target] = {
    "decode 8B b=1 c=1024": Target(0.80, 0.90),
    "decode 1B b=1 c=1024": Target(0.55, 0.70),
    "decode 8B b=8 c=1024": Target(0.78, 0.88),
    "decode 8B b=32 c=1024": Target(0.75, 0.85),
    "decode 8B b=64 c=1024": Target(0.72, 0.82),
    "decode 8B b=128 c=1024": Target(0.68, 0.80),
    "decode 8B b=256 c=1024": Target(0.62, 0.76),
    "decode attention b=64 c=4096": Target(0.80, 0.90),
    "prefill 8B 1x2048": Target(0.60, 0.72),
    "prefill 8B 8x1024 ragged": Target(0.60, 0.72),
    "prefill attention n=8192": Target(0.50, 0.62),
    "offline 8B 1000/1000": Target(0.60, 0.73),
    "offline 8B 128/2048": Target(0.60, 0.73),
    # Against bfloat16 in the same run.
    "int4 in groups of 128 product n=1": Target(3.0, 3.5, on="peer"),
    "int4 in groups of 128 product n=256": Target(0.9, 1.0, on="peer"),
    "int4 in groups of 128 product n=2048": Target(0.9, 1.0, on="peer"),
    "fp8 by rows for 8-bit activations product n=2048": Target(1.6, 1.75, on="peer"),
    "idle 8B b=32": Target(0.04, 0.01, on="value", at_least=False),
    "served/in-process 8B": Target(0.93, 0.97, on="value"),
    "added latency 8B": Target(0.06, 0.03, on="value", at_least=False),
    "added latency 1B": Target(0.15, 0.08, on="value", at_least=False),
    "peer generate_batch": Target(1.5, 2.5, on="peer"),
    "KV allocated/possible": Target(0.92, 0.97, on="value"),
    "start": Target(45.0, 20.0, on="value", at_least=False),
    "capture": Target(30.0, 20.0, on="value", at_least=False),
}


def time_to_first_token(prefill_roofline_s: float) -> Target:
    """Of an idle server, in seconds, for a prompt whose prefill takes at least `prefill_roofline_s`."""
    base = prefill_roofline_s / 0.7
    return Target(1.5 * base + 0.010, 1.2 * base + 0.005, on="value", at_least=False)
