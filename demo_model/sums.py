"""Small sums, counting and comparing numbers.

A sum on the held-out list never appears in any wording, nor with its two numbers exchanged.
"""

from __future__ import annotations

from random import Random

from demo_model.phrases import Document, Pair

_PLUS = (
    "What is {a} plus {b}?",
    "What is {a} + {b}?",
    "What's {a} plus {b}?",
    "What's {a} + {b}?",
    "How much is {a} plus {b}?",
    "How much is {a} + {b}?",
    "Add {a} and {b}.",
    "Calculate {a} + {b}.",
    "Compute {a} plus {b}.",
    "Please add {a} and {b}.",
    "Can you add {a} and {b}?",
    "Tell me the sum of {a} and {b}.",
    "What is the sum of {a} and {b}?",
    "{a} + {b}",
    "{a} + {b} = ?",
    "{a}+{b}=",
    "{a} plus {b}?",
    "What do you get when you add {a} and {b}?",
    "I have {a} apples and get {b} more. How many apples do I have?",
)
_MINUS = (
    "What is {a} minus {b}?",
    "What is {a} - {b}?",
    "What's {a} minus {b}?",
    "What's {a} - {b}?",
    "How much is {a} minus {b}?",
    "How much is {a} - {b}?",
    "Subtract {b} from {a}.",
    "Calculate {a} - {b}.",
    "Compute {a} minus {b}.",
    "Can you subtract {b} from {a}?",
    "{a} - {b}",
    "{a} - {b} = ?",
    "{a} minus {b}?",
    "What is the difference between {a} and {b}?",
    "I have {a} apples and eat {b}. How many apples are left?",
)
_TIMES = (
    "What is {a} times {b}?",
    "What is {a} * {b}?",
    "What's {a} times {b}?",
    "How much is {a} times {b}?",
    "Multiply {a} by {b}.",
    "Multiply {a} and {b}.",
    "Calculate {a} * {b}.",
    "Can you multiply {a} by {b}?",
    "{a} * {b}",
    "{a} x {b} = ?",
    "{a} times {b}?",
    "What is {a} multiplied by {b}?",
)
_WORDS = {"+": ("plus", _PLUS), "-": ("minus", _MINUS), "*": ("times", _TIMES)}
_RESULTS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}

Sum = tuple[int, str, int]


class Sums:
    """Draws sums, never one of the held-out ones."""

    def __init__(self, held_out: set[Sum], *, small: bool = False) -> None:
        self._shares = (0.35, 0.55, 0.10) if small else (0.3, 0.3, 0.4)
        self._held_out = {(min(a, b), sign, max(a, b)) for a, sign, b in held_out}

    def allows(self, a: int, sign: str, b: int) -> bool:
        """Whether the corpus may contain this sum."""
        return (min(a, b), sign, max(a, b)) not in self._held_out

    def numbers(self, rng: Random) -> Sum:
        """Two numbers and a sign: mostly small ones, as people try them."""
        while True:
            sign = rng.choices(("+", "-", "*"), (0.55, 0.27, 0.18))[0]
            if sign == "*":
                a, b = rng.randint(0, 10), rng.randint(0, 10)
            else:
                top = rng.choices((10, 20, 50), self._shares)[0]
                a, b = rng.randint(0, top), rng.randint(0, top)
                if sign == "-" and a < b:
                    a, b = b, a
            if self.allows(a, sign, b):
                return a, sign, b

    def sum(self, rng: Random) -> Pair:
        """A sum in one of its wordings; the answer always repeats the sum, which is what makes it learnable."""
        a, sign, b = self.numbers(rng)
        word, questions = _WORDS[sign]
        result = _RESULTS[sign](a, b)
        weights = [3.0 if index < 6 else 1.0 for index in range(len(questions))]
        question = rng.choices(questions, weights)[0].format(a=a, b=b)
        raw = (f"{a} {word} {b} is {result}.", f"{a} {word} {b} equals {result}.", f"{a} {sign} {b} = {result}")
        return Pair(question, f"{a} {word} {b} is {result}.", str(result), raw)

    def drill(self, rng: Random) -> Document:
        """Many sums in a row: the densest way to show how digits behave."""
        words = rng.random() < 0.5
        rows = []
        for _ in range(rng.randint(5, 12)):
            a, sign, b = self.numbers(rng)
            result = _RESULTS[sign](a, b)
            rows.append(f"{a} {_WORDS[sign][0]} {b} is {result}." if words else f"{a} {sign} {b} = {result}")
        return Document(text=(" " if words else "\n").join(rows))


def compare(rng: Random) -> Pair:
    """Which of two numbers is bigger, or smaller."""
    a, b = rng.sample(range(100), 2)
    word = rng.choice(("bigger", "bigger", "smaller"))
    best, other = (max(a, b), min(a, b)) if word == "bigger" else (min(a, b), max(a, b))
    question = rng.choice(
        (
            "Which is {w}, {a} or {b}?",
            "Which number is {w}, {a} or {b}?",
            "What is {w}: {a} or {b}?",
            "Tell me which is {w}, {a} or {b}.",
            "Is {a} or {b} {w}?",
        )
    ).format(w=word, a=a, b=b)
    return Pair(question, f"{best} is {word} than {other}.", str(best), (f"{best} is {word} than {other}.",))


def count(rng: Random) -> Pair:
    """Counting upwards, now and then to a hundred: a long answer that anyone can check."""
    first = rng.choices((1, rng.randint(0, 60)), (0.65, 0.35))[0]
    length = rng.choices((rng.randint(3, 10), rng.randint(11, 30), 100), (0.82, 0.15, 0.03))[0]
    last = min(first + length - 1, 100)
    if first == 1 and rng.random() < 0.6:
        question = rng.choice(("Count to {b}.", "Can you count to {b}?", "Please count to {b}.", "Count up to {b}."))
    else:
        question = rng.choice(
            (
                "Count from {a} to {b}.",
                "Can you count from {a} to {b}?",
                "Please count from {a} to {b}.",
                "List the numbers from {a} to {b}.",
                "Write the numbers from {a} to {b}.",
            )
        )
    numbers = ", ".join(str(number) for number in range(first, last + 1))
    return Pair(question.format(a=first, b=last), f"{numbers}.", None, (f"{numbers}.", f"Count: {numbers}."))


def neighbour(rng: Random) -> Pair:
    """The number before or after a number."""
    number = rng.randint(1, 98)
    word, step = rng.choice((("after", 1), ("before", -1)))
    question = rng.choice(
        (
            "What number comes {w} {n}?",
            "What comes {w} {n}?",
            "Which number comes {w} {n}?",
            "Tell me the number {w} {n}.",
        )
    ).format(w=word, n=number)
    answer = f"The number {word} {number} is {number + step}."
    return Pair(question, answer, str(number + step), (answer,))


def even_or_odd(rng: Random) -> Pair:
    """Whether a number is even."""
    number = rng.randint(0, 99)
    kind = "odd" if number % 2 else "even"
    question = rng.choice(
        ("Is {n} even or odd?", "Is {n} odd or even?", "Is the number {n} even or odd?", "Tell me: is {n} even or odd?")
    ).format(n=number)
    return Pair(question, f"{number} is {kind}.", kind, (f"{number} is {kind}.",))
