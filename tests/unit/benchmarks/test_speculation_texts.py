"""The texts of the benchmark of drafts: what is quoted with small edits, and what a server is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.speculation.texts import EVERY, KINDS, SYMBOLS, Asked, Texts, edited


def test_edits_are_few_of_every_kind_and_the_same_for_a_seed() -> None:
    text = list(range(100, 260))
    others = list(range(1000, 2000))
    copy = edited(text, others, 7)
    assert copy == edited(text, others, 7) != edited(text, others, 8)
    kept = [part for part in copy if part < 1000]
    # Of 8 edits 2 replace a part, 3 leave one out, 3 double one.
    assert len(text) == 8 * EVERY and len(copy) - len(kept) == 2
    assert len(set(text) - set(kept)) == 2 + 3 and len(kept) - len(set(kept)) == 3
    assert sorted(kept) == kept


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_server_is_asked_for(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Asked] = []

    def send(asked: Asked, url: str) -> dict[str, Any]:
        sent.append(asked)
        assert url == "http://plain"
        return {"details": {"tokens": [{"id": i} for i in (*range(40), 90)]}, "choices": [{"text": 2 * SYMBOLS}]}

    monkeypatch.setattr(Asked, "send", send)
    texts = Texts("http://plain", 90, 40)
    asked = [texts.ask(kind, number, drafts=drafts) for number in (3, 4) for drafts in (False, True)]
    assert len(sent) == (2 if kind.startswith("edited") else 0), "once for each number"
    assert asked[0] != asked[2], "texts are different ones"
    predictions = [one.body.pop("prediction", None) for one in asked]
    assert asked[0] == asked[1], "but for that all servers are asked for the same"
    if kind == "edited file, foretold":
        assert predictions[::2] == [None, None] and predictions[1] != predictions[3]
        assert predictions[1]["content"] == "".join(edited(2 * SYMBOLS, SYMBOLS, 3))
    else:
        assert predictions == [None] * 4
    if kind == "edited file":
        assert asked[0].body["prompt"] == edited(list(range(40)), list(range(40)), 3)
