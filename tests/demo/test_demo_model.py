"""The shipped demo model answers what its README promises."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from demo_model import check, tokenizer
from wire import demo_model as package

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

DOCUMENTED = check.prompts("documented")
HELD_OUT = check.prompts("held_out")


@pytest.fixture(scope="module")
def demo() -> check.Demo:
    return check.Demo(package.path())


@pytest.mark.parametrize("prompt", DOCUMENTED, ids=lambda prompt: prompt.name[:50])
def test_documented_prompt(demo: check.Demo, prompt: check.Prompt) -> None:
    ids = demo.answer_ids(prompt)
    answer = demo.tokenizer.decode(ids, skip_special_tokens=True)
    assert prompt.fits(answer), answer
    if prompt.kind == "chat":
        assert ids[-1] == demo.tokenizer.eos_token_id, "a chat answer must end by itself"


@pytest.mark.long
def test_documented_prompts_in_the_type_that_they_are_served_in() -> None:
    demo = check.Demo(package.path())
    demo.model.to(torch.bfloat16)
    assert [prompt.name for prompt in DOCUMENTED if not prompt.fits(demo.answer(prompt))] == []


@pytest.mark.long
def test_held_out_prompts(demo: check.Demo) -> None:
    wrong = {prompt.name: answer for prompt in HELD_OUT if not prompt.fits(answer := demo.answer(prompt))}
    assert len(HELD_OUT) - len(wrong) >= 0.8 * len(HELD_OUT), wrong


def test_lists_are_long_enough_and_apart() -> None:
    assert len(DOCUMENTED) >= 30
    assert len(HELD_OUT) >= 20
    assert sum(bool(prompt.tools) for prompt in DOCUMENTED) >= 4
    assert not {prompt.name for prompt in DOCUMENTED} & {prompt.name for prompt in HELD_OUT}


def test_never_ends_at_once(demo: check.Demo) -> None:
    for prompt in DOCUMENTED:
        with torch.inference_mode():
            logits = demo.model(input_ids=torch.tensor([demo.encoded(prompt)])).logits[0, -1]
        assert int(logits.argmax()) != demo.tokenizer.eos_token_id, prompt.name


def test_long_answer(demo: check.Demo) -> None:
    story = next(prompt for prompt in DOCUMENTED if "story" in prompt.name)
    assert len(demo.answer_ids(story)) > 120


def test_shape_and_size(demo: check.Demo) -> None:
    parameters = sum(parameter.numel() for parameter in demo.model.parameters())
    assert 3_000_000 <= parameters <= 5_000_000
    assert demo.model.config.max_position_embeddings == tokenizer.MAX_LENGTH
    assert demo.model.generation_config.eos_token_id == demo.tokenizer.eos_token_id
    assert sum(file.stat().st_size for file in package.path().iterdir() if file.is_file()) <= 12_000_000


def test_generation_config_names_the_end() -> None:
    values = json.loads((package.path() / "generation_config.json").read_text(encoding="utf-8"))
    config = json.loads((package.path() / "config.json").read_text(encoding="utf-8"))
    assert values["eos_token_id"] == config["eos_token_id"] == tokenizer.SPECIAL.index(tokenizer.END)


def test_path_is_light() -> None:
    code = "import sys; from wire import demo_model; demo_model.path(); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"PYTHONPATH": str(package.path().parents[1])},
    )
    assert done.stdout.strip() == "False"
