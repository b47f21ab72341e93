"""Chats with tools: a call, an answer in words when no tool fits, and an answer made from a tool's result.

The names of tools and arguments vary, and many values are invented, so that the model learns to copy them from the
prompt. A call is the JSON object `{"function": {"_name": NAME, ...arguments}}`; the chat template writes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from demo_model.objects import city
from demo_model.phrases import Document, Message, Pair, Tool, Topic, filler, framed, system_message
from demo_model.talk import invented, person

_VERBS = ("get", "find", "list", "create", "delete", "update", "open", "close", "check", "send", "read", "start",
          "stop")  # fmt: skip
_NOUNS = ("file", "user", "order", "ticket", "report", "photo", "room", "invoice", "backup", "table", "door", "account",
          "event", "task", "device", "camera", "package", "contract", "parcel", "printer")  # fmt: skip
_FIELDS = ("id", "name", "date", "path", "count", "status", "kind", "owner", "limit", "title")
# What a server appends to the last message when it asks for a call; its wording is not ours to fix, so it varies.
_CALL_PROMPTS = (
    "Given the functions above, answer with one JSON object for the function call that best answers the request.",
    "Answer with a JSON object that holds the function name and its arguments. Do not use variables.",
    "Respond with a JSON for a function call with its proper arguments that best answers the given prompt.",
    "Choose the function that best answers the request and write one JSON object with its name and arguments.",
    "Reply with a single JSON object: the name of the function to call and a dictionary of its arguments.",
    "Pick one of the available functions and return a JSON function call. Do not use variables.",
    "Use the tools to answer. Write a JSON function call.",
)
_PLACE_HINTS = ("The city", "The city and state, e.g. San Francisco, CA", "Name of the city")
NO_TOOL = "no_tool"


@dataclass(frozen=True)
class Use:
    """One request for a tool: what the user says, the schema, the arguments and what may come back."""

    request: str
    tool: Tool
    arguments: dict[str, Any]
    result: str
    reply: str


def schema(name: str, description: str, properties: dict[str, Any], required: list[str]) -> Tool:
    """A tool in OpenAI's form."""
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _text(rng: Random, description: str) -> dict[str, Any]:
    return {"type": "string", "description": description} if rng.random() < 0.6 else {"type": "string"}


def _whole(rng: Random, description: str) -> dict[str, Any]:
    return {"type": "integer", "description": description} if rng.random() < 0.6 else {"type": "integer"}


def weather(rng: Random) -> Use:
    """The weather of a place, with or without a unit or a number of days."""
    place, key = city(rng), rng.choice(("location", "location", "city", "place"))
    name = rng.choice(("get_weather", "get_current_weather", "weather", "current_weather", "fetch_weather"))
    days = 0 if rng.random() < 0.8 else rng.randint(2, 9)
    properties = {key: _text(rng, rng.choice(_PLACE_HINTS))}
    arguments: dict[str, Any] = {key: place}
    unit_key = rng.choice(("unit", "format", "")) if rng.random() < 0.7 else ""
    unit = rng.choice(("celsius", "fahrenheit"))
    if unit_key:
        properties[unit_key] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
        if rng.random() < 0.5:
            properties[unit_key]["description"] = "The temperature unit to use"
    said_unit = bool(unit_key) and rng.random() < 0.4
    if unit_key:
        arguments[unit_key] = unit if said_unit else "celsius"
    if days:
        name = rng.choice(("get_n_day_weather_forecast", "get_forecast", "weather_forecast"))
        properties["num_days"] = _whole(rng, "The number of days to forecast")
        arguments["num_days"] = days
        request = rng.choice(
            ("What will the weather be in {x} for the next {n} days?", "Give me the {n} day forecast for {x}.",
             "What is the weather forecast for {x} for {n} days?")
        ).format(x=place, n=days)  # fmt: skip
    else:
        request = rng.choice(
            ("What is the weather in {x}?", "What's the weather like in {x}?", "What is the weather like in {x} today?",
             "How is the weather in {x}?", "Tell me the weather in {x}.", "Is it cold in {x}?", "Is it raining in {x}?",
             "What is the temperature in {x}?", "How warm is it in {x} right now?", "What's the weather like in {x}?",
             "Check the weather in {x}.", "What is the current weather in {x}?", "Will it rain in {x} today?")
        ).format(x=place)  # fmt: skip
    if said_unit:
        request = f"{request.rstrip('?.')} in {unit}{request[-1]}"
    degrees, sky = rng.randint(0, 35), rng.choice(("sunny", "cloudy", "rainy", "windy", "foggy"))
    result = rng.choice(
        (json.dumps({"temperature": degrees, "condition": sky}), f"{degrees} degrees and {sky}",
         f"{sky}, {degrees} degrees")
    )  # fmt: skip
    reply = f"It is {sky} and {degrees} degrees in {place}."
    words = "Get the weather forecast" if days else rng.choice(("Get the current weather", "Get the weather of a city"))
    required = list(properties) if unit_key and rng.random() < 0.7 else [k for k in properties if k != unit_key]
    return Use(request, schema(name, words, properties, required), arguments, result, reply)


def calculator(rng: Random) -> Use:
    """A sum for a calculator."""
    a, b = rng.randint(2, 999), rng.randint(2, 999)
    word, sign = rng.choice((("plus", "+"), ("minus", "-"), ("times", "*"), ("+", "+"), ("*", "*"), ("-", "-")))
    value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    request = rng.choice(
        ("What is {a} {w} {b}?", "Calculate {a} {w} {b}.", "How much is {a} {w} {b}?", "Compute {a} {w} {b}.",
         "What's {a} {w} {b}?", "Use the calculator: {a} {w} {b}.")
    ).format(a=a, w=word, b=b)  # fmt: skip
    reply = f"The result is {value}."
    if rng.random() < 0.6:
        name = rng.choice(("calculator", "calculate", "compute", "evaluate"))
        tool = schema(name, rng.choice(("Evaluate an expression", "Calculate an arithmetic expression")),
                      {"expression": _text(rng, "The expression")}, ["expression"])  # fmt: skip
        return Use(request, tool, {"expression": f"{a} {sign} {b}"}, str(value), reply)
    name = {"+": "add", "-": "subtract", "*": "multiply"}[sign]
    first, second = rng.choice((("a", "b"), ("x", "y"), ("first", "second")))
    tool = schema(name, f"{name.capitalize()} two numbers", {first: _whole(rng, "First number"),
                  second: _whole(rng, "Second number")}, [first, second])  # fmt: skip
    return Use(request, tool, {first: a, second: b}, str(value), reply)


def clock(rng: Random) -> Use:
    """The time in a place."""
    place, key = city(rng), rng.choice(("city", "location", "place", "timezone"))
    tool = schema(rng.choice(("get_time", "get_current_time", "time", "clock")), "Get the current time in a place",
                  {key: _text(rng, "The place")}, [key])  # fmt: skip
    request = rng.choice(("What time is it in {x}?", "Tell me the time in {x}.", "What is the current time in {x}?",
                          "How late is it in {x}?", "What's the time in {x}?")).format(x=place)  # fmt: skip
    time = f"{rng.randint(0, 23)}:{rng.randint(10, 59)}"
    return Use(request, tool, {key: place}, rng.choice((time, json.dumps({"time": time}))), f"It is {time} in {place}.")


def search(rng: Random) -> Use:
    """A search for some words."""
    key = rng.choice(("query", "query", "text", "q"))
    what = rng.choice(("red shoes", "the history of tea", "good restaurants", "train tickets", "cheap flights",
                       "cats", "the best books", "news about space", "garden chairs", "old maps",
                       "python lessons"))  # fmt: skip
    if rng.random() < 0.5:
        what = rng.choice((f"hotels in {city(rng)}", f"{invented(rng)} {invented(rng)}", f"{what} in {city(rng)}"))
    tool = schema(rng.choice(("search", "web_search", "search_web", "google", "find_pages")), "Search the web",
                  {key: _text(rng, "What to search for")}, [key])  # fmt: skip
    request = rng.choice(("Search for {x}.", "Search the web for {x}.", "Find {x} on the web.",
                          "Please search for {x}.",
                          "Look up {x}.", "Can you search for {x}?")).format(x=what)  # fmt: skip
    title = f"{invented(rng)} {invented(rng)}"
    return Use(request, tool, {key: what}, json.dumps({"title": title}), f"I found this: {title}.")


def mail(rng: Random) -> Use:
    """A message to a person."""
    who, text = person(rng), rng.choice(("I am late", "see you soon", "the meeting is at noon", "happy birthday",
                                         "call me back", "dinner is ready", "the report is done"))  # fmt: skip
    to, body = rng.choice((("to", "body"), ("recipient", "message"), ("name", "text"), ("to", "message")))
    name = rng.choice(("send_email", "send_message", "send_mail", "email"))
    tool = schema(name, rng.choice(("Send a message to a person", "Send an email")),
                  {to: _text(rng, "The receiver"), body: _text(rng, "The text")}, [to, body])  # fmt: skip
    request = rng.choice(("Send a message to {w}: {t}.", "Tell {w} that {t}.", "Write to {w}: {t}.",
                          "Send an email to {w}: {t}.", "Email {w}: {t}.")).format(w=who, t=text)  # fmt: skip
    return Use(request, tool, {to: who, body: text}, rng.choice(("ok", "sent", '{"status": "sent"}')),
               f"I sent the message to {who}.")  # fmt: skip


def timer(rng: Random) -> Use:
    """A timer for some minutes."""
    minutes, key = rng.randint(1, 90), rng.choice(("minutes", "duration"))
    tool = schema(rng.choice(("set_timer", "start_timer", "timer")), "Start a timer",
                  {key: _whole(rng, "Minutes")}, [key])  # fmt: skip
    request = rng.choice(("Set a timer for {n} minutes.", "Start a timer of {n} minutes.", "Wake me in {n} minutes.",
                          "Please set a timer for {n} minutes.")).format(n=minutes)  # fmt: skip
    return Use(request, tool, {key: minutes}, "ok", f"The timer is set for {minutes} minutes.")


def music(rng: Random) -> Use:
    """Music by somebody."""
    artist = f"{person(rng)} {invented(rng)}"
    key = rng.choice(("artist", "query"))
    tool = schema(rng.choice(("play_music", "play", "play_song")), "Play music", {key: _text(rng, "The artist")}, [key])
    request = rng.choice(("Play music by {x}.", "Play songs by {x}.", "I want to hear {x}.", "Please play {x}."))
    return Use(request.format(x=artist), tool, {key: artist}, "playing", f"Now playing {artist}.")


def light(rng: Random) -> Use:
    """A lamp in a room."""
    room = rng.choice(("kitchen", "bedroom", "garage", "bathroom", "garden", "office"))
    state = rng.choice(("on", "off"))
    tool = schema(rng.choice(("set_light", "switch_light", "light")), "Switch a light on or off",
                  {"room": _text(rng, "The room"), "state": {"type": "string", "enum": ["on", "off"]}},
                  ["room", "state"])  # fmt: skip
    request = rng.choice(("Turn {s} the light in the {r}.", "Switch {s} the {r} light.", "Turn the {r} light {s}.",
                          "Please turn {s} the lights in the {r}.")).format(s=state, r=room)  # fmt: skip
    return Use(request, tool, {"room": room, "state": state}, "ok", f"The light in the {room} is {state}.")


def translate(rng: Random) -> Use:
    """A translation."""
    text = rng.choice(("good morning", "thank you", "where is the station", "I love you", "the red house", "hello"))
    language = rng.choice(("French", "German", "Spanish", "Italian", "Japanese"))
    key = rng.choice(("language", "target"))
    tool = schema(rng.choice(("translate", "translate_text")), "Translate a text",
                  {"text": _text(rng, "The text"), key: _text(rng, "The language")}, ["text", key])  # fmt: skip
    request = rng.choice(('Translate "{t}" to {l}.', "Translate {t} into {l}.", 'How do you say "{t}" in {l}?'))
    word = invented(rng)
    return Use(request.format(t=text, l=language), tool, {"text": text, key: language}, word,
               f"In {language} that is: {word}.")  # fmt: skip


def generic(rng: Random) -> Use:
    """Any verb and noun with one value: teaches that the schema, not memory, decides the names."""
    verb, noun, value = rng.choice(_VERBS), rng.choice(_NOUNS), rng.choice((invented(rng), str(rng.randint(1, 999))))
    key = rng.choice(_FIELDS[:4] if value.isalpha() else ("id", "number"))
    kind = _text(rng, f"The {key}") if value.isalpha() else _whole(rng, f"The {key}")
    tool = schema(f"{verb}_{noun}", f"{verb.capitalize()} a {noun}", {key: kind}, [key])
    request = rng.choice((f"{verb.capitalize()} the {noun} {value}.", f"Please {verb} {noun} {value}.",
                          f"I want to {verb} the {noun} {value}."))  # fmt: skip
    return Use(request, tool, {key: value if value.isalpha() else int(value)}, "ok", f"Done: {verb} {noun} {value}.")


USES: tuple[Callable[[Random], Use], ...] = (
    weather, calculator, clock, search, mail, timer, music, light, translate, generic,
)  # fmt: skip
_WEIGHTS = (0.32, 0.12, 0.10, 0.08, 0.07, 0.06, 0.04, 0.05, 0.05, 0.11)
_MANY, _FEW = (0.4, 0.35, 0.17, 0.08), (0.5, 0.38, 0.09, 0.03)
_CALCULATOR, _TRANSLATOR = {"name": "calculator"}, {"name": "translate"}


def distractor(rng: Random) -> Tool:
    """A tool that no request of the corpus needs."""
    keys = rng.sample(_FIELDS, rng.randint(0, 3))
    properties = {key: rng.choice((_text, _text, _whole))(rng, f"The {key}") for key in keys}
    verb, noun = rng.choice(_VERBS), rng.choice(_NOUNS)
    return schema(f"{verb}_{noun}", f"{verb.capitalize()} a {noun}", properties, keys[: rng.randint(0, len(keys))])


def _others(rng: Random, taken: Tool, count: int) -> list[Tool]:
    """Tools of other families and distractors, none of them with the taken tool's name."""
    tools: list[Tool] = []
    names = {taken["function"]["name"]}
    words = {taken["function"]["description"]}
    while len(tools) < count:
        tool = rng.choices(USES, _WEIGHTS)[0](rng).tool if rng.random() < 0.5 else distractor(rng)
        function = tool["function"]
        if function["name"] not in names and function["description"] not in words and not _rivals(function, taken):
            names.add(function["name"])
            words.add(function["description"])
            tools.append(tool)
    return tools


def _rivals(function: dict[str, Any], taken: Tool) -> bool:
    """Whether both could answer the same request, for example two weather tools."""
    families = (("weather", "forecast"), ("calc", "comput", "evaluat", "add", "subtract", "multipl"), ("time", "clock"),
                ("search", "google", "pages"), ("mail", "message"), ("play",), ("light",), ("translat",))  # fmt: skip
    ours = taken["function"]["name"]
    for family in families:
        if any(word in ours for word in family) and any(word in function["name"] for word in family):
            return not ("weather" in family and ("forecast" in ours) != ("forecast" in function["name"]))
    return False


def _is_near(use: Use) -> bool:
    return _rivals(_CALCULATOR, use.tool) or _rivals(_TRANSLATOR, use.tool)


def call_message(name: str, arguments: dict[str, Any]) -> Message:
    """An assistant turn that calls one tool."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


def _start(rng: Random) -> list[Message]:
    system = rng.choice(("You are a helpful assistant.", "You are a helpful assistant. Use the tools when they help.",
                         "Answer with a tool call if a tool fits.",
                         "Don't make assumptions about values. Ask if a request is ambiguous."))  # fmt: skip
    return [system_message(rng, system)] if rng.random() < 0.3 else []


def _call_prompt(rng: Random, question: str) -> str:
    """The question as TGI sends it: with a line of dashes and a request for JSON behind it."""
    space = rng.choice(("\n", "\n", ""))
    return f"{question}\n---\n{space}{rng.choice(_CALL_PROMPTS)}{space}"


def asked(rng: Random, topic: Topic, *, long: bool = False, few: bool = False, apart: bool = False) -> Document:
    """A chat with tools. Long ones carry up to about 1,500 tokens of schemas, `few` ones little.

    `apart`: where the answer is in words, no tool is offered that could have given it.
    """
    use = rng.choices(USES, _WEIGHTS)[0](rng)
    count = rng.randint(10, 20) if long else rng.choices((0, 1, 2, 3), _FEW if few else _MANY)[0]
    others = _others(rng, use.tool, count)
    messages = _start(rng)
    forced = rng.random() < 0.3
    if rng.random() < 0.25:
        pair = framed(rng, topic(rng))
        if apart:
            others = [tool for tool in others if not _rivals(_CALCULATOR, tool) and not _rivals(_TRANSLATOR, tool)]
            use = light(rng) if _is_near(use) else use
        question = _call_prompt(rng, pair.question) if forced else pair.question
        messages.append({"role": "user", "content": question})
        # A grammar may force a call although none fits: some turns show what to write then. They are too few to make
        # it the first choice where nothing forces it.
        if forced or rng.random() < 0.15:
            messages.append(call_message(NO_TOOL, {}))
        else:
            messages.append({"role": "assistant", "content": pair.answer})
        return Document(messages=tuple(messages), tools=tuple(others or [use.tool]))
    tools = [*others, use.tool]
    rng.shuffle(tools)
    greeting = rng.choice(("Hello! ", "Hi! ", "Please help me. ")) if rng.random() < 0.12 else ""
    if rng.random() < 0.08:
        greeting += f"{filler(rng)} "
    request = greeting + use.request
    messages.append({"role": "user", "content": _call_prompt(rng, request) if forced else request})
    messages.append(call_message(use.tool["function"]["name"], use.arguments))
    if rng.random() < 0.3:
        messages.append({"role": "tool", "content": use.result})
        messages.append({"role": "assistant", "content": use.reply})
        if rng.random() < 0.2:
            messages.append({"role": "user", "content": "Thank you!"})
            messages.append({"role": "assistant", "content": "You are welcome!"})
    return Document(messages=tuple(messages), tools=tuple(tools))


def told(rng: Random) -> Pair:
    """A question that needs a tool, but none is there."""
    use = rng.choice((weather, clock))(rng)
    answer = "I cannot know the weather without a tool." if "weather" in use.tool["function"]["name"] else ""
    return Pair(use.request, answer or "I cannot know that without a tool.")
