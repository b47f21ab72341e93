"""The training loop: schedule, weights of tokens, and a resumed run that equals an uninterrupted one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from demo_model import batches, corpus, model, tokenizer, train
from demo_model.phrases import Document

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_learning_rate() -> None:
    rates = [train.factor(step, steps=1000, decay=200) for step in range(1000)]
    assert rates[0] < rates[train.WARM_UP - 1] == 1.0
    assert set(rates[train.WARM_UP : 801]) == {1.0}
    assert rates[801] > rates[900] > rates[998] >= train.FLOOR


def test_answers_weigh_more_than_questions() -> None:
    encoder = batches.Encoder()
    chat = Document(messages=({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ha"}))
    (ids, weights), (_, raw) = encoder.rows([chat, Document(text="Hello")])
    answer = ids.index(tokenizer.SPECIAL.index(tokenizer.ASSISTANT)) + 1
    assert weights[:answer] == [batches.PROMPT_WEIGHT] * answer
    assert weights[answer:] == [1.0] * (len(ids) - answer)
    assert ids[-1] == tokenizer.SPECIAL.index(tokenizer.END)
    assert set(raw) == {1.0}


def test_padding_does_not_count() -> None:
    for batch in batches.part(batches.Encoder(), 1)[:20]:
        padding = batch.ids == tokenizer.SPECIAL.index(tokenizer.PAD)
        assert bool((batch.weights[padding] == 0).all())
        assert bool((batch.weights[~padding] > 0).all())


def test_resumed_run_equals_a_straight_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MICRO_TOKENS", 64)
    monkeypatch.setattr(corpus, "DOCUMENTS", 60)
    for name, value in {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}.items():
        monkeypatch.setitem(model.CONFIG, name, value)

    def run(name: str, steps: int, *more: str) -> None:
        arguments = ["--steps", str(steps), "--decay", "0", "--save-every", "1", "--threads", "1"]
        options = train.parse([*arguments, "--checkpoint", str(tmp_path / name), *more])
        options.output = None
        train.train(options)

    threads = torch.get_num_threads()
    run("straight.pt", 3)
    run("broken.pt", 2)
    run("broken.pt", 3, "--resume")
    torch.set_num_threads(threads)
    straight = torch.load(tmp_path / "straight.pt", weights_only=True)
    broken = torch.load(tmp_path / "broken.pt", weights_only=True)
    assert straight["tokens"] == broken["tokens"]
    for name, tensor in straight["model"].items():
        torch.testing.assert_close(broken["model"][name], tensor)
