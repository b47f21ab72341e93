"""A conversation with stored responses or items."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import TypeAdapter

from router.api.response_store import OwnResponses
from router.api.responses.conversation import reasoning_text
from router.api.responses.input_items import (
    CallOutputItem,
    InputImage,
    InputPart,
    InputText,
    Item,
    ItemReference,
    MessageItem,
    ReasoningItem,
    SearchCallItem,
)
from router.api.responses.schema import ResponsesBody
from router.api.responses.tools import ADDING
from router.errors import ValidationError

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
_INSTEAD = "send the whole conversation in `input`"
_PREFIXES = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc",
    "function_call_output": "fco", "custom_tool_call_output": "ctco", "additional_tools": "at",
    "tool_search_call": "tsc", "tool_search_output": "tso",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Items as JSON with ids (`written`), and `new_ids` of the request's; empty if unstored."""

    items: list[Item]
    written: tuple[bytes, ...] = ()
    new_ids: tuple[str, ...] = ()


class History:
    """What a request takes from the store, looked up at once."""

    def __init__(self, body: ResponsesBody, store: OwnResponses | None, *, most_bytes: int) -> None:
        """Look up at most `most_bytes`, items counted each time."""
        self._body = body
        self._store = store if body.store else None
        self._earlier: tuple[bytes, ...] = ()
        self._named: dict[str, bytes] = {}
        if (previous := body.previous_response_id) is not None:
            stored = None if store is None else store.get(previous)
            if stored is None:
                raise _absent("`previous_response_id`", "previous_response_id", previous, store)
            self._earlier = stored.items
        self.cost = sum(map(len, self._earlier))
        """Bytes of what was stored, which `conversation` goes through."""
        for item in self._given:
            if isinstance(item, ItemReference):
                found = None if store is None else store.item(item.id)
                if found is None:
                    raise _absent("`item_reference`", "input", item.id, store)
                self._named[item.id] = found
                self.cost += len(found)
        if self.cost > most_bytes:
            text = f"what is stored of the conversation has {self.cost} bytes, the limit is {most_bytes}: {_INSTEAD}"
            param = "input" if previous is None else "previous_response_id"
            raise ValidationError(text, param=param, reason="body_too_large", given=self.cost, limit=most_bytes)

    def conversation(self) -> Conversation:
        given = [self._read(item) if isinstance(item, ItemReference) else item for item in self._given]
        items = [*_ITEMS.validate_json(b"[" + b",".join(self._earlier) + b"]"), *given]
        if (store := self._store) is None:
            return Conversation(items=items)
        new: list[dict[str, Any]] = []
        for item in given:
            if not _is_foreign(item):
                is_taken = (
                    item.id is None or store.item(item.id) is not None or any(one["id"] == item.id for one in new)
                )
                new.append(
                    _written(
                        item, f"{_PREFIXES.get(item.type, 'item')}_{uuid.uuid4().hex}" if is_taken else str(item.id)
                    )
                )
        written = (*self._earlier, *(orjson.dumps(one) for one in new))
        return Conversation(items=items, written=written, new_ids=tuple(one["id"] for one in new))

    @property
    def _given(self) -> list[Item]:
        given = self._body.input
        return [MessageItem(role="user", content=given)] if isinstance(given, str) else given

    def _read(self, reference: ItemReference) -> Item:
        return _ITEMS.validate_json(b"[" + self._named[reference.id] + b"]")[0]


def _is_foreign(item: Item) -> bool:
    """Whether only another server reads it, unbounded by prompts."""
    return isinstance(item, ReasoningItem) and not reasoning_text(item)


def _written(item: Item, name: str) -> dict[str, Any]:
    """Return the item as it was sent, with this id and what OpenAI's clients expect."""
    fields = item.model_dump(exclude_none=True, exclude_defaults=True, exclude={"id"})
    said = fields.pop("said", {})
    fields = {"type": item.type, "status": "completed", **fields}
    if isinstance(item, ReasoningItem):
        fields = {"summary": [], **fields}
        if item.content:
            fields.pop("encrypted_content", None)  # `content` is read in its place
            fields["content"] = [{"type": "reasoning_text", "text": part.text} for part in item.content]
    elif isinstance(item, MessageItem):
        parts = item.content
        if isinstance(parts, str):
            parts = [InputText(type="output_text" if item.role == "assistant" else "input_text", text=parts)]
        fields["content"] = [_part(part) for part in parts]
    elif isinstance(item, CallOutputItem) and not isinstance(item.output, str):
        fields["output"] = [_part(part) for part in item.output]
    elif isinstance(item, (*ADDING, SearchCallItem)):
        fields |= item.model_dump(exclude_unset=True, exclude={"id"})
    return {**said, "id": name, **fields}


def _part(part: InputPart) -> dict[str, Any]:
    if isinstance(part, InputImage):
        return {"type": part.type, "detail": part.detail or "auto", "image_url": part.image_url}
    if part.type == "refusal":
        return {"type": part.type, "refusal": part.refusal}
    others: dict[str, Any] = {"annotations": [], "logprobs": []} if part.type == "output_text" else {}
    return {"type": part.type, "text": part.text, **others}


def _absent(subject: str, param: str, name: str, store: OwnResponses | None) -> ValidationError:
    if store is None:
        text = f"{subject} is refused: nothing is stored here: {_INSTEAD}, or start the server with `--response-store`"
    else:
        text = f"{subject} names {name[:100]}, which is not stored here or not any more: {_INSTEAD}"
    code = "previous_response_not_found" if param == "previous_response_id" else None
    return ValidationError(text, param=param, reason="unknown_response", code=code)
