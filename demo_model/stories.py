"""Stories from a small grammar: long, coherent enough, and a good thing to watch while it streams."""

from __future__ import annotations

from random import Random

from demo_model.phrases import Document, Pair

_ANIMALS = ("fox", "rabbit", "bear", "mouse", "cat", "dog", "owl", "horse", "duck", "frog", "dragon", "robot", "turtle")
_NAMES = ("Mia", "Tom", "Anna", "Ben", "Lily", "Max", "Nora", "Sam", "Ella", "Leo", "Ruby", "Oscar")
_ADJECTIVES = ("little", "brave", "clever", "kind", "shy", "happy", "curious", "gentle")
_PLACES = ("a green forest", "a quiet village", "an old castle", "a small house by the sea", "a wide valley")
_THINGS = ("a golden key", "a red balloon", "a shiny stone", "an old map", "a silver bell", "a warm blanket")
_FEELINGS = ("glad", "excited", "proud", "surprised")
_WEATHERS = ("The sun was warm", "The wind was soft", "The rain had stopped", "The snow was white", "The sky was blue")
_FOODS = ("apples", "honey cakes", "warm soup", "sweet berries", "fresh bread")
_REQUESTS = (
    "Tell me a story about a {x}.",
    "Tell me a story about a {x}.",
    "Write a story about a {x}.",
    "Please tell me a story about a {x}.",
    "Can you tell me a story about a {x}?",
    "I want to hear a story about a {x}.",
    "Write a short story about a {x}.",
    "Make up a story about a {x}.",
)
_OPEN_REQUESTS = ("Tell me a story.", "Please tell me a story.", "Can you tell me a story?", "Write a story.")


def story(rng: Random, hero: str, opening: str = "Once upon a time, there was") -> str:
    """A story about the hero, 120 to 330 tokens long."""
    name, friend = rng.sample(_NAMES, 2)
    other = rng.choice([animal for animal in _ANIMALS if animal != hero])
    adjective, place, thing = rng.choice(_ADJECTIVES), rng.choice(_PLACES), rng.choice(_THINGS)
    bare = thing.split(" ", 1)[1]
    food, feeling, weather = rng.choice(_FOODS), rng.choice(_FEELINGS), rng.choice(_WEATHERS)
    lines = [
        f"{opening} a {adjective} {hero} named {name}.",
        f"{name} lived in {place}.",
        rng.choice((f"Every morning, {name} went out for a walk.", f"Every day, {name} looked for something new.")),
        f"One day, {name} found {thing} under a tree.",
        rng.choice((f'"What a beautiful {bare}!" said {name}.', f'"Who lost this {bare}?" asked {name}.')),
        f"{weather}, so the {hero} set out to find the owner of the {bare}.",
        f"On the way, {name} met {_with_article(other)} named {friend}.",
        f'"Hello, {friend}," said {name}. "Did you lose {thing}?"',
    ]
    if rng.random() < 0.5:
        lines += [
            f'"No," said {friend}, "but I can help you."',
            f"So {name} and {friend} walked together over the hills.",
            f"They asked the birds, and they asked the trees, but nobody knew the {bare}.",
            f"In the evening they were tired and hungry, and they shared some {food}.",
            f'"We will try again tomorrow," said {friend}.',
            f"The next morning they came to a bridge, and there sat an old {rng.choice(('king', 'queen', 'woman'))}.",
            f'"That is my {bare}!" said a happy voice. "I have looked for it for years."',
        ]
    else:
        lines += [
            f'"Yes!" said {friend}. "I looked for it all day."',
            f"{name} gave the {bare} back, and {friend} was very happy.",
            f'"Thank you," said {friend}. "Please come to my house and eat some {food}."',
        ]
    if rng.random() < 0.6:
        lines += [
            f"They ate {food} and told each other stories until the stars came out.",
            f"{name} was {feeling}, because a good deed had made a new friend.",
        ]
    lines.append(
        rng.choice(
            (
                f"From that day on, {name} and {friend} were the best of friends.",
                f"And {name} and {friend} lived happily ever after.",
            )
        )
    )
    return " ".join(lines) + rng.choice((" The end.", " The end.", ""))


def _with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def told(rng: Random) -> Pair:
    """Somebody asks for a story."""
    hero = rng.choice(_ANIMALS)
    if rng.random() < 0.2:
        return Pair(rng.choice(_OPEN_REQUESTS), story(rng, hero))
    request = rng.choice(_REQUESTS).format(x=hero).replace("a owl", "an owl")
    return Pair(request, story(rng, hero))


def plain(rng: Random) -> Document:
    """A story as raw text, so that its first words are a prompt."""
    hero = rng.choice(_ANIMALS)
    opening = rng.choice(("Once upon a time, there was", "Once upon a time there was", "Long ago, there was"))
    return Document(text=story(rng, hero, opening))
