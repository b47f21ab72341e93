"""The tables of docs/compatibility.md about fields of other servers, and keys of objects in bodies: between
`<!-- fields -->` or `<!-- keys -->` and their ends."""

from __future__ import annotations

import re

from docs.generate.markdown import table
from router.api.chat.schema import ChatBody
from router.api.completions.schema import CompletionBody
from router.api.embeddings.schema import (
    ClassifyBody,
    DocumentsBody,
    EmbedBody,
    EmbeddingsBody,
    PredictBody,
    RerankBody,
    ScoreBody,
)
from router.api.messages.schema import MessagesBody
from router.api.responses.schema import ResponsesBody
from router.schemas.base import Body
from router.schemas.other_fields import FAMILIES, HARMLESS, PLACES, REFUSED, Family, harmless_keys, served_as

_PLACE = re.compile(r"(<!-- (fields|keys) -->\n).*?(\n<!-- end of \2 -->)", re.DOTALL)
BODIES: dict[Family, tuple[type[Body], ...]] = {
    "chat": (ChatBody,),
    "completions": (CompletionBody,),
    "responses": (ResponsesBody,),
    "messages": (MessagesBody,),
    "embeddings": (EmbeddingsBody, DocumentsBody, ScoreBody, ClassifyBody, EmbedBody, RerankBody, PredictBody),
}


def has_place(text: str) -> bool:
    return _PLACE.search(text) is not None


def filled(text: str) -> str:
    """A document with the tables as they are now, if it has their places."""
    makers = {"fields": text_of, "keys": text_of_keys}
    return _PLACE.sub(lambda found: found[1] + makers[found[2]]() + found[3], text)


def text_of() -> str:
    """The rows: what happens, to which fields, on which routes."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name in sorted(
        {name for family in FAMILIES for name in (*REFUSED[family], *HARMLESS[family], *_served(family))}
    ):
        for state, routes in _states(name).items():
            rows.setdefault((state, routes), []).append(f"`{name}`")
    listed = [[", ".join(names), routes, state] for (state, routes), names in rows.items()]
    return table(["Fields", "Routes", "State"], sorted(listed, key=lambda row: (_order(row[2]), row[1], row[0])))


def text_of_keys() -> str:
    """The rows: what happens, to which keys, of which objects."""
    rows: dict[str, dict[str, list[str]]] = {}
    for place in PLACES:
        family, _, field = place.partition(" ")
        states = {name: f"ignored: {why}" for name, why in harmless_keys(place).items()}
        states |= {name: f"refused: {refused.remedy}" for name, refused in REFUSED[place].items()}
        for name, state in states.items():
            rows.setdefault(state, {}).setdefault(name, []).append(f"{family} `{field}`")
    listed = []
    for state, names in rows.items():
        for objects in dict.fromkeys(map(tuple, names.values())):
            of_these = sorted(f"`{name}`" for name, where in names.items() if tuple(where) == objects)
            listed.append([", ".join(of_these), ", ".join(objects), state])
    return table(["Keys", "Objects", "State"], sorted(listed, key=lambda row: (_order(row[2]), row[1], row[0])))


def _order(state: str) -> int:
    return ("served", "ignored", "refused").index(state.split()[0].rstrip(":,"))


def _served(family: Family) -> dict[str, str]:
    return {theirs: ours for body in BODIES[family] for theirs, ours in served_as(body.field_names).items()}


def _states(name: str) -> dict[str, str]:
    """State → the families of routes that have it."""
    found: dict[str, list[str]] = {}
    for family in FAMILIES:
        if name in REFUSED[family]:
            refused = REFUSED[family][name]
            found.setdefault(f"refused: {refused.remedy}", []).append(family)
        elif name in HARMLESS[family] and not any(name in body.known_names for body in BODIES[family]):
            found.setdefault("ignored, as it changes no answer", []).append(family)
        elif (ours := _served(family).get(name)) is not None:
            found.setdefault(f"served as `{ours}`", []).append(family)
    return {state: ", ".join(families) for state, families in found.items()}
