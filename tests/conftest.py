"""Shared by all tests: a clean environment, and one place for fixtures that several folders use."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support import effort

from wire.log.levels import PACKAGES

# A developer's shell must not change what the tests see.
_OURS = (
    "MODEL_ID", "PORT", "HOSTNAME", "NUM_SHARD", "DTYPE", "REVISION", "ATTENTION", "PREFIX_CACHING", "RANK",
    "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOG_LEVEL", "JSON_OUTPUT", "MAX_TOTAL_TOKENS", "MAX_BATCH_SIZE",
)  # fmt: skip


# The real clients run in environments of their own (tests/clients/run.py), so do the kernels (`make kernels`) and the
# stand-in for a GPU (`make fake-card`); tests that need a card are `make test-gpu`, and those of the chart and the like
# `make check-deploy`; those of the wheel need one (`make wheel`).
collect_ignore = ["clients", "deploy", "kernels", "gpu", "fake_card", "wheel"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="more cases of each test that makes random ones")


def pytest_configure(config: pytest.Config) -> None:
    effort.thorough = config.getoption("--thorough")
    with contextlib.suppress(ImportError):  # tests/gpu does without
        from hypothesis import HealthCheck, settings

        # A machine that is busy with something else is no failure.
        settings.register_profile(
            "patient",
            max_examples=effort.examples(30, 400),
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        )
        settings.load_profile("patient")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """All that is imported stays, and takes the garbage collector up to a second: not for each of its looks."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    seen: dict[tuple[str, str], dict[int, int]] = {}
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("random")
        thinned = item.get_closest_marker("thinned")
        if thinned is not None and effort.is_thinned_out(_places(item, seen), *thinned.args):
            item.add_marker("long")


def _places(item: Any, seen: dict[tuple[str, str], dict[int, int]]) -> list[int]:
    """Of the value of each parameter of a case among those `seen`, by function and name."""
    function = item.nodeid.partition("[")[0]
    numbers = [(seen.setdefault((function, name), {}), id(value)) for name, value in item.callspec.params.items()]
    return [places.setdefault(value, len(places)) for places, value in numbers]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if effort.is_left_out({mark.name for mark in item.iter_markers()}, time.time()):
        pytest.skip("no time is left for long tests (LONG_TESTS_END)")


@pytest.hookimpl(optionalhook=True)  # tests/gpu does without xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests go to processes by file, and files that share a server to one process."""
    if config.getvalue("dist") != "loadfile":
        return None
    from support.shared_servers import scope_of
    from xdist.scheduler import LoadFileScheduling

    class LoadSharedServer(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid.split("::", 1)[0])

    return LoadSharedServer(config, log)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Several tests run at a time; small matrices gain nothing by threads, which wait for each other and spin."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_process() -> Iterator[None]:
    """What one test leaves in the process does not reach the next one. One fixture: some ten thousand tests have it."""
    # Sums that cancel must not fail one run in a thousand.
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)
    removed = {name: os.environ.pop(name) for name in _OURS if name in os.environ}
    # A command that a test runs in its own process sets up logging for all.
    loggers = [logging.getLogger(name) for name in ("", *PACKAGES)]
    levels, handlers = [logger.level for logger in loggers], loggers[0].handlers
    loggers[0].handlers = list(handlers)
    yield
    logging.captureWarnings(False)
    loggers[0].handlers = handlers
    for logger, level in zip(loggers, levels, strict=True):
        if logger.level != level:
            logger.setLevel(level)
    os.environ.update(removed)


# Read once, when huggingface_hub or tokenizers is imported; children inherit both.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Some hundred processes are started: they find modules compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
