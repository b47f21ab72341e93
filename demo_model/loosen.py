"""Makes documents less regular, for the last stage of the training.

The topics use a few dozen names and a few wordings each. A model that has seen them often enough remembers instead of
reading: it takes an unknown name for the nearest known one. Here names become strings that nobody has seen, questions
get words that mean nothing, and the words to repeat come from the whole corpus.
"""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

from demo_model.facts import FIELD, TERCET
from demo_model.objects import CITIES, values
from demo_model.phrases import Document, Pair, filler, framed
from demo_model.talk import NAMES

_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwz", "aeiou"
_NAME = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in sorted({*NAMES, *CITIES}, key=len, reverse=True)))
_VOCABULARY = sorted({word for _, answer in TERCET + FIELD for word in re.findall(r"[a-z]{2,}", answer)})
_INSERTED = ("please", "exactly", "actually", "just", "now", "really", "then", "simply", "again", "today", "maybe")
_SMALL = frozenset(("the", "a", "is", "of", "does", "me", "do", "can", "you", "are", "what", "which", "tell"))
_TAILS = (", please?", " then?", " again?", " exactly?", ", do you know?", ", my friend?", " today?", " please")
_STARTS = ("Could you name", "Please name", "I need", "Say what is", "Let me know", "What exactly is", "What might be",
           "Would you tell me", "I am looking for", "Remind me of")  # fmt: skip
_REPEAT_FORMS = ("Repeat after me: {}", "Repeat: {}", "Say: {}", "Please repeat: {}", "Repeat this: {}", 'Say "{}".',
                 'Repeat "{}".', "Echo: {}", "Please say: {}", "Repeat these words: {}")  # fmt: skip


def strange(rng: Random) -> str:
    """A name made of letters, or a common word in a capital."""
    if rng.random() < 0.3:
        return str(rng.choice(_VOCABULARY)).capitalize()
    letters = [rng.choice(_VOWELS if (index % 2) ^ (rng.random() < 0.15) else _CONSONANTS) for index in range(8)]
    return "".join(letters[: rng.randint(3, 8)]).capitalize()


def renamed(rng: Random, document: Document) -> Document:
    """The document with other names throughout, where they are only there to be copied.

    Plain facts name cities too; those documents have neither calls nor JSON in their answers and keep them.
    """
    if document.text is not None or rng.random() < 0.4:
        return document
    answers = [m for m in document.messages if m["role"] == "assistant"]
    copied = any("tool_calls" in m or m["content"].startswith("{") for m in answers)
    others: dict[str, str] = {}

    def other(match: re.Match[str]) -> str:
        name = match.group()
        if name not in NAMES and not copied:
            return name
        return others.setdefault(name, strange(rng))

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return _NAME.sub(other, value)
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        return value

    messages = []
    for message in document.messages:
        changed = {**message, **({"content": walk(message["content"])} if "content" in message else {})}
        if "tool_calls" in message:
            changed["tool_calls"] = json.loads(json.dumps(message["tool_calls"], ensure_ascii=False))
            for call in changed["tool_calls"]:
                call["function"]["arguments"] = walk(call["function"]["arguments"])
        messages.append(changed)
    return Document(messages=tuple(messages), tools=document.tools)


def noisy(rng: Random, pair: Pair) -> Pair:
    """The pair with words in its question that do not matter."""
    question = pair.question
    words = question.split(" ")
    kind = rng.random()
    if kind < 0.35 and len(words) > 2:
        words.insert(rng.randint(1, len(words) - 1), rng.choice(_INSERTED))
        question = " ".join(words)
    elif kind < 0.6 and question.startswith(("What is ", "Tell me ", "Name ")):
        rest = re.sub("^(What is|Tell me|Name) ", "", question).rstrip("?.")
        question = f"{rng.choice(_STARTS)} {rest}{rng.choice(('?', '.', ', please.'))}"
    elif kind < 0.8 and question.endswith("?"):
        question = question[:-1] + rng.choice(_TAILS)
    elif kind < 0.9 and (small := [index for index, word in enumerate(words) if word.lower() in _SMALL]):
        del words[rng.choice(small)]
        question = " ".join(words)
    else:
        question = f"{question} {filler(rng)}"
    return Pair(question, pair.answer, pair.short, pair.raw)


def repeat(rng: Random) -> Pair:
    """Say the same words again, from a larger vocabulary than `talk.repeat` has."""
    words = [rng.choice(_VOCABULARY) if rng.random() < 0.75 else strange(rng) for _ in range(rng.randint(1, 7))]
    text = " ".join(words)
    pair = Pair(rng.choice(_REPEAT_FORMS).format(text), text)
    return framed(rng, pair) if rng.random() < 0.2 else pair


def made_object(rng: Random) -> Pair:
    """An object from keys and values, in many more wordings than `objects.made` has."""
    data, shown = values(rng)
    verb = rng.choice(("Give me", "Make", "Write", "Create", "Return", "Produce", "Show me", "I want", "I need",
                       "Build", "Can you write", "Please create", "Please write", "Please give me",
                       "Print"))  # fmt: skip
    noun = rng.choice(
        ("a JSON object", "a JSON object", "JSON", "an object in JSON", "a small JSON object", "some JSON")
    )
    form = rng.choice(("{} {}", "{} {}", "{}: {}", "{} = {}"))
    given = [form.format(name, value) for name, value in zip(data, shown, strict=True)]
    kind = rng.random()
    if kind < 0.35 and len(given) > 1:
        text = ", ".join(given[:-1]) + " and " + given[-1]
    elif kind < 0.7:
        text = ", ".join(given)
    else:
        keys = list(data)
        named = keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + " and " + keys[-1]
        joined = ", ".join(shown) if rng.random() < 0.7 or len(shown) < 2 else " and ".join(shown)
        text = f"{named} {rng.choice(('for', 'from', 'of'))} {joined}"
    link = rng.choice(("with", "with", "that has", "containing", "for", "with the fields", "that holds"))
    tail = rng.choice((".", ".", "", ", please.", " please.", "!", ". Thanks.", " for me."))
    return Pair(f"{verb} {noun} {link} {text}{tail}", json.dumps(data, ensure_ascii=False))


def asked_again(rng: Random, document: Document) -> Document:
    """A chat with tools whose first question has a tail or a neighbour that does not matter."""
    messages = [dict(message) for message in document.messages]
    message = next(m for m in messages if m["role"] == "user")
    question, dashes, prompt = message["content"].partition("\n---\n")
    kind = rng.random()
    if kind < 0.4 and question.endswith("?"):
        question = question[:-1] + rng.choice(_TAILS)
    elif kind < 0.6:
        question = f"{filler(rng)} {question}"
    elif kind < 0.8:
        question = f"{question} {filler(rng)}"
    else:
        question = f"{rng.choice(('Could you help me?', 'I have a question.', 'Hello, Tercet.', 'Well,'))} {question}"
    message["content"] = question + dashes + prompt
    return Document(messages=tuple(messages), tools=document.tools)
