"""An interrupted or extended comparison measures only the cells it lacks."""

from __future__ import annotations

import argparse

from benchmarks.peers.__main__ import _missing

TURN = ("vllm", "135M", "float32", 1)
OPTIONS = argparse.Namespace(lengths="128:64,512:16", concurrency="1,8")


def run(turn: tuple[str, str, str, int], cells: list[str], **more: str) -> dict[str, object]:
    peer, shape, precision, repeat = turn
    measured: dict[str, dict[str, float]] = {name: {} for name in cells}
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


def test_a_server_that_did_not_start_is_not_tried_again() -> None:
    assert missing(run(TURN, [], failed="no such option")) == []
