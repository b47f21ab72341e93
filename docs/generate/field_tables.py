"""The table of docs/compatibility.md about fields of other servers: between `<!-- fields -->` and its end."""

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
from router.schemas.other_fields import FAMILIES, HARMLESS, REFUSED, Family, served_as

_PLACE = re.compile(r"(<!-- fields -->\n).*?(\n<!-- end of fields -->)", re.DOTALL)
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
    """A document with the table as it is now, if it has its place."""
    return _PLACE.sub(lambda found: found[1] + text_of() + found[2], text)


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
