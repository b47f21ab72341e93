"""The matrices of adapters for the C++ operators, while others of the same product are loaded."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest
import torch

from model_server.adapters import panels as module
from model_server.adapters.factors import joined
from model_server.adapters.panels import AdapterPanels, packed
from model_server.cpp import library
from model_server.cpp.structs import AdapterFactorsStruct
from model_server.memory.huge_pages import Arena

LIMIT_S = 20.0
CPU = torch.device("cpu")


@pytest.mark.skipif(not library.usable(CPU, torch.float32), reason="needs the C++ operators")
def test_the_first_adapter_of_a_product_while_a_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever thread makes the structs, what was put in is in effect: a step reaches them first if it can."""
    subject = AdapterPanels(2)
    x, out = torch.ones(1, 4), torch.zeros(1, 32)
    step_is_there, is_put = threading.Event(), threading.Event()

    class Structs:
        """Makes the array for the load when the step is there, and for the step when the load is over."""

        def __mul__(self, number: int) -> Any:
            def make() -> ctypes.Array[AdapterFactorsStruct]:
                is_load = threading.current_thread() is load
                assert (step_is_there if is_load else is_put).wait(LIMIT_S)
                return (AdapterFactorsStruct * number)()

            if threading.current_thread() is not load:
                step_is_there.set()
            return make

    def put() -> None:
        subject.put(0, factors)
        is_put.set()

    factors = packed(joined([(torch.ones(2, 4), torch.ones(32, 2), 0)]), Arena(2**12))
    load = threading.Thread(target=put)
    with monkeypatch.context() as patch:
        patch.setattr(module, "AdapterFactorsStruct", Structs())
        load.start()
        while not subject._packed and not step_is_there.is_set():
            subject.add(torch.tensor([1]), x, out)  # another adapter's, which changes nothing here
            step_is_there.set()
        subject.add(torch.tensor([1]), x, out)
        step_is_there.set()
        load.join(LIMIT_S)
    assert not load.is_alive() and not out.any()
    subject.add(torch.tensor([0]), x, out)
    assert torch.equal(out, torch.full((1, 32), 8.0))
