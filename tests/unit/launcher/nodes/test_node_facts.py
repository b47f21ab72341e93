"""What nodes compare, and where they find each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import ArgumentValidation, NodeLost, ShardFailed
from launcher.nodes import address, facts, group_end
from launcher.nodes.group_end import Failure


def two_folders(root: Path, config: str, weights: str) -> list[Path]:
    """With the same two files."""
    folders = [root / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        (folder / config).write_text("{}")
        (folder / weights).write_bytes(b"12")
    return folders


def test_a_changed_file_or_another_size_of_weights_is_named(tmp_path: Path) -> None:
    one, other = two_folders(tmp_path, "config.json", "model.safetensors")
    assert facts.differing(facts.digests(one, {}), facts.digests(other, {})) is None
    (other / "model.safetensors").write_bytes(b"123")
    assert facts.differing(facts.digests(one, {}), facts.digests(other, {})) == "the weight files"
    (other / "config.json").write_text("{ }")
    assert facts.differing(facts.digests(one, {}), facts.digests(other, {})) == "config.json"


def test_an_adapter_with_other_content_is_named(tmp_path: Path) -> None:
    """Also where sizes are the same; what a shard does not read may differ."""
    folders = two_folders(tmp_path, "adapter_config.json", "adapter_model.safetensors")
    for folder in folders:
        (folder / "README.md").write_text(folder.name)
    one, other = (facts.digests(tmp_path, {"org/poems": folder}) for folder in folders)
    assert facts.differing(one, other) is None
    (folders[1] / "adapter_model.safetensors").write_bytes(b"13")
    assert facts.differing(one, facts.digests(tmp_path, {"org/poems": folders[1]})) == "LoRA adapter `org/poems`"
    assert facts.differing(one, facts.digests(tmp_path, {})) == "LoRA adapter `org/poems`"


def test_what_only_the_other_side_has_differs() -> None:
    assert facts.differing({"torch": "2"}, {"torch": "2", "nccl": "3"}) == "nccl"


def test_this_project_and_torch_are_compared() -> None:
    assert {"tercet", "torch"} <= facts.versions().keys()


def test_addresses_of_the_loopback_interface() -> None:
    assert address.source_address("127.0.0.1") == "127.0.0.1"
    assert address.interface_of("127.0.0.1") == "lo"
    assert address.interface_of("192.0.2.1") is None
    assert address.is_own("127.0.0.1")
    assert not address.is_own("192.0.2.1")
    assert address.resolve("127.0.0.1") == "127.0.0.1"
    assert address.resolve("no-such-host.invalid") is None


def test_a_failure_that_explains_the_others_is_the_first() -> None:
    consequence = Failure(node_rank=0, text="node 0: shard 0 lost rank 1", is_consequence=True)
    cause = Failure(node_rank=1, text="node 1: shard 1 was killed")
    assert group_end.first_of([consequence, cause]) is cause
    assert group_end.first_of([consequence]) is consequence


@pytest.mark.parametrize("own", [ShardFailed("shard 1 was killed"), ArgumentValidation("no such model")])
def test_the_first_to_fail_ends_with_its_own_error_and_the_others_with_its_loss(own: ShardFailed) -> None:
    first = Failure(node_rank=1, text=f"node 1: {own}")
    mine, theirs = group_end.as_seen_by(1, own, first), group_end.as_seen_by(0, ShardFailed("lost a rank"), first)
    assert (type(mine), mine.exit_status, str(mine)) == (type(own), 1, first.text)
    assert (type(theirs), theirs.exit_status, str(theirs)) == (NodeLost, 7, first.text)
