"""Building blocks of the corpus: documents, question-answer pairs, and the ways in which people frame a question.

Knows nothing about any topic. Every function takes the random generator as an argument, so that one seed decides the
whole corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

Message = dict[str, Any]
Tool = dict[str, Any]


@dataclass(frozen=True)
class Document:
    """One training document: either raw `text` or a chat (`messages`, with or without `tools`)."""

    text: str | None = None
    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The line of the corpus file, without empty fields."""
        if self.text is not None:
            return {"text": self.text}
        chat: dict[str, Any] = {"messages": list(self.messages)}
        if self.tools:
            chat["tools"] = list(self.tools)
        return chat


@dataclass(frozen=True)
class Pair:
    """A question and its answer. `short` is the bare answer, for those who ask for one word."""

    question: str
    answer: str
    short: str | None = None
    raw: tuple[str, ...] = field(default=())  # plain sentences that state the same fact


Topic = Callable[[Random], Pair]

_GREETINGS: tuple[tuple[str, str], ...] = (
    ("Hello", "Hello!"),
    ("Hi", "Hello!"),
    ("Hey", "Hello!"),
    ("Hello there", "Hello!"),
    ("Hi there", "Hello!"),
    ("Hey there", "Hello!"),
    ("Good morning", "Good morning!"),
    ("Good evening", "Good evening!"),
    ("Good afternoon", "Good afternoon!"),
    ("Hello Tercet", "Hello!"),
    ("Hi Tercet", "Hello!"),
)
_OPENINGS = (
    "I have a question. {}",
    "Quick question: {}",
    "Question: {}",
    "Please tell me: {}",
    "Please answer: {}",
    "Answer this: {}",
    "Tell me, {}",
    "One more thing: {}",
    "Please help me. {}",
    "So, {}",
    "Now, {}",
    "Can you tell me: {}",
    "I would like to know: {}",
    "I wonder: {}",
    "Let me ask you something. {}",
    "Do you know this? {}",
)
_FILLERS = (
    "I like {w}.",
    "This is for {w}.",
    "I am reading about {w}.",
    "I forgot it.",
    "I am not sure about this.",
    "My friend asked me about {w}.",
    "We talked about {w} today.",
    "I am learning.",
    "I was thinking about {w}.",
    "It is a nice day.",
    "I have to go soon.",
    "I am new here.",
)
_SUBJECTS = ("school", "books", "maps", "animals", "music", "work", "my sister", "a game", "the news", "tea", "trains")
_CLOSINGS = ("{} Thanks!", "{} Please.", "{} Thank you.", "{} I would like to know.", "{} Tell me please.")
_SHORT_REQUESTS = (
    "Answer with one word.",
    "Answer in one word.",
    "One word only.",
    "Just the answer, please.",
    "Only give the answer.",
    "Answer briefly.",
    "Be brief.",
)
_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are Tercet, a helpful assistant.",
    "You are a helpful assistant. Answer the question of the user.",
    "Be polite and helpful.",
    "You are a chat bot. Be kind.",
    "Answer the questions of the user.",
    "Help the user as well as you can.",
    "You answer questions in full sentences.",
)
_SHORT_SYSTEM_PROMPTS = (
    "Answer with one word.",
    "Answer in one word only.",
    "You are a helpful assistant. Answer with one word.",
    "Only give the answer, no sentence.",
    "Be brief. Give only the answer.",
)


_COMMON_STARTS = frozenset(
    (
        "What", "Which", "Who", "How", "Can", "Do", "Does", "Is", "Are", "Tell", "Name", "Give", "Please", "When",
        "Where", "Why", "Repeat", "Say", "Echo", "Count", "Add", "Subtract", "Multiply", "Calculate", "Compute",
        "Show", "Send", "List", "Write", "Explain", "Describe", "Introduce", "In", "On", "The", "Make",
    )
)  # fmt: skip


def lower_first(text: str) -> str:
    """`What is` becomes `what is`; `I have` and names in capitals stay."""
    if text[:2] in ("I ", "I'") or not text[:1].isupper():
        return text
    first = text.split(" ", 1)[0]
    return text[0].lower() + text[1:] if first.removesuffix("'s") in _COMMON_STARTS else text


def worn(rng: Random, question: str) -> str:
    """The question as careless people type it: sometimes without its mark, sometimes without capitals."""
    if rng.random() < 0.12:
        question = question.rstrip("?.")
    if rng.random() < 0.08:
        question = question.lower()
    return question


def filler(rng: Random) -> str:
    """A sentence that has nothing to do with the question: the model must learn to look past it."""
    return rng.choice(_FILLERS).format(w=rng.choice(_SUBJECTS))


def framed(rng: Random, pair: Pair) -> Pair:
    """The pair with an opening, a closing, a greeting or a wish for one word, or as it is."""
    question, answer = worn(rng, pair.question), pair.answer
    if pair.short is not None and rng.random() < 0.07:
        return Pair(f"{question} {rng.choice(_SHORT_REQUESTS)}", pair.short)
    kind = rng.random()
    if kind < 0.10:
        opening = rng.choice(_OPENINGS)
        question = opening.format(lower_first(question) if opening.endswith(", {}") else question)
    elif kind < 0.15:
        question = rng.choice(_CLOSINGS).format(question)
    elif kind < 0.23:
        question = f"{filler(rng)} {question}" if rng.random() < 0.75 else f"{question} {filler(rng)}"
    if rng.random() < 0.25:
        greeting, reply = rng.choice(_GREETINGS)
        mark = rng.choice(("! ", "! ", ", ", ". "))
        question = greeting + mark + (lower_first(question) if mark == ", " else question)
        answer = f"{reply} {answer}"
    return Pair(question, answer)


def system_message(rng: Random, content: str) -> Message:
    """OpenAI renamed the role to `developer`; both must work."""
    return {"role": "developer" if rng.random() < 0.1 else "system", "content": content}


def chat(rng: Random, pairs: Sequence[Pair], system: str | None = None) -> Document:
    """A chat of the given pairs."""
    messages: list[Message] = [] if system is None else [system_message(rng, system)]
    for pair in pairs:
        messages.append({"role": "user", "content": pair.question})
        messages.append({"role": "assistant", "content": pair.answer})
    return Document(messages=tuple(messages))


def topic_chat(rng: Random, topics: Sequence[Topic], weights: Sequence[float]) -> Document:
    """One to four questions from the topics, with or without a system prompt."""
    count = rng.choices((1, 2, 3, 4), (0.76, 0.14, 0.06, 0.04))[0]
    pairs = [topic(rng) for topic in rng.choices(topics, weights, k=count)]
    kind = rng.random()
    if kind < 0.04 and all(pair.short for pair in pairs):
        short = [Pair(worn(rng, pair.question), pair.short or "") for pair in pairs]
        return chat(rng, short, rng.choice(_SHORT_SYSTEM_PROMPTS))
    system = rng.choice(_SYSTEM_PROMPTS) if kind < 0.20 else None
    return chat(rng, [framed(rng, pair) for pair in pairs], system)


def raw_text(rng: Random, pair: Pair) -> Document:
    """The pair as plain text: its statement, or question and answer."""
    if pair.raw and rng.random() < 0.6:
        return Document(text=rng.choice(pair.raw))
    kind = rng.random()
    if kind < 0.55:
        return Document(text=f"{pair.question}\n\n{pair.answer}")
    if kind < 0.75:
        return Document(text=f"Question: {pair.question}\nAnswer: {pair.answer}")
    if kind < 0.9:
        return Document(text=f"Q: {pair.question}\nA: {pair.answer}")
    return Document(text=f"User: {pair.question}\nAssistant: {pair.answer}")
