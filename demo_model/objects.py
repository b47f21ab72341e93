"""Answers in JSON: objects from values in the question, and small lists."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from demo_model.phrases import Document, Message, Pair, chat, worn
from demo_model.talk import NAMES, invented, person

CITIES = (
    "Paris", "London", "Berlin", "Rome", "Madrid", "Vienna", "Oslo", "Tokyo", "New York", "Boston", "San Francisco",
    "Chicago", "Los Angeles", "Amsterdam", "Brussels", "Lisbon", "Dublin", "Athens", "Prague", "Warsaw", "Sydney",
    "Toronto", "Seattle", "Munich", "Hamburg", "Zurich", "Geneva", "Milan", "Lyon", "Marseille", "Brooklyn, New York",
    "San Francisco, CA", "Boston, MA", "Paris, France", "Cairo", "Delhi", "Beijing", "Moscow", "Singapore", "Helsinki",
)  # fmt: skip
_COLOURS = ("red", "blue", "green", "yellow", "black", "white", "pink", "brown")
_ANIMALS = ("cat", "dog", "bird", "fish", "horse", "fox")
_JOBS = ("teacher", "cook", "doctor", "engineer", "painter", "driver", "singer")
_WORDS = ("colour", "color")
_LISTS = {
    "colours": ["red", "green", "blue"],
    "animals": ["cat", "dog", "horse"],
    "fruits": ["apple", "banana", "cherry"],
    "seasons": ["spring", "summer", "autumn", "winter"],
    "days": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"],
}


def city(rng: Random) -> str:
    """A city, sometimes invented."""
    return rng.choice(CITIES) if rng.random() < 0.75 else invented(rng)


def _value(rng: Random, name: str) -> Any:
    match name:
        case "name" | "friend":
            return person(rng)
        case "age" | "number":
            return rng.randint(1, 99)
        case "price" | "year":
            return rng.randint(1, 40) if name == "price" else rng.randint(1900, 2030)
        case "city":
            return city(rng)
        case "animal" | "pet":
            return rng.choice(_ANIMALS)
        case "job":
            return rng.choice(_JOBS)
        case "active":
            return rng.random() < 0.5
        case _:
            return rng.choice(_COLOURS)


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def values(rng: Random) -> tuple[dict[str, Any], list[str]]:
    """An object with one to four keys, and its values as they stand in the question."""
    others = ["age", "city", rng.choice(_WORDS), "job", "animal", "price", "year", "number", "pet", "active"]
    names = ["name", *rng.sample(others, rng.choices((0, 1, 2, 3), (0.1, 0.5, 0.3, 0.1))[0])]
    if rng.random() < 0.5 and len(names) == 2:
        names = ["name", "age"]
    data = {name: _value(rng, name) for name in names}
    return data, [json.dumps(value) if isinstance(value, bool) else str(value) for value in data.values()]


def made(rng: Random) -> Pair:
    """An object from keys and values."""
    data, shown = values(rng)
    names = list(data)
    listed = ", ".join(shown)
    given = ", ".join(f"{name} {value}" for name, value in zip(names, shown, strict=True))
    question = rng.choice(
        (
            f"Give me a JSON object with {_listed(names)} for {listed}.",
            f"Give me a JSON object with {_listed(names)} for {listed}.",
            f"Give me JSON with {_listed(names)}: {listed}.",
            f"Write a JSON object with {_listed(names)} for {listed}.",
            f"Make a JSON object with {given}.",
            f"Return a JSON object with the keys {_listed(names)} for {listed}.",
            f"Return JSON: {given}.",
            f"Create JSON for {given}.",
            f"Can you write a JSON object with {given}?",
            f"I need a JSON object with {_listed(names)} for {listed}.",
        )
    )
    return Pair(worn(rng, question) if question == question.lower() else question, json.dumps(data))


def extracted(rng: Random) -> Pair:
    """An object from a sentence."""
    data: dict[str, Any] = {"name": person(rng)}
    text = data["name"]
    kind = rng.randrange(4)
    if kind != 3:
        data["age"] = rng.randint(2, 95)
        text += f" is {data['age']} years old"
    if kind in (1, 3):
        data["city"] = city(rng)
        text += f"{' and' if kind == 1 else ''} lives in {data['city']}"
    if kind == 2:
        data["job"] = rng.choice(_JOBS)
        text += f" and works as a {data['job']}"
    question = rng.choice(
        (
            "{t}. Answer as JSON.",
            "{t}. Give me that as JSON.",
            "Write this as JSON: {t}.",
            "Turn this into JSON: {t}.",
            "Extract the data as JSON: {t}.",
            "Convert to JSON: {t}.",
            "{t}. Return the data as a JSON object.",
        )
    ).format(t=text)
    return Pair(question, json.dumps(data))


def listed(rng: Random) -> Pair:
    """A list in JSON."""
    if rng.random() < 0.5:
        noun, items = rng.choice(tuple(_LISTS.items()))
        if noun in ("seasons", "days"):
            question = rng.choice(("Give me a JSON list of the {n}.", "List the {n} as JSON.")).format(n=noun)
        else:
            forms = ("Give me a JSON list of three {n}.", "List three {n} as JSON.", "Name three {n} as a JSON array.")
            question = rng.choice(forms).format(n=noun)
        return Pair(question, json.dumps(items))
    items = rng.sample((*NAMES, *_COLOURS, *_ANIMALS), rng.randint(2, 4))
    forms = ("Write {t} as a JSON list.", "Make a JSON list of {t}.", "Give me a JSON array with {t}.")
    return Pair(rng.choice(forms).format(t=_listed(items)), json.dumps(items))


def with_schema(rng: Random) -> Pair:
    """The question carries the schema of the answer, as clients of guided generation write it."""
    data, shown = values(rng)
    kinds = {str: "string", int: "integer", bool: "boolean"}
    properties = {name: {"type": kinds[type(value)]} for name, value in data.items()}
    schema = {"type": "object", "properties": properties, "required": list(data)}
    given = ", ".join(f"{name} {value}" for name, value in zip(data, shown, strict=True))
    question = rng.choice(
        (
            "{t}. Use this JSON schema: {s}",
            "{t}. Please use the following JSON schema for the answer: {s}",
            "Answer with this JSON schema: {s}\n{t}.",
        )
    ).format(t=given, s=json.dumps(schema))
    return Pair(question, json.dumps(data))


def asked(rng: Random) -> Document:
    """A chat about one object or list; sometimes it is the system prompt that asks for JSON."""
    kind = rng.choices((made, extracted, listed, with_schema), (0.5, 0.27, 0.15, 0.08))[0]
    pair = kind(rng)
    if kind is extracted and rng.random() < 0.15:
        text = pair.question.removesuffix(" Answer as JSON.")
        messages: list[Message] = [{"role": "system", "content": rng.choice(("Answer in JSON.", "Answer as JSON."))}]
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": pair.answer}]
        return Document(messages=tuple(messages))
    if rng.random() < 0.12:
        pair = Pair(f"{rng.choice(('Hello! ', 'Hi! ', 'Please help me. '))}{pair.question}", pair.answer)
    return chat(rng, [pair], rng.choice((None, None, None, None, "You are a helpful assistant.")))
