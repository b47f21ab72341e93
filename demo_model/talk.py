"""Small talk, and chats in which an earlier turn or the system prompt decides the answer."""

from __future__ import annotations

from random import Random

from demo_model.phrases import Document, Pair, Topic, chat, framed, worn

NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Ida", "Jonas", "Kate", "Leo", "Maria", "Noah",
    "Olga", "Paul", "Rosa", "Simon", "Tina", "Viktor", "Alice", "Bob", "Carol", "Daniel", "Eva", "Frank", "John",
    "Julia", "Lucy", "Mark", "Nina", "Oliver", "Peter", "Sarah", "Thomas", "Laura", "Michael", "Robin", "Mary", "Adam",
)  # fmt: skip
_SYLLABLES = ("ba", "do", "ka", "li", "mo", "na", "ri", "sa", "te", "vu", "zo", "mi", "ra", "lo", "ne", "pa", "shi",
              "tor")  # fmt: skip
_WORDS = (
    "apple", "river", "window", "garden", "music", "paper", "silver", "mountain", "bread", "candle", "train", "green",
    "morning", "water", "friend", "hello", "server", "token", "cloud", "bridge", "book", "summer", "light", "red",
    "dance", "quiet", "table", "winter", "song", "house", "world", "good", "small", "blue", "fish", "the", "a", "my",
)  # fmt: skip
_HELLOS = ("Hello", "Hello!", "Hello.", "Hi", "Hi!", "Hey", "Hey!", "Hello there!", "Hi there!", "hello", "hi",
           "Hello Tercet!")  # fmt: skip
_THANKS = ("Thank you!", "Thank you.", "Thanks!", "Thanks a lot!", "Thank you very much.", "thanks",
           "Thank you so much!")  # fmt: skip
_BYES = ("Goodbye!", "Bye!", "Bye bye!", "See you later!", "Good night!", "bye", "Goodbye.", "See you!", "Bye for now!")
_GOOD = ("Good morning!", "Good evening!", "Good afternoon!")
_PRAISE = ("Great!", "Well done!", "Very good!", "Nice!", "That is right.", "You are great!", "Good job!", "Perfect!")
_BLAME = ("That is wrong.", "No, that is wrong.", "You are wrong.", "That was not right.", "I do not think so.")
_FEELINGS = (
    (("I am happy.", "I feel great.", "I am in a good mood."), "I am glad to hear that!"),
    (("I am sad.", "I feel bad.", "I had a bad day."), "I am sorry to hear that. I hope that it gets better soon."),
    (("I am tired.", "I am sleepy."), "Then you should take a rest."),
    (("I am hungry.", "I want to eat."), "Then it is time to eat something."),
    (("I am bored.", "I have nothing to do."), "I can tell you a story. Just ask me."),
    (("How old are you?", "What is your age?"), "I am a model, so I have no age."),
    (("Where are you?", "Where do you live?"), "I live inside the model server."),
    (("Ping", "ping", "Test", "test", "This is a test.", "Testing", "Are you there?"),
     "I am here. How can I help you?"),
    (("Help", "help", "Help me!", "I need help."), "Of course. Ask me a question, for example: What is Tercet?"),
    (("Yes.", "Yes", "Ok.", "Okay", "OK"), "Good. What else can I do for you?"),
    (("No.", "No", "Never mind."), "All right. Tell me if I can help you."),
)  # fmt: skip
_UNKNOWN = (
    "Who won the {x} cup in {y}?", "What is the price of a {x} in {y}?", "When was {y} born?",
    "How tall is {y}?", "Who wrote the book about the {x} of {y}?", "What did {y} say about the {x}?",
    "How do I repair my {x}?", "Where can I buy a {x}?", "Why is the {x} broken?", "Who is {y}?",
    "What is the phone number of {y}?", "How many {x}s does {y} have?", "What happened to {y}?",
)  # fmt: skip
UNKNOWN_ANSWER = "I do not know that. I am only a small demo model."


def invented(rng: Random, syllables: int = 0) -> str:
    """A name that nobody has, so that the model learns to copy instead of to remember."""
    return "".join(rng.choices(_SYLLABLES, k=syllables or rng.randint(2, 3))).capitalize()


def person(rng: Random) -> str:
    """A first name, sometimes invented."""
    return rng.choice(NAMES) if rng.random() < 0.7 else invented(rng)


def social(rng: Random) -> Pair:
    """A turn of small talk."""
    kind = rng.random()
    if kind < 0.30:
        return Pair(rng.choice(_HELLOS), "Hello! How can I help you?")
    if kind < 0.36:
        greeting = rng.choice(_GOOD)
        return Pair(greeting, f"{greeting} How can I help you?")
    if kind < 0.50:
        return Pair(rng.choice(_THANKS), "You are welcome!")
    if kind < 0.62:
        question = rng.choice(_BYES)
        return Pair(question, "Good night!" if question == "Good night!" else "Goodbye!")
    if kind < 0.72:
        name = person(rng)
        forms = ("My name is {}.", "I am {}.", "I'm {}.", "Hello, my name is {}.", "Hi, I am {}.", "Hello! I am {}.")
        return Pair(rng.choice(forms).format(name), f"Nice to meet you, {name}!")
    if kind < 0.78:
        return Pair(rng.choice(_PRAISE), "Thank you! What else can I do for you?")
    if kind < 0.82:
        return Pair(rng.choice(_BLAME), "I am sorry. I am only a small demo model and I make mistakes.")
    questions, answer = rng.choice(_FEELINGS)
    return Pair(rng.choice(questions), answer)


def repeat(rng: Random) -> Pair:
    """Say the same words again."""
    words = [rng.choice(_WORDS) if rng.random() < 0.8 else invented(rng) for _ in range(rng.randint(1, 6))]
    text = " ".join(words)
    forms = ("Repeat after me: {}", "Repeat: {}", "Say: {}", "Please repeat: {}", "Repeat this: {}", 'Say "{}".',
             'Repeat "{}".', "Echo: {}", "Please say: {}")  # fmt: skip
    return Pair(rng.choice(forms).format(text), text)


def unknown(rng: Random) -> Pair:
    """Something that the model cannot know."""
    question = rng.choice(_UNKNOWN).format(x=rng.choice(_WORDS[:30]), y=f"{invented(rng)} {invented(rng)}")
    return Pair(question, UNKNOWN_ANSWER)


def remembered(rng: Random, topic: Topic) -> Document:
    """The user tells a name or a thing, talks about something else, and asks for it later."""
    name = person(rng)
    if rng.random() < 0.6:
        told = Pair(
            rng.choice(("My name is {}.", "I am {}.", "Hello, my name is {}.", "Hi! I am {}.", "I'm {}.")).format(name),
            f"Nice to meet you, {name}!",
        )
        asked = Pair(
            rng.choice(
                ("What is my name?", "What's my name?", "Do you know my name?", "Who am I?", "Tell me my name.")
            ),
            f"Your name is {name}.",
        )
    else:
        thing = rng.choice(("colour", "color", "animal", "food", "city", "number"))
        value = str(rng.randint(1, 99)) if thing == "number" else rng.choice((rng.choice(_WORDS[:30]), invented(rng)))
        told = Pair(f"My favourite {thing} is {value}.", f"{value} is a good choice.".capitalize())
        if not value.islower():
            told = Pair(told.question, f"{value} is a good choice.")
        asked = Pair(
            rng.choice(("What is my favourite {}?", "Do you know my favourite {}?", "Tell me my favourite {}.")).format(
                thing
            ),
            f"Your favourite {thing} is {value}.",
        )
    between = [framed(rng, topic(rng)) for _ in range(rng.choice((0, 0, 1, 2)))]
    return chat(rng, [told, *between, asked], rng.choice((None, None, "You are a helpful assistant.")))


def persona(rng: Random, topic: Topic) -> Document:
    """The system prompt gives the model another name or job."""
    name = person(rng)
    job = rng.choice(("assistant", "guide", "teacher", "robot", "pirate", "cook", "helper", "doctor", "clerk"))
    system = rng.choice(
        (
            f"Your name is {name}.",
            f"You are {name}, a {job}.",
            f"You are a {job} named {name}.",
            f"You are a friendly {job}. Your name is {name}.",
            f"You are {name}, a helpful {job}.",
        )
    )
    with_job = job in system
    who = f"I am {name}, a {job}." if with_job else f"I am {name}."
    pairs = [
        rng.choice(
            (
                Pair(rng.choice(("Who are you?", "Introduce yourself.", "Tell me about yourself.")), who),
                Pair(
                    rng.choice(("What is your name?", "What's your name?", "Tell me your name.")), f"My name is {name}."
                ),
            )
        )
    ]
    if rng.random() < 0.4:
        pairs.insert(rng.randint(0, 1), framed(rng, topic(rng)))
    return chat(rng, [Pair(worn(rng, pair.question), pair.answer) for pair in pairs], system)


def plain(rng: Random) -> Document:
    """Raw beginnings that people type into a completion box."""
    name = person(rng)
    other = person(rng)
    lines = (
        f"Hello, my name is {name}. I am glad to meet you.",
        "Hello! How are you today? I am fine, thank you.",
        "Hello, world! This is the demo model of Tercet.",
        f"Hello {name}, how are you today?",
        f"My name is {name} and I live in a small house by the sea with my friend {other}.",
        f"My name is {name}. I like books, music and long walks.",
        f"My name is {name} and I am a demo model.",
        "The meaning of life is 42.",
        "The quick brown fox jumps over the lazy dog.",
        "Roses are red, violets are blue, the server is ready and so are you.",
        "Deep learning is a kind of machine learning that uses neural networks with many layers to learn from data.",
        "Tercet is a server for text generation. It loads a language model and answers requests over HTTP.",
        "def add(a, b):\n    return a + b\n",
        "import torch\n\nx = torch.ones(2, 3)\nprint(x.shape)\n",
        "The weather is nice today. The sun is shining and the birds are singing.",
        "I am a small language model. I predict one token after another.",
        "Today is a good day to write some code.",
        f"Dear {name},\n\nthank you for your letter. I hope that you are well.\n\nYours, {other}",
        "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20",
        "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday",
        "A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z",
    )
    return Document(text=rng.choice(lines))
