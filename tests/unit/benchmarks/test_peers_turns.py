"""An interrupted or extended comparison measures only the cells it lacks."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import pytest

from benchmarks.peers import checkpoints, quantized, servers
from benchmarks.peers.__main__ import Job, _missing, _options, _turns

TURN = ("vllm", "135M", "float32", 1)
OPTIONS = argparse.Namespace(lengths="128:64,512:16", concurrency="1,8", rounds=None)


def run(turn: tuple[str, str, str, int], cells: list[str], **more: str) -> dict[str, object]:
    peer, shape, precision, repeat = turn
    measured: dict[str, dict[str, float]] = {name: {"errors": 0} for name in cells}
    return {"peer": peer, "shape": shape, "precision": precision, "repeat": repeat, "cells": measured, **more}


def missing(*runs: dict[str, object]) -> list[str]:
    return [job.name for job in _missing(list(runs), TURN, OPTIONS)]


def test_everything_is_missing_at_first() -> None:
    assert missing() == ["128->64 c=1", "128->64 c=8", "512->16 c=1", "512->16 c=8"]


def test_cells_of_other_turns_do_not_count() -> None:
    others = [("tercet", *TURN[1:]), (*TURN[:1], "0.5B", *TURN[2:]), (*TURN[:2], "bfloat16", 1), (*TURN[:3], 0)]
    assert len(missing(*(run(other, ["128->64 c=1"]) for other in others))) == 4


def test_what_has_been_measured_is_not_measured_again() -> None:
    assert missing(run(TURN, ["128->64 c=1"]), run(TURN, ["512->16 c=8"])) == ["128->64 c=8", "512->16 c=1"]
    assert missing(run(TURN, ["128->64 c=1", "128->64 c=8", "512->16 c=1", "512->16 c=8"])) == []


def test_what_was_disturbed_is_measured_again() -> None:
    disturbed = run(TURN, [])
    disturbed["cells"] = {"128->64 c=1": {"errors": 0, "other_cores": 0.5}, "128->64 c=8": {"errors": 3}}
    assert missing(disturbed, run(TURN, ["128->64 c=8"])) == ["128->64 c=1", "512->16 c=1", "512->16 c=8"]


def test_a_server_that_did_not_start_is_not_tried_again() -> None:
    assert missing(run(TURN, [], failed="no such option")) == []


def test_clients_ask_as_often_as_given() -> None:
    assert [Job(128, 64, clients).num_requests for clients in (1, 8, 32)] == [6, 24, 64]
    assert [Job(128, 64, clients, rounds=1).num_requests for clients in (1, 8, 32)] == [6, 8, 32]


def test_servers_take_turns_each_in_its_own_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "tercet", "openvino"):
        monkeypatch.setitem(servers.PEERS, name, dataclasses.replace(servers.PEERS[name], installed=lambda: True))
    options = argparse.Namespace(
        peers="tercet,vllm:float32,openvino", precisions="bfloat16", shapes="135M,0.5B", repeats=2
    )
    servers_of_a_shape = [("tercet", "bfloat16"), ("vllm", "float32"), ("openvino", "bfloat16")]
    assert [(peer.name, shape, precision, repeat) for peer, shape, precision, repeat in _turns(options)] == [
        (name, shape, precision, repeat)
        for repeat in range(2)
        for shape in ("135M", "0.5B")
        for name, precision in servers_of_a_shape
    ]


def test_servers_of_the_same_quantization_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tercet", "llama.cpp", "openvino"):
        monkeypatch.setitem(servers.PEERS, name, dataclasses.replace(servers.PEERS[name], installed=lambda: True))
    monkeypatch.setattr(sys, "argv", ["peers", "--quantized", "--shapes", "0.5B", "--repeats", "1"])
    options = _options()
    assert (options.shapes, options.lengths, options.out.name) == ("0.5B", "128:64", "quantized.json")
    assert [(peer.name, precision) for peer, _, precision, _ in _turns(options)] == [
        (name, precision) for precision in ("int8", "int4") for name in ("tercet", "llama.cpp", "openvino")
    ]


@pytest.mark.parametrize("precision", ["bfloat16", "int8", "int4", "int4-float32"])
def test_a_quantized_model_is_read_from_its_own_files(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file is there already, so that nothing is made."""
    monkeypatch.setattr(servers, "FOLDER", tmp_path)
    monkeypatch.setattr(quantized, "FOLDER", tmp_path)
    monkeypatch.setattr(checkpoints, "FOLDER", tmp_path)
    expected = {
        "bfloat16": {"tercet": "1.1B", "llama.cpp": "1.1B-bf16.gguf", "openvino": "1.1B-openvino"},
        "int8": {"tercet": "1.1B", "llama.cpp": "1.1B-Q8_0.gguf", "openvino": "1.1B-openvino-int8"},
        "int4": {"tercet": "1.1B-gptq", "llama.cpp": "1.1B-Q4_K_M.gguf", "openvino": "1.1B-openvino-int4"},
        "int4-float32": {"openvino": "1.1B-openvino-int4"},
    }[precision]
    for folder in ("1.1B", "1.1B-gptq", expected["openvino"]):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "model.safetensors").touch()
    (tmp_path / expected["openvino"] / "openvino_model.xml").touch()
    for name, file in expected.items():
        if name == "llama.cpp":
            (tmp_path / file).touch()
        peer = servers.PEERS[name]
        model = peer.prepare("1.1B", precision)
        assert model == tmp_path / file
        command = peer.command(model, precision, 9)
        assert str(model) in command
        assert ("eetq" in command) is (name == "tercet" and precision == "int8")
        assert name == "llama.cpp" or ("float32" if precision.endswith("float32") else "bfloat16") in command


def test_a_conversion_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match="no such weight"):
        servers._convert([sys.executable, "-c", "raise SystemExit('no such weight')"])


@pytest.mark.parametrize(("precision", "name"), [("bfloat16", "1.1B-bf16"), ("q4_k_m", "1.1B-Q4_K_M")])
def test_an_interrupted_conversion_to_gguf_is_begun_again(
    precision: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(command: list[str]) -> None:
        begun.append(command)
        written = next(file for file in (tmp_path / f"{name}.partial", made) if str(file) in " ".join(command))
        written.write_text("half" if len(begun) == 1 else "whole")
        if len(begun) == 1:
            raise KeyboardInterrupt

    begun: list[list[str]] = []
    made = tmp_path / f"{name}.gguf"
    program = tmp_path / "llama.cpp/build/bin/llama-quantize"
    program.parent.mkdir(parents=True)
    program.touch()
    if precision != "bfloat16":
        (tmp_path / "1.1B-bf16.gguf").touch()
    for place in ("FOLDER", "ROOT"):
        monkeypatch.setattr(servers, place, tmp_path)
    monkeypatch.setattr(servers, "checkpoint", lambda shape: tmp_path / shape)
    monkeypatch.setattr(servers, "_convert", convert)
    with pytest.raises(KeyboardInterrupt):
        servers.PEERS["llama.cpp"].prepare("1.1B", precision)
    for _ in range(2):
        assert servers.PEERS["llama.cpp"].prepare("1.1B", precision) == made
        assert made.read_text() == "whole"
    assert len(begun) == 2


def test_a_server_that_ends_at_once_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "FOLDER", tmp_path / "models")
    peer = dataclasses.replace(
        servers.PEERS["vllm"],
        command=lambda model, precision, port: [sys.executable, "-c", "raise SystemExit('no such precision')"],
        prepare=lambda shape, precision: tmp_path,
    )
    with pytest.raises(RuntimeError, match="no such precision"):
        servers.RunningPeer(peer, "135M", "bfloat16", 9)
