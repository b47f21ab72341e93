"""Names of extensions: the protocol's own strings."""

from __future__ import annotations

from wire.extensions import Extension


def test_names_are_those_of_the_protocol() -> None:
    assert set(Extension) == {
        "run_ahead", "columns", "row_errors", "stop_anywhere", "openai_penalties", "logit_bias", "token_ids", "grow",
        "min_tokens", "windows", "lark_grammar", "stop_token_ids", "prediction", "images",
        "lora", "shared_memory",
    }  # fmt: skip


def test_what_a_newer_peer_adds_is_left_out() -> None:
    known = Extension.known(["columns", "telepathy", "grow"])
    assert known == {Extension.COLUMNS, Extension.GROW}
    assert all(isinstance(one, Extension) for one in known)
