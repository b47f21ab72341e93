"""`python worker.py ENGINE MODEL DTYPE`, in the engine's environment: reads texts, and answers seconds and vectors.

A line of JSON each.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path


def main(engine: str, model: str, dtype: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print to their output
    spec = importlib.util.spec_from_file_location("engine", Path(__file__).parent / "engines" / f"{engine}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    embed = module.load(model, dtype)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        texts = json.loads(line)
        began = time.perf_counter()
        vectors = embed(texts)
        seconds = time.perf_counter() - began
        rows = [[float(number) for number in vector] for vector in vectors]
        print(json.dumps([seconds, rows]), file=answers, flush=True)


if __name__ == "__main__":
    sys.path.pop(0)  # an engine's file must not hide the engine
    main(*sys.argv[1:])
