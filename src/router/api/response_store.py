"""Responses kept in memory to be continued."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

MOST_BYTES = 64 << 20
_ENTRY_BYTES = 500  # of what Python adds, about
_ITEM_BYTES = 200


@dataclass(frozen=True, kw_only=True)
class StoredResponse:
    """JSON of `items` to the answer, the last `num_answered`."""

    response: bytes
    items: tuple[bytes, ...]
    num_answered: int
    item_ids: tuple[str, ...]  # of those that came with this response

    @property
    def asked(self) -> tuple[bytes, ...]:
        """The conversation without the answer."""
        return self.items[: len(self.items) - self.num_answered]

    @property
    def num_bytes(self) -> int:
        """Return its bytes, shared items counted again."""
        return _ENTRY_BYTES + len(self.response) + sum(_ITEM_BYTES + len(item) for item in self.items)


def has_id(item: bytes, item_id: str) -> bool:
    """Whether an item's JSON begins with that id."""
    return item.startswith(orjson.dumps({"id": item_id})[:-1])


def _json(value: Any) -> bytes:
    """Write JSON, log probabilities of the shards in it."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


_Name = tuple[str, str]
"""An owner, and an id."""


@dataclass(slots=True)
class _Held:
    """What an owner has."""

    number: int = 0
    num_bytes: int = 0

    def add(self, number: int, num_bytes: int) -> None:
        self.number += number
        self.num_bytes += num_bytes


class ResponseStore:
    """The last used responses of all owners, on one thread.

    An owner who stores much loses its own: where there is no room, the one that has the most gives it.
    """

    def __init__(self, most: int, *, most_bytes: int = MOST_BYTES) -> None:
        """Keep `most`, and as many as fit, one at least."""
        self._most = most
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self.responses: OrderedDict[_Name, StoredResponse] = OrderedDict()
        self.items: dict[_Name, bytes] = {}
        self._held: dict[str, _Held] = {}

    def of(self, owner: str) -> OwnResponses:
        """Return what an API key sees; the empty name: all clients of a server without keys."""
        return OwnResponses(self, owner)

    def add(self, owner: str, response_id: str, stored: StoredResponse) -> None:
        """Keep a response, and drop others where they exceed a bound."""
        self.responses[owner, response_id] = stored
        self._held.setdefault(owner, _Held()).add(1, stored.num_bytes)
        new = stored.items[len(stored.items) - len(stored.item_ids) :]
        self.items |= zip(((owner, item_id) for item_id in stored.item_ids), new, strict=True)
        self._num_bytes += stored.num_bytes
        while (are_many := len(self.responses) > self._most) or (
            self._num_bytes > self._most_bytes and len(self.responses) > 1
        ):
            self.remove(self._worst(are_many))

    def _worst(self, are_many: bool) -> _Name:
        """Return the response that its owner has not used longest, of the one who has the most, or the most bytes."""
        held = self._held
        owner = max(held, key=lambda one: held[one].number if are_many else held[one].num_bytes)
        return next(name for name in self.responses if name[0] == owner)

    def remove(self, name: _Name) -> bool:
        """Drop a response; return whether it was there."""
        if (stored := self.responses.pop(name, None)) is None:
            return False
        self._num_bytes -= stored.num_bytes
        held = self._held[name[0]]
        held.add(-1, -stored.num_bytes)
        if not held.number:
            del self._held[name[0]]
        for item_id in stored.item_ids:
            self.items.pop((name[0], item_id), None)
        return True


@dataclass(frozen=True, slots=True)
class OwnResponses:
    """The responses that one owner has stored."""

    _store: ResponseStore
    _owner: str

    def put(self, whole: dict[str, Any], asked: Sequence[bytes], new_ids: Sequence[str]) -> None:
        """Keep the response `whole` to `asked`, with the request's `new_ids` last."""
        output = [_json(item) for item in whole["output"]]
        item_ids = (*new_ids, *(item["id"] for item in whole["output"]))
        stored = StoredResponse(
            response=_json(whole), items=(*asked, *output), num_answered=len(output), item_ids=item_ids
        )  # fmt: skip
        self._store.add(self._owner, whole["id"], stored)

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a response, if still there."""
        stored = self._store.responses.get((self._owner, response_id))
        if stored is not None:
            self._store.responses.move_to_end((self._owner, response_id))
        return stored

    def item(self, item_id: str) -> bytes | None:
        """Return a stored response's or request's item."""
        return self._store.items.get((self._owner, item_id))

    def delete(self, response_id: str) -> bool:
        """Whether it was there."""
        return self._store.remove((self._owner, response_id))
