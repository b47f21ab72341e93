"""vLLM's CPU build, in process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any


def load(model: str, dtype: str) -> Callable[[Sequence[str]], Any]:
    # Threads of their own cores, and memory for one of several engines.
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": f"0-{len(os.sched_getaffinity(0)) - 1}", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM

    loaded = LLM(model, runner="pooling", dtype=dtype, gpu_memory_utilization=0.1)
    return lambda texts: [one.outputs.embedding for one in loaded.embed(list(texts), use_tqdm=False)]
