"""The file of API keys: what is read, and how each fault is named without a hash."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from wire.keys import Key, check_keys, digest_of, new_key, read_keys

HASH = "sha256:" + "ab" * 32
WHOLE = f"""
- name: alice
  hash: {HASH}
- name: team-b.1
  hash: sha256:{"CD" * 32}
  scopes: [inference, metrics, admin]
  models: [chat, tuned]
  weight: 2.5
  concurrent: 8
  requests_per_minute: 60
  tokens_per_minute: 20000
  max_total_tokens: 4096
  expires: 2031-02-03
  cache: own
"""


def read(tmp_path: Path, text: str) -> tuple[Key, ...]:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    return read_keys(path)


def test_every_field(tmp_path: Path) -> None:
    assert read(tmp_path, WHOLE) == (
        Key(name="alice", digest=bytes.fromhex("ab" * 32)),
        Key(
            name="team-b.1", digest=bytes.fromhex("cd" * 32), scopes=frozenset({"inference", "metrics", "admin"}),
            models=frozenset({"chat", "tuned"}), weight=2.5, concurrent=8, requests_per_minute=60,
            tokens_per_minute=20000, max_total_tokens=4096, expires=datetime(2031, 2, 3, tzinfo=UTC),
            has_own_cache=True,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("written", ["2031-02-03T04:05:06Z", '"2031-02-03T04:05:06"', "2031-02-03T06:05:06+02:00"])
def test_a_time_has_a_zone(tmp_path: Path, written: str) -> None:
    (key,) = read(tmp_path, f"- {{name: a, hash: '{HASH}', expires: {written}}}")
    assert key.expires == datetime(2031, 2, 3, 4, 5, 6, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no keys"),
        ("[]", "holds no keys"),
        ("name: a", "holds no keys"),
        ("- [", "is not YAML"),
        ("- a", "key 1: a row has fields"),
        ("- {name: a}", "key 1: it has no `hash`"),
        (f"- {{hash: '{HASH}'}}", "key 1: it has no `name`"),
        (f"- {{name: a b, hash: '{HASH}'}}", "key 1: `name` must be 1 to 64"),
        (f"- {{name: 7, hash: '{HASH}'}}", "key 1: `name` must be 1 to 64"),
        ("- {name: a, hash: secret}", "key 1: `hash` must be sha256:"),
        (f"- {{name: a, hash: '{HASH}', quota: 1}}", "unknown field `quota`"),
        (f"- {{name: a, hash: '{HASH}', scopes: [all]}}", "`scopes` must be a list of inference"),
        (f"- {{name: a, hash: '{HASH}', scopes: []}}", "`scopes` must be a list of inference"),
        (f"- {{name: a, hash: '{HASH}', models: chat}}", "`models` must be a list"),
        (f"- {{name: a, hash: '{HASH}', weight: 0}}", "`weight` must be a number"),
        (f"- {{name: a, hash: '{HASH}', weight: .nan}}", "`weight` must be a number"),
        (f"- {{name: a, hash: '{HASH}', concurrent: 0}}", "`concurrent` must be a whole number above 0"),
        (f"- {{name: a, hash: '{HASH}', tokens_per_minute: true}}", "`tokens_per_minute` must be a whole number"),
        (f"- {{name: a, hash: '{HASH}', expires: soon}}", "`expires` must be a date"),
        (f"- {{name: a, hash: '{HASH}', cache: mine}}", "`cache` must be shared or own"),
        (f"- {{name: a, hash: '{HASH}'}}\n- {{name: a, hash: sha256:{'0' * 64}}}", "key 2: the name a is that of"),
        (f"- {{name: a, hash: '{HASH}'}}\n- {{name: b, hash: '{HASH}'}}", "key 2: its hash is that of key 1"),
    ],
)  # fmt: skip
def test_a_fault_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"keys\.yaml") as found:
        read(tmp_path, text)
    assert said in str(found.value) and "\n" not in str(found.value)
    assert "abab" not in str(found.value) and "secret" not in str(found.value)


def test_a_file_beside_one_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(WHOLE)
    check_keys(path, None, RuntimeError)
    check_keys(None, "k", RuntimeError)
    with pytest.raises(RuntimeError, match="exclude each other"):
        check_keys(path, "k", RuntimeError)
    with pytest.raises(RuntimeError, match=r"`--keys-file`: cannot read .*nowhere"):
        check_keys(tmp_path / "nowhere", None, RuntimeError)


def test_a_new_key_is_found_by_its_hash(tmp_path: Path) -> None:
    key, hashed = new_key()
    (read_key,) = read(tmp_path, f"- {{name: a, hash: {hashed}}}")
    assert read_key.digest == digest_of(key.encode()) and key.startswith("tk-") and len(key) > 40
    others: Any = new_key()
    assert others[0] != key
