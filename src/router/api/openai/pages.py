"""Pages of a list, as OpenAI's clients ask for them: `limit`, `order`, and `after` an id."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from router.errors import ValidationError

T = TypeVar("T")


def page_of(
    query: Mapping[str, str],
    items: Sequence[T],
    has_id: Callable[[T, str], bool],
    shown: Callable[[T], dict[str, Any]],
    *,
    usual: int,
    most: int,
) -> dict[str, Any]:
    """Return OpenAI's list of a page, the newest first if the query does not say otherwise.

    Args:
        items: All, the oldest first.
        shown: Makes an item's object, with its `id`.
        usual: Items of a page without `limit`.
        most: The largest `limit`.

    Raises:
        ValidationError: The query asks for no page.
    """
    try:
        limit = int(query.get("limit", usual))
    except ValueError:
        limit = 0
    if not 1 <= limit <= most:
        raise ValidationError(f"`limit` must be in 1..={most}", param="limit", limit=most)
    if "before" in query:
        raise ValidationError("`before` is not served: use `after`, and `order`", param="before", reason="unsupported")
    if (order := query.get("order", "desc")) not in ("asc", "desc"):
        raise ValidationError("`order` must be `asc` or `desc`", param="order")
    if order == "desc":
        items = items[::-1]
    if (after := query.get("after")) is not None:
        place = next((place for place, item in enumerate(items, 1) if has_id(item, after)), None)
        if place is None:
            raise ValidationError("`after` must be the id of one of these items", param="after")
        items = items[place:]
    page = [shown(item) for item in items[:limit]]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": len(items) > limit}
