"""What goes wrong on a card: memory is short, scores are no numbers, a rank is killed, the device is lost."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Iterator
from pathlib import Path

import parity.engine_run as engine_run
import pytest
import torch
from engines import CARD, CPU, answers_of, ids_of, make_engine, small_sizes
from safetensors.torch import load_file, save_file
from serving import on_card, small
from support.launched import Family, Stream, ended
from support.tiny_models import tiny_checkpoint

from model_server.errors import OutOfMemoryError

TOKENS = 30


# ---- In an engine


@pytest.fixture
def tiny() -> Iterator[None]:
    with small_sizes(), torch.inference_mode():
        yield


@pytest.mark.usefixtures("tiny")
def test_a_step_without_memory_fails_and_the_next_is_right(tmp_path: Path) -> None:
    """Another process takes what is left, and gives it back."""
    checkpoint = tiny_checkpoint("llama", tmp_path / "model")
    expected = answers_of(make_engine(checkpoint, CPU, torch.float32)[0])
    engine, _ = make_engine(checkpoint, CARD, torch.float32)
    runtime = ctypes.CDLL("libcudart.so.13")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] >> 21 << 21
    assert runtime.card_reserve_bytes(ctypes.c_size_t(free))
    held = []
    with pytest.raises(torch.OutOfMemoryError):  # what torch itself has left
        while True:
            held.append(torch.empty(512, dtype=torch.uint8, device=CARD))
    with pytest.raises((OutOfMemoryError, torch.OutOfMemoryError)):
        answers_of(engine)
    runtime.card_return_bytes(ctypes.c_size_t(free))
    held.clear()
    engine.clear(None)
    assert ids_of(answers_of(engine)) == ids_of(expected)


@pytest.mark.usefixtures("tiny")
def test_scores_that_are_no_numbers_fail_their_request_alone(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("llama", tmp_path / "model")
    expected = answers_of(make_engine(checkpoint, CPU, torch.float32)[0])
    request = engine_run.make_requests()[2]
    others = {one for other in engine_run.make_requests() if other.id != request.id for one in other.input_ids}
    own = next(one for one in request.input_ids if one not in others)
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.embed_tokens.weight"][own] = torch.nan
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    router = engine_run.Router(make_engine(checkpoint, CARD, torch.float32)[0])
    failed: list[int] = []
    take = router._take

    def without_errors(result: object) -> object:
        for generation in list(result.generations):  # type: ignore[attr-defined]
            if generation.error is not None:
                assert "not numbers" in generation.error
                failed.append(generation.request_id)
                router._lengths.pop(generation.request_id)
                result.generations.remove(generation)  # type: ignore[attr-defined]
        return take(result)  # type: ignore[arg-type]

    router._take = without_errors  # type: ignore[method-assign, assignment]
    answers = router.chunked(engine_run.make_requests())
    assert failed == [request.id]
    assert ids_of(answers) == {key: ids for key, ids in ids_of(expected).items() if key != request.id}


# ---- In the whole server


@pytest.mark.e2e
def test_a_card_that_is_too_small_is_said_at_the_start(tmp_path: Path) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model")
    with pytest.raises(AssertionError, match="the launcher ended") as ended_early:  # noqa: SIM117
        with on_card(model, tmp_path / "reports", *small(), mib=604):
            pass
    log = str(ended_early.value)
    assert "Not enough memory to handle" in log or "out of memory" in log
    assert "Traceback" not in log


@pytest.mark.e2e
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_killed_in_a_step(rank: int, tmp_path: Path) -> None:
    """The other one's kernels wait for it, and no collective fails: the server ends all the same."""
    options = [*small(max_total_tokens=300, max_batch_total_tokens=1024), "--num-shard", "2"]
    with on_card("demo", tmp_path / "reports", *options, devices=2, is_clean=False, FAKE_CARD_MEET_S="600") as server:
        family = Family(server)
        running = [Stream(server, 200) for _ in range(2)]
        for stream in running:
            assert stream.started.wait(600), server.log()
        family.shards[rank].send_signal(signal.SIGKILL)
        for stream in running:
            assert stream.ended.wait(120) and not stream.is_complete
            assert sum("error" in event for event in stream.events) == 1
        assert ended(server, 120) == 1
        assert family.left() == []


@pytest.mark.e2e
def test_a_device_that_is_lost_ends_the_server(tmp_path: Path) -> None:
    """As after an illegal address: no later call succeeds, so the process is of no use."""
    model = tiny_checkpoint("llama", tmp_path / "model")
    options, file = small(max_total_tokens=2000, max_batch_total_tokens=4096), tmp_path / "break"
    with on_card(model, tmp_path / "reports", *options, is_clean=False, FAKE_CARD_BREAK=str(file)) as server:
        stream = Stream(server, 1900)
        assert stream.started.wait(600), server.log()
        file.touch()
        assert stream.ended.wait(600) and not stream.is_complete
        assert "error" in stream.events[-1], server.log()
        assert ended(server, 120) == 1
        assert "illegal memory access" in server.log()
