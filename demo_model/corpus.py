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

from demo_model import facts, loosen, objects, stories, talk, tools, world
from demo_model.phrases import Document, Pair, Topic, chat, framed, raw_text, topic_chat
from demo_model.sums import Sum, Sums, compare, count, even_or_odd, neighbour

FOLDER = Path(__file__).resolve().parent
PROMPTS = FOLDER / "prompts.json"
CORPUS = FOLDER / "corpus.jsonl"
DOCUMENTS = 6000
# The parts with which a new stage begins. Sums are learned late and need many examples: the second stage has most of
# them, and shorter schemas. Copying words from the prompt comes last: the third stage has more tools and JSON.
# The fourth and fifth ones have looser wordings and names that nobody has seen.
STAGES = (8, 17, 25, 31)

# Topics of plain questions with their shares. Sums and facts about the server are what visitors try first.
_SHARES: tuple[tuple[str, float], ...] = (
    ("sum", 0.33), ("tercet", 0.15), ("itself", 0.07), ("field", 0.06), ("capital", 0.10), ("colour", 0.07),
    ("opposite", 0.06), ("calendar", 0.05), ("numbered", 0.02), ("listed", 0.02), ("animal", 0.02), ("sign", 0.02),
    ("compare", 0.02), ("count", 0.03), ("neighbour", 0.02), ("even_or_odd", 0.01), ("repeat", 0.03),
    ("unknown", 0.015),
)  # fmt: skip

LOOSE, LOOSER = 3, 4


class Held:
    """What the corpus must not contain."""

    def __init__(self, path: Path = PROMPTS) -> None:
        groups: dict[str, list[dict[str, Any]]] = json.loads(path.read_text(encoding="utf-8"))
        entries = groups["held_out"] + groups["larger_sums"]
        self.sums: set[Sum] = {(e["sum"][0], e["sum"][1], e["sum"][2]) for e in entries if "sum" in e}
        self.prompts: set[str] = {normal(e["prompt"]) for e in entries}
        self._sums = re.compile("|".join(_written(*numbers) for numbers in sorted(self.sums)) or "(?!)")

    def bars(self, document: Document) -> bool:
        """Whether the document contains a held-out sum in digits, or asks a prompt of the held-out list."""
        texts = [document.text] if document.text is not None else [m.get("content") or "" for m in document.messages]
        asked = [normal(text) for text in texts]
        if any(self._sums.search(text) for text in asked):
            return True
        if document.text is not None:
            return any(prompt in asked[0] for prompt in self.prompts)
        return any(text in self.prompts for text in asked)


def _written(a: int, sign: str, b: int) -> str:
    """A pattern for a sum, in both orders, inside a text that went through `normal`."""
    word = {"+": "plus", "-": "minus", "*": "times"}[sign]
    return "|".join(rf"\b{x} ?(?:{re.escape(sign)}|{word}) ?{y}\b" for x, y in ((a, b), (b, a)))


def normal(text: str) -> str:
    """Small letters, signs of sums and single spaces: prompts that differ only in dress are the same prompt."""
    return " ".join(re.findall(r"[a-z0-9]+|[+*/-]", text.lower()))


def _loosened(topic: Topic, rng: Random) -> Pair:
    pair = topic(rng)
    return loosen.noisy(rng, pair) if rng.random() < 0.4 else pair


def _topics(sums: Sums) -> dict[str, Topic]:
    return {
        "sum": sums.sum, "tercet": facts.tercet, "itself": facts.itself, "field": facts.field,
        "capital": world.capital, "colour": world.colour, "opposite": world.opposite, "calendar": world.calendar,
        "numbered": world.numbered, "listed": world.listed, "animal": world.animal, "sign": world.sign,
        "compare": compare, "count": count, "neighbour": neighbour, "even_or_odd": even_or_odd,
        "repeat": talk.repeat, "unknown": talk.unknown,
    }  # fmt: skip


def _makers(sums: Sums, stage: int) -> tuple[list[Callable[[Random], Document]], list[float]]:
    """The kinds of documents and their shares by number, in each stage of the training."""
    by_name = _topics(sums)
    if stage >= LOOSE:
        by_name = {name: topic if name == "repeat" else partial(_loosened, topic) for name, topic in by_name.items()}
    topics = [by_name[name] for name, _ in _SHARES]
    shares = [share for _, share in _SHARES]

    def any_topic(rng: Random) -> Pair:
        return rng.choices(topics, shares)[0](rng)

    def small_talk(rng: Random) -> Document:
        pairs = [talk.social(rng) if stage < LOOSE else _loosened(talk.social, rng)]
        if rng.random() < 0.35:
            pairs.insert(rng.randint(0, 1), framed(rng, any_topic(rng)))
        return chat(rng, pairs, rng.choice((None, None, None, "You are a helpful assistant.")))

    def raw_question(rng: Random) -> Document:
        return raw_text(rng, any_topic(rng))

    def told_story(rng: Random) -> Document:
        return chat(rng, [framed(rng, stories.told(rng))])

    def json_object(rng: Random) -> Document:
        if stage >= LOOSER and rng.random() < 0.5:
            return chat(rng, [loosen.made_object(rng)])
        return objects.asked(rng)

    def repeated(rng: Random) -> Document:
        return chat(rng, [framed(rng, talk.repeat(rng)) if stage < LOOSE else loosen.repeat(rng)])

    def without_tool(rng: Random) -> Document:
        return chat(rng, [framed(rng, tools.told(rng))])

    makers: list[tuple[Callable[[Random], Document], tuple[float, ...]]] = [
        (lambda rng: topic_chat(rng, topics, shares), (0.445, 0.445, 0.40, 0.43, 0.45)),
        (small_talk, (0.08, 0.06, 0.06, 0.06, 0.06)),
        (raw_question, (0.06, 0.05, 0.04, 0.03, 0.04)),
        (facts.plain, (0.04, 0.03, 0.03, 0.02, 0.02)),
        (sums.drill, (0.03, 0.12, 0.02, 0.02, 0.05)),
        (talk.plain, (0.03, 0.02, 0.02, 0.02, 0.02)),
        (stories.plain, (0.01, 0.01, 0.01, 0.01, 0.01)),
        (told_story, (0.025, 0.02, 0.02, 0.015, 0.012)),
        (json_object, (0.08, 0.08, 0.13, 0.11, 0.11)),
        (repeated, (0.0, 0.0, 0.03, 0.05, 0.04)),
        (lambda rng: talk.remembered(rng, any_topic), (0.03, 0.03, 0.04, 0.04, 0.03)),
        (lambda rng: talk.persona(rng, any_topic), (0.02, 0.02, 0.02, 0.02, 0.02)),
        (
            partial(tools.asked, topic=any_topic, few=0 < stage < LOOSE, apart=stage >= LOOSE),
            (0.136, 0.12, 0.18, 0.18, 0.15),
        ),
        (partial(tools.asked, topic=any_topic, long=True, apart=stage >= LOOSE), (0.004, 0.003, 0.003, 0.003, 0.002)),
        (without_tool, (0.01, 0.01, 0.01, 0.01, 0.01)),
    ]
    return [maker for maker, _ in makers], [shares_of[stage] for _, shares_of in makers]


def generate(seed: int, documents: int | None = None, held: Held | None = None) -> Iterator[Document]:
    """The documents of one part of the corpus, without anything from the held-out list."""
    held = held or Held()
    wanted = DOCUMENTS if documents is None else documents
    rng = Random(f"tercet demo {seed}")
    stage = sum(seed >= first for first in STAGES)
    makers, shares = _makers(Sums(held.sums, small=0 < stage < LOOSER), stage)
    made = 0
    while made < wanted:
        document = rng.choices(makers, shares)[0](rng)
        if stage >= LOOSE:
            document = loosen.renamed(rng, document)
        if stage >= LOOSER and document.tools and rng.random() < 0.3:
            document = loosen.asked_again(rng, document)
        if not held.bars(document):
            made += 1
            yield document


def lines(seed: int, documents: int | None = None) -> str:
    """One part as the text of a JSON lines file."""
    return "".join(json.dumps(d.as_json(), ensure_ascii=False) + "\n" for d in generate(seed, documents))


if __name__ == "__main__":
    CORPUS.write_text(lines(0), encoding="utf-8")
    print(f"{CORPUS.name}: {DOCUMENTS} documents, {CORPUS.stat().st_size / 1e6:.2f} MB")
