"""`launcher estimate`: its rows against the planning's own figures, and its command from the options to the output."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.hub_server import HubServer

from launcher.config import LauncherConfig
from launcher.estimate.command import run_estimate
from launcher.estimate.config import EstimateConfig
from launcher.estimate.table import Row, rows
from launcher.planning import memory
from launcher.planning.hardware import Gpu, Hardware
from launcher.planning.model_info import ModelInfo, from_config, shown_bytes

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256, "torch_dtype": "bfloat16",
}  # fmt: skip
BYTES = 2 * 8_030_261_248
GIB = 1 << 30


def info(**more: Any) -> ModelInfo:
    return dataclasses.replace(from_config(LLAMA | more), weight_bytes=BYTES)


def found(
    info: ModelInfo,
    num_shard: int | None = None,
    available: int | None = 80 * GIB,
    capability: tuple[int, int] = (9, 0),
) -> list[Row]:
    return rows(info, Hardware(), num_shard, capability=capability, available=available)


def test_every_number_of_shards_that_divides_the_heads() -> None:
    assert [row.num_shard for row in found(info())] == [n for n in (1, 2, 4, 8) for _ in range(6)]
    assert {row.num_shard for row in found(info(num_attention_heads=6, num_key_value_heads=6))} == {1, 2}
    assert found(info(), 3) == []


def test_a_row_has_the_figures_of_the_launch() -> None:
    first = found(info())[0]
    hardware = Hardware(gpus=(Gpu(memory_mib=80 * 1024, compute_capability=(9, 0)),))
    planned = memory.estimate(LauncherConfig(dtype="bfloat16"), hardware, info(), 1)
    assert (first.weight_bytes, first.token_bytes, first.tokens) == (BYTES, planned.token, planned.tokens)
    assert first.token_bytes == 2 * 32 * 8 * 128 * 2
    assert first.requests(2048) == (first.tokens or 0) // 2048 > 0


def test_smaller_numbers_hold_more() -> None:
    plain, small_cache, small_weights, small_both, smallest_weights, smallest_both = found(info(), 1)
    assert small_cache.token_bytes == (plain.token_bytes or 0) // 2
    assert (small_weights.weight_bytes or 0) < (plain.weight_bytes or 0) * 0.6
    assert (smallest_weights.weight_bytes or 0) < (small_weights.weight_bytes or 0) * 0.7
    for ways in ((plain, small_weights, smallest_weights), (small_cache, small_both, smallest_both)):
        counts = [row.tokens or 0 for row in ways]
        assert counts == sorted(counts) and len(set(counts)) == 3


def test_an_old_gpu_has_no_8_bit_cache() -> None:
    assert {row.cache for row in found(info(), capability=(8, 9))} == {"16 bits", "8 bits"}
    assert {row.cache for row in found(info(), capability=(8, 6))} == {"16 bits"}


def test_a_quantized_checkpoint_stays_as_it_is() -> None:
    quantized = info(quantization_config={"quant_method": "gptq", "bits": 4})
    assert {row.weights for row in found(quantized)} == {"gptq"}


def test_a_checkpoint_that_asks_for_a_small_cache_has_one_without_an_option() -> None:
    wanting = dataclasses.replace(info(), wants_float8_cache=True)
    assert {(row.cache, row.kv_cache_dtype) for row in found(wanting)} == {("8 bits", None)}


def test_weights_that_do_not_fit() -> None:
    assert found(info(), 1, 8 * GIB)[0].tokens == 0
    assert found(info(), 1, None)[0].tokens is None


def test_a_row_of_a_cpu_has_the_figures_of_the_launch() -> None:
    for config in (LauncherConfig(), LauncherConfig(kv_cache_memory=GIB)):
        (row, *_) = rows(
            info(), Hardware(), 2, capability=None, available=64 * GIB, kv_cache_memory=config.kv_cache_memory
        )
        planned = memory.estimate(config, Hardware(free_bytes=64 * GIB), info(), 2, longest=4096)
        assert (row.token_bytes, row.tokens) == (planned.token, planned.tokens)
    assert row.tokens == GIB // (2 * (row.token_bytes or 0))
    assert rows(info(), Hardware(), 1, capability=None, available=8 * GIB)[0].tokens == 0


def test_a_cpu_without_bfloat16_keeps_float16_in_32_bits() -> None:
    stored = info(torch_dtype="float16")
    for is_able, width, name in ((True, 2, "16 bits"), (False, 4, "32 bits")):
        row = rows(stored, Hardware(multiplies_bfloat16=is_able), 1, capability=None, available=64 * GIB)[0]
        assert (row.token_bytes, row.weights, row.cache) == (width * 2 * 32 * 8 * 128, name, name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    return tmp_path


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = EstimateConfig(model_id=str(folder), memory=24 * GIB, num_shard=2, request=4096, json=True)
    assert run_estimate(config, {}) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["device"], answer["memory"], answer["request_tokens"]) == ("gpu", 24 * GIB, 4096)
    assert all(way["num_shard"] == 2 and way["requests"] == way["tokens"] // 4096 for way in answer["ways"])


def test_a_table_in_a_pipe_has_whole_cells(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_estimate(EstimateConfig(model_id=str(folder), memory=24 * GIB), {}) == 0
    out = capsys.readouterr().out
    assert "\nWeights of 8 bits: --quantize eetq\nWeights of 4 bits: --quantize bitsandbytes-nf4\n" in out
    assert "…" not in out
    assert out.endswith("\nKV cache of 8 bits: --kv-cache-dtype fp8_e4m3fn\n")
    assert "GPUs with 24.0 GiB each" in out


@pytest.mark.parametrize("columns", [80, 110])
def test_a_table_on_a_terminal_has_whole_numbers(
    folder: Path, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "dumb")
    assert run_estimate(EstimateConfig(model_id=str(folder), memory=24 * GIB), {}) == 0
    out = capsys.readouterr().out
    shown = " ".join(out.split())
    assert "…" not in out
    stored = (folder / "model.safetensors").stat().st_size
    for row in found(dataclasses.replace(info(), weight_bytes=stored), None, 24 * GIB):
        assert shown_bytes(row.token_bytes or 0) in shown and f" {row.tokens} " in shown


@pytest.mark.parametrize(
    ("model_id", "given", "error"),
    [
        ("dmeo", {}, "did you mean demo?"),
        ("demo", {"device": "gpu"}, "this machine has no GPU that torch can use; give --memory"),
        (
            "demo",
            {"num_shard": 3, "memory": GIB},
            "--num-shard 3 does not divide the model's 4 attention heads and 2 KV heads; use 1, 2 or 4",
        ),
        ("./nowhere", {}, "no such directory"),
        ("./nowhere.gguf", {}, "./nowhere.gguf: no such file"),
        ("org/repo/model.gguf", {}, "org/repo/model.gguf is not on this machine"),
    ],
)
def test_refused_in_one_line(
    model_id: str,
    given: dict[str, Any],
    error: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("launcher.planning.hardware.detect", lambda environ: Hardware(memory_bytes=GIB))
    assert run_estimate(EstimateConfig(model_id=model_id, **given), {}) == 1
    said = capsys.readouterr().err
    assert error in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("model_id", "status", "expected"),
    [("org/model", 0, "llama, 32 layers"), ("org/other", 1, "the hub has no model org/other for this user")],
)
def test_a_model_on_the_hub_is_not_downloaded(tmp_path: Path, model_id: str, status: int, expected: str) -> None:
    files = {"config.json": json.dumps(LLAMA).encode(), "model.safetensors": b"\0" * 5000}
    with HubServer() as hub:
        hub.add("org/model", files)
        ran = subprocess.run(
            [sys.executable, "-m", "launcher", "estimate", model_id, "--memory", "8GiB"],
            env={**os.environ, **hub.environment(tmp_path)}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert ran.returncode == status, ran.stderr
        assert expected in ran.stdout + ran.stderr
        assert hub.sent("model.safetensors") == 0
    assert not list((tmp_path / "hub").glob("models--*"))


def test_a_refusal_names_the_variable_of_the_revision(tmp_path: Path) -> None:
    with HubServer() as hub:
        hub.add("org/model", {"config.json": json.dumps(LLAMA).encode()})
        environ = {**os.environ, **hub.environment(tmp_path), "REVISION": "v9"}
        for command in ("estimate", "pull"):
            ran = subprocess.run(
                [sys.executable, "-m", "launcher", command, "org/model"],
                env=environ, capture_output=True, text=True, timeout=120,
            )  # fmt: skip
            assert ran.returncode == 1 and "--revision" in ran.stderr, ran.stderr
            assert ran.stderr.endswith("(from the environment: REVISION)\n"), ran.stderr


def test_a_download_that_was_cut_off_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A commit's snapshot with one of two weight files: the sizes come from the hub."""
    snapshot = tmp_path / "models--org--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(LLAMA))
    (snapshot / "model-1.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    monkeypatch.setattr("launcher.estimate.remote.fetch", lambda model_id, revision: info())
    config = EstimateConfig(model_id="org/model", revision="abc", memory=80 * GIB, num_shard=1, json=True)

    def weights() -> int:
        assert run_estimate(config, {"HF_HUB_CACHE": str(tmp_path)}) == 0
        return int(json.loads(capsys.readouterr().out)["ways"][0]["weight_bytes"])

    assert weights() == BYTES
    (snapshot / "model-2.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    assert weights() == 20


def test_offline_is_said(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "launcher", "estimate", "org/model"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert ran.returncode == 1
    assert "HF_HUB_OFFLINE" in ran.stderr and ran.stderr.count("\n") == 1
