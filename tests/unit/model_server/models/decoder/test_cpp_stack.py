"""All blocks of a decoder in one native call: which models get it, and that it changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from parity.protocol import CHUNKS, CPU, STEPS, PagedBatch, assert_equal_logits, prompts, run_protocol
from support.loading import load as load_path
from support.thread_sleeps import TASKS, sleeps
from support.tiny_models import tiny_checkpoint
from torch import Tensor

from model_server.attention.choice import AttentionChoice
from model_server.attention.reference import ReferenceBackend
from model_server.cpp.library import library
from model_server.models.decoder.decoder import Decoder
from model_server.runner.runner import Kept

# What the stack knows: plain blocks, biases, norms of heads, windows, several rotations or none.
STACKED = [("llama", "plain"), ("llama", "biases_tied"), ("qwen2", "windows"), ("qwen3", "plain"), ("mistral", "plain")]
# Gated attention, and layers with a mixer instead.
MIXED = [("qwen3_5_text", "plain"), ("bamba", "plain"), ("lfm2", "plain")]
STACKED += MIXED
# Post norms, other norms, experts, other activations, multipliers.
OTHERS = [("gemma2", "plain"), ("gpt_neox", "plain"), ("mixtral", "plain"), ("granite", "plain")]


def load(
    folder: Path,
    kind: tuple[str, str],
    dtype: torch.dtype = torch.float32,
    *,
    native: bool = True,
    **overrides: int,
) -> Decoder:
    path = tiny_checkpoint(kind[0], folder / "-".join(kind), variant=kind[1], **overrides)
    backend = AttentionChoice(None, CPU, dtype).for_layers() if native else ReferenceBackend()
    runner = load_path(path, dtype=dtype, backend=backend)
    assert isinstance(runner, Decoder)
    return runner


@pytest.mark.parametrize("kind", STACKED + OTHERS, ids="-".join)
def test_who_is_stacked(kind: tuple[str, str], tmp_path: Path) -> None:
    assert (load(tmp_path, kind)._stack is not None) == (kind in STACKED and library() is not None)


@pytest.mark.parametrize("steps", [STEPS, CHUNKS], ids=["steps", "chunks"])
@pytest.mark.parametrize("kind", STACKED, ids="-".join)
def test_equals_the_blocks(kind: tuple[str, str], steps: list[tuple[int, ...]], tmp_path: Path) -> None:
    """The reference backend does not go with the stack: then the blocks run one after another."""
    sequences = prompts(512)
    expected = run_protocol(load(tmp_path, kind, native=False), sequences, 4, steps=steps)
    assert_equal_logits(run_protocol(load(tmp_path, kind), sequences, 4, steps=steps), expected)


def test_bfloat16_is_close(tmp_path: Path) -> None:
    sequences = prompts(512)
    expected = run_protocol(load(tmp_path, ("llama", "plain"), native=False), sequences, 16)
    actual = run_protocol(load(tmp_path, ("llama", "plain"), torch.bfloat16), sequences, 16, torch.bfloat16)
    for got, want in zip(actual, expected, strict=True):
        assert float((got - want).abs().max() / want.abs().max()) < 5e-2


@pytest.mark.skipif(library() is None, reason="torch's products of a row depend on the others")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", MIXED, ids="-".join)
def test_cuts_change_nothing(kind: tuple[str, str], dtype: torch.dtype, tmp_path: Path) -> None:
    """Token by token as in any pieces, with more than one piece of a recurrence too, bit for bit."""
    runner = load(tmp_path, kind, dtype)
    assert runner._stack is not None
    sequences = prompts(512, (100, 75))

    def logits(steps: list[tuple[int, int]]) -> list[Tensor]:
        batch = PagedBatch(runner, sequences, 16, dtype)
        # Attention of a token of a prompt is another operator's than that of a generated one.
        return [torch.cat(parts) for parts in zip(*[batch.step(counts, (0, 1)) for counts in steps], strict=True)]

    whole = logits([(100, 75)])
    singly = logits([*[(1, 1)] * 75, *[(1, 0)] * 25])
    mixed = logits([(70, 1), (1, 66), *[(1, 1)] * 8, (21, 0)])
    for one, other, third in zip(whole, singly, mixed, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [("llama", "plain"), *MIXED], ids="-".join)
def test_neighbours_change_nothing(kind: tuple[str, str], dtype: torch.dtype, tmp_path: Path) -> None:
    """With the stack bit for bit."""
    runner = load(tmp_path, kind, dtype)
    sequences = prompts(512)
    together = PagedBatch(runner, sequences, 16, dtype)
    lengths = [len(s) - 2 for s in sequences]
    shared = [torch.cat(parts) for parts in zip(together.step(lengths), together.step([1] * len(lengths)), strict=True)]
    for sequence, length, beside in zip(sequences, lengths, shared, strict=True):
        batch = PagedBatch(runner, [sequence], 16, dtype)
        alone = torch.cat([batch.step([length])[0], batch.step([1])[0]])
        if library() is not None:
            assert torch.equal(alone, beside)
        else:
            torch.testing.assert_close(alone, beside, rtol=5e-2, atol=5e-1)


def test_rows_that_are_wanted(tmp_path: Path) -> None:
    runner = load(tmp_path, ("llama", "plain"))
    rows = torch.tensor([17, 0, 4])
    results = []
    for wanted in (None, rows, rows[:0]):
        batch = PagedBatch(runner, prompts(512)[:1], 16)
        with torch.inference_mode():
            results.append(runner.forward(batch.inputs([18], wanted), batch.cache))
    if library() is not None:
        assert torch.equal(results[1], results[0][rows])
    else:  # torch's products of three rows may differ in the last bits from those of eighteen
        torch.testing.assert_close(results[1], results[0][rows])
    assert results[2].shape == (0, 512)


@pytest.mark.parametrize("kind", [("llama", "plain"), ("qwen3_5_text", "plain"), ("lfm2", "plain")], ids="-".join)
def test_hidden_states_that_are_kept(kind: tuple[str, str], tmp_path: Path) -> None:
    """What layers read, from the stack cut before them as from the blocks, and what the head reads; the logits are
    those of a step that keeps nothing."""
    found = []
    for native in (False, True):
        runner = load(tmp_path, kind, native=native, num_hidden_layers=4)
        runner.keep_inputs([3, 0, 2])
        of_runner = []
        for kept in (None, Kept(), Kept(all_tokens=True)):
            batch = PagedBatch(runner, prompts(512)[:2], 16)
            with torch.inference_mode():
                inputs = dataclasses.replace(batch.inputs([18, 7], torch.tensor([17, 24])), kept=kept)
                of_runner.append((kept, runner.forward(inputs, batch.cache)))
        (_, plain), (last, logits), (every, all_logits) = of_runner
        assert last is not None and last.final is not None and every is not None and every.final is not None
        assert torch.equal(plain, logits)
        torch.testing.assert_close(plain, all_logits, rtol=1e-4, atol=1e-4)
        assert [len(states) for states in last.inputs] == [25, 25, 25] and len(last.final) == 2
        torch.testing.assert_close(last.final, every.final[[17, 24]], rtol=1e-4, atol=1e-4)
        with torch.inference_mode():
            torch.testing.assert_close(last.inputs[1], runner.embed(inputs.input_ids))
        found.append([*last.inputs, last.final])
    for blocks, stack in zip(*found, strict=True):
        torch.testing.assert_close(blocks, stack, rtol=1e-4, atol=1e-4)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.long
@pytest.mark.skipif(not TASKS.exists(), reason="needs Linux's /proc")
@pytest.mark.usefixtures("two_threads")
def test_threads_do_not_sleep_between_operators(tmp_path: Path) -> None:
    """A second thread with helpers of its own makes the OpenMP runtime's barriers sleep; blocks have seven each."""
    layers, steps = 40, 10
    runner = load(tmp_path, ("llama", "plain"), num_hidden_layers=layers)
    if runner._stack is None:
        pytest.skip("no C++ operators on this machine")
    batch = PagedBatch(runner, [torch.arange(1, 60)], 16)
    batch.step([59 - steps])
    with ThreadPoolExecutor(1) as pool:
        before = sleeps()
        for _ in range(steps):
            pool.submit(batch.step, [1]).result()
        assert sleeps() - before < steps * layers
