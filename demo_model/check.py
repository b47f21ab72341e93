"""Asks the model the prompts of `prompts.json` and says which answers fit.

    python -m demo_model.check                                        # the shipped model
    python -m demo_model.check --checkpoint demo_model/checkpoints/last.pt

Answers are greedy and in float32, so that they are the same everywhere.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from demo_model import corpus, tokenizer
from demo_model import model as shape


@dataclass(frozen=True)
class Prompt:
    """One prompt and the pattern that its greedy answer must contain."""

    prompt: str
    pattern: str
    max_new_tokens: int
    kind: str  # "raw" or "chat"
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]

    def fits(self, answer: str) -> bool:
        """Whether the answer is right."""
        return re.search(self.pattern, answer, re.DOTALL) is not None

    @property
    def name(self) -> str:
        """For lists and test ids."""
        return self.prompt or str(self.messages[-1]["content"])


def prompts(group: str, path: Path = corpus.PROMPTS) -> list[Prompt]:
    """The prompts of one group: `documented`, `held_out` or `larger_sums`."""
    entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))[group]
    return [
        Prompt(
            prompt=e["prompt"],
            pattern=e["pattern"],
            max_new_tokens=e["max_new_tokens"],
            kind=e["kind"],
            messages=tuple(e.get("messages") or [*e.get("before", []), {"role": "user", "content": e["prompt"]}]),
            tools=tuple(e.get("tools", ())),
        )
        for e in entries
    ]


class Demo:
    """The model in float32 with its tokenizer, as transformers loads them."""

    def __init__(self, folder: Path = tokenizer.PACKAGE, checkpoint: Path | None = None) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        if checkpoint is None:
            self.model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        else:
            self.model = shape.fresh()
            state = torch.load(checkpoint, weights_only=True)["model"]
            # What ships is rounded to bfloat16, so that is what must be measured.
            self.model.load_state_dict({name: tensor.bfloat16().float() for name, tensor in state.items()})
        self.model.eval()

    def encoded(self, prompt: Prompt) -> list[int]:
        """The ids of the prompt; the chat template writes its own first token."""
        if prompt.kind == "raw":
            return list(self.tokenizer(prompt.prompt)["input_ids"])
        text = self.tokenizer.apply_chat_template(
            list(prompt.messages), tools=list(prompt.tools) or None, add_generation_prompt=True, tokenize=False
        )
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.inference_mode()
    def answer_ids(self, prompt: Prompt) -> list[int]:
        """The ids of the greedy answer, end token included."""
        ids = torch.tensor([self.encoded(prompt)])
        mask = torch.ones_like(ids)
        output = self.model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=prompt.max_new_tokens, do_sample=False
        )
        return [int(token) for token in output[0, ids.shape[1] :]]

    def answer(self, prompt: Prompt) -> str:
        """The text of the greedy answer."""
        return str(self.tokenizer.decode(self.answer_ids(prompt), skip_special_tokens=True))


def report(demo: Demo, group: str) -> Iterator[str]:
    """A line for each prompt, and the score of the group."""
    right = 0
    listed = prompts(group)
    for prompt in listed:
        answer = demo.answer(prompt)
        fits = prompt.fits(answer)
        right += fits
        yield f"{'ok ' if fits else 'BAD'} {prompt.name[:70]!r} -> {answer[:160]!r}"
    yield f"{group}: {right} of {len(listed)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path)
    options = parser.parse_args()
    loaded = Demo(checkpoint=options.checkpoint)
    for name in ("documented", "held_out", "larger_sums"):
        for line in report(loaded, name):
            print(line)
