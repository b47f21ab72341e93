"""What passes between stages: three stages of one process, each with a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from support.stage_mailboxes import stage_links
from torch import Tensor

from model_server.distributed.stage_links import Passage, StageLinks, StageTokens
from model_server.errors import FatalError, OutOfMemoryError, RequestError, StepFailedError

STAGES = 3
OnThreads = Callable[[list[Callable[[], object]]], list[object]]


@pytest.fixture
def links() -> list[StageLinks]:
    return stage_links(STAGES)


@pytest.fixture
def on_threads() -> Iterator[OnThreads]:
    with ThreadPoolExecutor(STAGES) as pool:

        def run(works: list[Callable[[], object]]) -> list[object]:
            futures = [pool.submit(work) for work in works]
            return [future.exception(timeout=60) or future.result() for future in futures]

        yield run


def step(
    links: StageLinks, call: int, num_tokens: int = 4, fails: Exception | None = None, *, early: bool = False
) -> StageTokens:
    """One step in which every stage adds 1 to the residual stream, and the last takes its first column as ids.

    fails: this stage's own error, in its forward, or early: before it has received anything.
    """
    passage = links.start(call, 2)
    try:
        if fails is not None and early:
            raise fails
        hidden = passage.receive(num_tokens)
        if fails is not None:
            raise fails
        hidden = torch.full((num_tokens, 8), float(call)) if hidden is None else hidden
        passage.send(hidden + 1)
        return finish(passage, hidden + 1)
    except Exception as error:
        passage.fail(error)
        raise


def finish(passage: Passage, hidden: Tensor) -> StageTokens:
    if not passage.is_last:
        return passage.tokens()
    tokens = StageTokens([int(value) for value in hidden[:2, 0]], [False, True])
    passage.reply(tokens)
    return tokens


def test_all_stages_get_what_the_last_has_sampled(links: list[StageLinks], on_threads: OnThreads) -> None:
    for call in range(3):
        said = on_threads([partial(step, stage, call) for stage in links])
        assert said == [StageTokens([call + STAGES] * 2, [False, True])] * STAGES


@pytest.mark.parametrize("early", [False, True], ids=["in its forward", "before it received"])
@pytest.mark.parametrize("stage", range(STAGES))
def test_a_failed_step_fails_on_all_stages_and_the_next_one_runs(
    links: list[StageLinks],
    on_threads: OnThreads,
    stage: int,
    early: bool,
) -> None:
    own = RequestError("row 7 is bad")
    works = [partial(step, link, 0, fails=own if s == stage else None, early=early) for s, link in enumerate(links)]
    said = on_threads(works)
    assert said[stage] is own
    for other, error in enumerate(said):
        assert other == stage or (isinstance(error, StepFailedError) and str(error) == "row 7 is bad")
    assert on_threads([partial(step, link, 1) for link in links]) == [StageTokens([1 + STAGES] * 2, [False, True])] * 3


def test_lack_of_memory_is_lack_of_memory_on_all_stages(links: list[StageLinks], on_threads: OnThreads) -> None:
    short = OutOfMemoryError("no memory")
    said = on_threads([partial(step, link, 0, fails=short if s == 1 else None) for s, link in enumerate(links)])
    assert all(isinstance(error, OutOfMemoryError) for error in said)


def test_a_header_of_another_call_is_fatal(links: list[StageLinks], on_threads: OnThreads) -> None:
    def first() -> None:
        passage = links[0].start(5, 2)
        passage.send(torch.zeros(4, 8))

    said = on_threads([first, lambda: links[1].start(6, 2).receive(4)])
    assert isinstance(said[1], FatalError) and "call 5" in str(said[1]) and "call 6" in str(said[1])
