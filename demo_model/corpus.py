"""The corpus of the demo model, generated from a seed.

`generate(seed)` gives the documents of one part, byte for byte the same on every machine. Training reads many parts;
the part of seed 0 is in the repository (`corpus.jsonl`), so that one can read what the model has seen, and a test
compares it. The prompts of the held-out list (`prompts.json`) are kept out here, whatever the topics produce.

    python -m demo_model.corpus          # writes corpus.jsonl again
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from demo_model import facts, objects, stories, talk, tools, world
from demo_model.phrases import Document, Pair, Topic, chat, framed, raw_text, topic_chat
from demo_model.sums import Sum, Sums, compare, count, even_or_odd, neighbour

FOLDER = Path(__file__).resolve().parent
PROMPTS = FOLDER / "prompts.json"
CORPUS = FOLDER / "corpus.jsonl"
DOCUMENTS = 6000

# Topics of plain questions with their shares. Sums and facts about the server are what visitors try first.
_SHARES: tuple[tuple[str, float], ...] = (
    ("sum", 0.25), ("tercet", 0.15), ("itself", 0.07), ("field", 0.06), ("capital", 0.10), ("colour", 0.07),
    ("opposite", 0.06), ("calendar", 0.05), ("numbered", 0.02), ("listed", 0.02), ("animal", 0.02), ("sign", 0.02),
    ("compare", 0.02), ("count", 0.03), ("neighbour", 0.02), ("even_or_odd", 0.01), ("repeat", 0.03),
    ("unknown", 0.015),
)  # fmt: skip


class Held:
    """What the corpus must not contain."""

    def __init__(self, path: Path = PROMPTS) -> None:
        entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["held_out"]
        self.sums: set[Sum] = {(e["sum"][0], e["sum"][1], e["sum"][2]) for e in entries if "sum" in e}
        self.prompts: set[str] = {normal(e["prompt"]) for e in entries}

    def bars(self, document: Document) -> bool:
        """Whether a prompt of the held-out list is one of the document's questions, or the start of its text."""
        if document.text is not None:
            text = normal(document.text)
            return any(text.startswith(prompt) or prompt in text for prompt in self.prompts)
        return any(m["role"] == "user" and normal(m["content"]) in self.prompts for m in document.messages)


def normal(text: str) -> str:
    """Small letters, signs of sums and single spaces: prompts that differ only in dress are the same prompt."""
    return " ".join(re.findall(r"[a-z0-9]+|[+*/-]", text.lower()))


def _topics(sums: Sums) -> dict[str, Topic]:
    return {
        "sum": sums.sum, "tercet": facts.tercet, "itself": facts.itself, "field": facts.field,
        "capital": world.capital, "colour": world.colour, "opposite": world.opposite, "calendar": world.calendar,
        "numbered": world.numbered, "listed": world.listed, "animal": world.animal, "sign": world.sign,
        "compare": compare, "count": count, "neighbour": neighbour, "even_or_odd": even_or_odd,
        "repeat": talk.repeat, "unknown": talk.unknown,
    }  # fmt: skip


def _makers(sums: Sums) -> tuple[list[Callable[[Random], Document]], list[float]]:
    """The kinds of documents and their shares by number."""
    by_name = _topics(sums)
    topics = [by_name[name] for name, _ in _SHARES]
    shares = [share for _, share in _SHARES]

    def any_topic(rng: Random) -> Pair:
        return rng.choices(topics, shares)[0](rng)

    def small_talk(rng: Random) -> Document:
        pairs = [talk.social(rng)]
        if rng.random() < 0.35:
            pairs.insert(rng.randint(0, 1), framed(rng, any_topic(rng)))
        return chat(rng, pairs, rng.choice((None, None, None, "You are a helpful assistant.")))

    def raw_question(rng: Random) -> Document:
        return raw_text(rng, any_topic(rng))

    def told_story(rng: Random) -> Document:
        return chat(rng, [framed(rng, stories.told(rng))])

    def without_tool(rng: Random) -> Document:
        return chat(rng, [framed(rng, tools.told(rng))])

    makers: list[tuple[Callable[[Random], Document], float]] = [
        (lambda rng: topic_chat(rng, topics, shares), 0.475),
        (small_talk, 0.08),
        (raw_question, 0.06),
        (facts.plain, 0.04),
        (talk.plain, 0.03),
        (stories.plain, 0.01),
        (told_story, 0.025),
        (objects.asked, 0.08),
        (lambda rng: talk.remembered(rng, any_topic), 0.03),
        (lambda rng: talk.persona(rng, any_topic), 0.02),
        (partial(tools.asked, topic=any_topic), 0.136),
        (partial(tools.asked, topic=any_topic, long=True), 0.004),
        (without_tool, 0.01),
    ]
    return [maker for maker, _ in makers], [share for _, share in makers]


def generate(seed: int, documents: int = DOCUMENTS, held: Held | None = None) -> Iterator[Document]:
    """The documents of one part of the corpus, without anything from the held-out list."""
    held = held or Held()
    rng = Random(f"tercet demo {seed}")
    makers, shares = _makers(Sums(held.sums))
    made = 0
    while made < documents:
        document = rng.choices(makers, shares)[0](rng)
        if not held.bars(document):
            made += 1
            yield document


def lines(seed: int, documents: int = DOCUMENTS) -> str:
    """One part as the text of a JSON lines file."""
    return "".join(json.dumps(d.as_json(), ensure_ascii=False) + "\n" for d in generate(seed, documents))


if __name__ == "__main__":
    CORPUS.write_text(lines(0), encoding="utf-8")
    print(f"{CORPUS.name}: {DOCUMENTS} documents, {CORPUS.stat().st_size / 1e6:.2f} MB")
