"""What the interpreter, which has one thread, cannot show of the sampling kernels: their order on a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.interpreter  # needs no card

HERE = Path(__file__).parent
PROGRAM = """
import sys

import triton
from aot.compiler import arguments
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from aot.variants.sampling.sampling import variants

variant = next(v for v in variants() if v.name == sys.argv[1])
signature, constants = arguments(variant.kernel, variant.signature, variant.constants)
source = ASTSource(fn=variant.kernel, signature=signature, constexprs=constants)
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": variant.num_warps}).asm["ptx"])
"""


def assembly(name: str, folder: Path) -> list[str]:
    """PTX of a variant, compiled in a process where the interpreter is off."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (HERE, HERE.parents[1] / "src")))
    environment["TRITON_CACHE_DIR"] = str(folder)
    command = [sys.executable, "-c", PROGRAM, name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", ["sampling_unfiltered_128256", "sampling_filtered_128256"])
def test_a_count_is_raised_when_all_threads_have_read_it(name: str, tmp_path: Path) -> None:
    """Each thread loads the count for itself, one stores: those that load late would draw with another number."""
    lines = assembly(name, tmp_path)
    raised = 0
    for number, line in enumerate(lines):
        stored = re.search(r"st\.global\.b64 \[ (%rd\d+) \+ 0 \]", line)
        loads = [
            i for i in range(number) if stored and re.search(rf"ld\.global\.b64 .*\[ {stored[1]} \+ 0 \]", lines[i])
        ]
        if loads:
            raised += 1
            assert any("bar.sync" in between for between in lines[loads[-1] : number])
    assert raised == 1
