"""Where the kernel tests run: in Triton's interpreter, or on a card (`--device cuda`).

A test takes the fixture `device`, creates its tensors there and names no device itself: so the same checks run on both.
Generators stay on the CPU, for the same numbers everywhere.
"""

from __future__ import annotations

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="cpu: Triton's interpreter")


def pytest_configure(config: pytest.Config) -> None:
    # Triton asks when a kernel is defined: before any test file is imported, in every worker process.
    if config.getoption("--device") == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        from support.triton_interpreter import mend

        mend()
    else:
        os.environ.pop("TRITON_INTERPRET", None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--device") == "cpu":
        return
    for item in items:
        if item.get_closest_marker("interpreter"):
            item.add_marker(pytest.mark.skip(reason="only in the interpreter"))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> object:
    """torch.device of the kernels' tensors."""
    import torch

    name = request.config.getoption("--device")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.fail("--device cuda, but torch sees no CUDA device")
    if name == "cpu":
        torch.set_num_threads(1)  # the interpreter computes on one core; more threads only disturb other workers
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
