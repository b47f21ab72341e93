"""The stand-in for a GPU in every test here: kernels compute, and a test during which it complains fails.

`--order late` runs what the device does as late as the waits allow, `--order random` in a random order, `--order both`
one after the other. `--seed` repeats a random order; it is printed.
"""

from __future__ import annotations

import collections
import os
import random
from collections.abc import Iterator

import pytest
from _pytest.terminal import TerminalReporter
from stand_in import numbers, queued
from stand_in.counters import counted, faults, set_order

SHOWN = (
    "missing waits, what a capture forbids, pinned buffers used too early, work on a wrong stream, ranks that part, "
    "launches a GPU refuses, wrong results of the host's part"
)
NOT_SHOWN = "device code and its faults, rounding on a GPU, flash-attn, cuDNN, multicast, overlap of streams, any speed"
ORDERS = {"late": ("late",), "random": ("random",), "both": ("late", "random")}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--order", choices=ORDERS, default="both", help="in which the device's work runs")
    parser.addoption("--seed", type=int, default=None, help="of the random order")


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist get the controller's.
    seed = config.getoption("--seed")
    if seed is None:
        seed = int(os.environ.setdefault("FAKE_CARD_SEED", str(random.randrange(1 << 31))))
    config.option.seed = seed
    numbers.install()


def pytest_report_header(config: pytest.Config) -> str:
    import torch

    return f"torch {torch.__version__}, order {config.getoption('--order')}, --seed {config.option.seed}"


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    import torch

    ran = collections.Counter(
        report.nodeid.split("::")[0].rpartition("/")[2].removeprefix("test_").removesuffix(".py").replace("_", " ")
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, ())
        if report.when == "call"
    )
    counted_by_file = ", ".join(f"{name} {count}" for name, count in sorted(ran.items()))
    terminalreporter.section(f"a stand-in for a GPU, torch {torch.__version__}")
    terminalreporter.write_line(f"Ran: {counted_by_file or 'nothing'}; order {config.getoption('--order')}.")
    terminalreporter.write_line(f"Looked for: {SHOWN}.")
    terminalreporter.write_line(f"Cannot show: {NOT_SHOWN}.")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "order" in metafunc.fixturenames:
        metafunc.parametrize("order", ORDERS[metafunc.config.getoption("--order")], indirect=True)


@pytest.fixture
def order(request: pytest.FixtureRequest) -> Iterator[str]:
    """The order of the device's work, as FAKE_CARD_ORDER names it; in force in this process."""
    chosen = "late" if request.param == "late" else f"random:{request.config.option.seed}"
    set_order(chosen)
    yield chosen
    set_order("late")


@pytest.fixture(autouse=True)
def no_faults(request: pytest.FixtureRequest) -> Iterator[None]:
    """The stand-in saw no fault during the test."""
    queued.errors.clear()
    queued.waits.clear()
    with counted() as grown:
        yield
    if request.node.get_closest_marker("faulty") is None:
        assert not queued.errors, queued.errors[0]
        assert faults(grown) == {}
