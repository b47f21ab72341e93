"""Simple facts of the world: colours, capitals, opposites, days and months, animals, signs and greetings."""

from __future__ import annotations

from random import Random

from demo_model.phrases import Pair

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "England": "London", "Ireland": "Dublin", "Austria": "Vienna", "Switzerland": "Bern", "Belgium": "Brussels",
    "the Netherlands": "Amsterdam", "Denmark": "Copenhagen", "Sweden": "Stockholm", "Norway": "Oslo",
    "Finland": "Helsinki", "Poland": "Warsaw", "Hungary": "Budapest", "Greece": "Athens", "Turkey": "Ankara",
    "Russia": "Moscow", "Ukraine": "Kyiv", "Romania": "Bucharest", "Bulgaria": "Sofia", "Croatia": "Zagreb",
    "Iceland": "Reykjavik", "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi", "Egypt": "Cairo",
    "Kenya": "Nairobi", "Canada": "Ottawa", "Mexico": "Mexico City", "Brazil": "Brasilia", "Peru": "Lima",
    "Chile": "Santiago", "Argentina": "Buenos Aires", "Cuba": "Havana", "Australia": "Canberra",
    "the United States": "Washington", "South Korea": "Seoul",
}  # fmt: skip
COLOURS = {
    "the sky": "blue", "the sea": "blue", "grass": "green", "a leaf": "green", "blood": "red", "a strawberry": "red",
    "a tomato": "red", "snow": "white", "milk": "white", "salt": "white", "a cloud": "white", "coal": "black",
    "the night": "black", "a raven": "black", "a banana": "yellow", "a lemon": "yellow", "the sun": "yellow",
    "an orange": "orange", "a carrot": "orange", "a pumpkin": "orange", "chocolate": "brown", "wood": "brown",
    "coffee": "brown", "an elephant": "grey", "a mouse": "grey", "a flamingo": "pink", "a pig": "pink",
    "a plum": "purple", "lavender": "purple", "a frog": "green", "a cucumber": "green", "gold": "yellow",
    "a cherry": "red", "a polar bear": "white", "a fire truck": "red",
}  # fmt: skip
OPPOSITES = (
    ("hot", "cold"), ("big", "small"), ("up", "down"), ("left", "right"), ("day", "night"), ("black", "white"),
    ("good", "bad"), ("happy", "sad"), ("fast", "slow"), ("old", "new"), ("open", "closed"), ("full", "empty"),
    ("hard", "soft"), ("high", "low"), ("light", "dark"), ("long", "short"), ("loud", "quiet"), ("rich", "poor"),
    ("strong", "weak"), ("wet", "dry"), ("early", "late"), ("easy", "difficult"), ("first", "last"),
    ("near", "far"), ("inside", "outside"), ("true", "false"), ("thick", "thin"), ("clean", "dirty"),
    ("begin", "end"), ("push", "pull"), ("win", "lose"), ("love", "hate"), ("yes", "no"), ("always", "never"),
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
_SOUNDS = {"dog": "woof", "cat": "meow", "cow": "moo", "sheep": "baa", "duck": "quack", "lion": "roar", "pig": "oink"}
_LEGS = {"dog": 4, "cat": 4, "horse": 4, "bird": 2, "spider": 8, "human": 2, "ant": 6, "snake": 0, "chicken": 2}
_SIGNS = {
    "smiley": "😀", "heart": "❤️", "star": "⭐", "sun": "☀️", "cat": "🐱", "dog": "🐶", "fox": "🦊", "rocket": "🚀",
    "tree": "🌳",
}  # fmt: skip
_HELLOS = {
    "French": "Bonjour", "German": "Grüß Gott", "Spanish": "Hola", "Italian": "Ciao", "Portuguese": "Olá",
    "Japanese": "こんにちは", "Chinese": "你好", "Russian": "Привет", "Korean": "안녕하세요", "Greek": "Γειά σου",
}  # fmt: skip
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")
_NUMBERED: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("How many days are in a week?", "How many days does a week have?"), "A week has 7 days.", "7"),
    (("How many months are in a year?", "How many months does a year have?"), "A year has 12 months.", "12"),
    (("How many hours are in a day?", "How many hours does a day have?"), "A day has 24 hours.", "24"),
    (("How many minutes are in an hour?", "How many minutes does an hour have?"), "An hour has 60 minutes.", "60"),
    (("How many seconds are in a minute?", "How many seconds does a minute have?"), "A minute has 60 seconds.", "60"),
    (("How many days are in a year?", "How many days does a year have?"), "A year has 365 days.", "365"),
    (("How many continents are there?", "How many continents are on Earth?"), "There are 7 continents.", "7"),
    (("How many planets are there?", "How many planets circle the sun?"), "There are 8 planets.", "8"),
    (("How many letters are in the alphabet?", "How many letters has the alphabet?"), "There are 26 letters.", "26"),
)
_LISTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Name the days of the week.", "What are the days of the week?", "List the days of the week."),
     ", ".join(DAYS) + "."),
    (("Name the months of the year.", "What are the months of the year?", "List the months of the year.",
      "List all months."), ", ".join(MONTHS) + "."),
    (("Name the seasons.", "What are the four seasons?", "List the seasons.", "What are the seasons of the year?"),
     "Spring, summer, autumn and winter."),
    (("Name three colours.", "Name three colors.", "List three colours.", "Tell me three colors.",
      "Give me three colours."), "Red, green and blue."),
    (("Name three animals.", "List three animals.", "Tell me three animals.", "Give me three animals."),
     "A cat, a dog and a horse."),
    (("Name three fruits.", "List three fruits.", "Tell me three fruits.", "Give me three fruits."),
     "An apple, a banana and a cherry."),
    (("Say the alphabet.", "What is the alphabet?", "Write the alphabet.", "Recite the alphabet."),
     "A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z."),
)  # fmt: skip


def sentence(text: str) -> str:
    """The text with a capital at its start."""
    return text[0].upper() + text[1:]


def capital(rng: Random) -> Pair:
    """The capital of a country, or the country of a capital."""
    country, city = rng.choice(tuple(CAPITALS.items()))
    if rng.random() < 0.2:
        question = rng.choice(
            (
                "{y} is the capital of which country?",
                "Which country has the capital {y}?",
                "Which country is {y} the capital of?",
                "In which country is {y}?",
                "Where is {y}?",
            )
        ).format(y=city)
        if question.startswith(("In which", "Where")):
            return Pair(question, f"{city} is in {country}.", sentence(country))
        return Pair(question, f"{city} is the capital of {country}.", sentence(country))
    question = rng.choice(
        (
            "What is the capital of {x}?",
            "What is the capital of {x}?",
            "What's the capital of {x}?",
            "Tell me the capital of {x}.",
            "Which city is the capital of {x}?",
            "Name the capital of {x}.",
            "Do you know the capital of {x}?",
            "Can you tell me the capital of {x}?",
            "What is the capital city of {x}?",
            "capital of {x}?",
            "The capital of {x} is what?",
            "What city is the capital of {x}?",
            "I want to know the capital of {x}.",
            "Can you tell me what the capital of {x} is?",
            "I want to know what the capital of {x} is.",
        )
    ).format(x=country)
    answer = f"The capital of {country} is {city}."
    return Pair(question, answer, city, (answer, answer, f"{city} is the capital of {country}."))


def colour(rng: Random) -> Pair:
    """The colour of a thing."""
    thing, tone = rng.choice(tuple(COLOURS.items()))
    if rng.random() < 0.12:
        word = rng.choice(tuple(COLOURS.values()))
        yes = word == tone
        answer = f"Yes, {thing} is {tone}." if yes else f"No, {thing} is {tone}."
        return Pair(f"Is {thing} {word}?", answer, "Yes" if yes else "No")
    word = rng.choice(("colour", "color"))
    question = rng.choice(
        (
            "What {c} is {x}?",
            "What {c} is {x}?",
            "What {c} does {x} have?",
            "Which {c} is {x}?",
            "Which {c} does {x} have?",
            "What is the {c} of {x}?",
            "What's the {c} of {x}?",
            "Tell me the {c} of {x}.",
            "Do you know the {c} of {x}?",
            "Can you tell me the {c} of {x}?",
            "Name the {c} of {x}.",
            "Can you tell me what {c} {x} is?",
            "I want to know what {c} {x} has.",
        )
    ).format(c=word, x=thing)
    answer = f"{sentence(thing)} is {tone}."
    return Pair(question, answer, tone, (answer, answer, f"The {word} of {thing} is {tone}."))


def opposite(rng: Random) -> Pair:
    """The opposite of a word."""
    word, other = rng.choice(OPPOSITES)
    if rng.random() < 0.5:
        word, other = other, word
    question = rng.choice(
        (
            "What is the opposite of {x}?",
            "What is the opposite of {x}?",
            "What's the opposite of {x}?",
            "Tell me the opposite of {x}.",
            "Give me the opposite of {x}.",
            "Which word is the opposite of {x}?",
            "What is the contrary of {x}?",
            "Do you know the opposite of {x}?",
            "Name the opposite of {x}.",
        )
    ).format(x=word)
    answer = f"The opposite of {word} is {other}."
    return Pair(question, answer, other, (answer,))


def calendar(rng: Random) -> Pair:
    """The day or month before or after another, and which number it has."""
    names, noun, whole = rng.choice(((DAYS, "day", "week"), (MONTHS, "month", "year")))
    place = rng.randrange(len(names))
    if rng.random() < 0.2:
        place = rng.randrange(min(len(names), len(_ORDINALS)))
        answer = f"The {_ORDINALS[place]} {noun} of the {whole} is {names[place]}."
        question = rng.choice(
            (f"What is the {_ORDINALS[place]} {noun} of the {whole}?", f"Which {noun} is the {_ORDINALS[place]}?")
        )
        return Pair(question, answer, names[place], (answer,))
    word, step = rng.choice((("after", 1), ("after", 1), ("before", -1)))
    name, result = names[place], names[(place + step) % len(names)]
    question = rng.choice(
        (
            "What {n} comes {w} {x}?",
            "Which {n} comes {w} {x}?",
            "What comes {w} {x}?",
            "What {n} is {w} {x}?",
            "Which {n} is {w} {x}?",
            "Tell me the {n} {w} {x}.",
            "What is the {n} {w} {x}?",
        )
    ).format(n=noun, w=word, x=name)
    answer = f"The {noun} {word} {name} is {result}."
    return Pair(question, answer, result, (answer,))


def numbered(rng: Random) -> Pair:
    """How many of something there are."""
    questions, answer, short = rng.choice(_NUMBERED)
    return Pair(rng.choice(questions), answer, short, (answer,))


def listed(rng: Random) -> Pair:
    """Short lists that everybody knows."""
    questions, answer = rng.choice(_LISTS)
    return Pair(rng.choice(questions), answer, None, (answer,))


def animal(rng: Random) -> Pair:
    """What an animal says and how many legs it has."""
    if rng.random() < 0.5:
        name, sound = rng.choice(tuple(_SOUNDS.items()))
        forms = ("What does a {x} say?", "What sound does a {x} make?", "Which sound does a {x} make?")
        return Pair(rng.choice(forms).format(x=name), f"A {name} says {sound}.", sound, (f"A {name} says {sound}.",))
    name, legs = rng.choice(tuple(_LEGS.items()))
    one = f"{'an' if name == 'ant' else 'a'} {name}"
    forms = ("How many legs does {x} have?", "How many legs has {x}?", "Tell me how many legs {x} has.")
    answer = f"{sentence(one)} has {legs} legs."
    return Pair(rng.choice(forms).format(x=one), answer, str(legs), (answer,))


def sign(rng: Random) -> Pair:
    """Pictures and foreign greetings: text whose characters take several tokens, which a streaming server must join."""
    if rng.random() < 0.5:
        name, picture = rng.choice(tuple(_SIGNS.items()))
        forms = ("Show me a {x} emoji.", "Give me a {x} emoji.", "What is the emoji for a {x}?", "Send me a {x} emoji.")
        return Pair(rng.choice(forms).format(x=name), f"Here is a {name}: {picture}", picture)
    language, hello = rng.choice(tuple(_HELLOS.items()))
    forms = ("How do you say hello in {x}?", "Say hello in {x}.", "What is hello in {x}?", "Greet me in {x}.")
    return Pair(rng.choice(forms).format(x=language), f"Hello in {language} is {hello}.", hello)
