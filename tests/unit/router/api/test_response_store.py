"""The store of responses: what was used last stays, within its bounds."""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from router.api.response_store import OwnResponses, ResponseStore


def response(name: str, text: str = "") -> dict[str, Any]:
    return {"id": name, "output": [{"id": f"msg_{name}", "type": "message", "text": text}]}


def put(store: OwnResponses, name: str, text: str = "", earlier: tuple[bytes, ...] = ()) -> None:
    asked = (*earlier, orjson.dumps({"id": f"in_{name}"}))
    store.put(response(name, text), asked, (f"in_{name}",))


def test_a_response_and_its_items_are_found() -> None:
    store = ResponseStore(2).of("")
    put(store, "a", "A")
    stored = store.get("a")
    assert stored is not None and orjson.loads(stored.response) == response("a", "A")
    assert [orjson.loads(item)["id"] for item in stored.items] == ["in_a", "msg_a"]
    assert stored.asked == stored.items[:1]
    assert store.item("in_a") == stored.items[0] and store.item("msg_a") == stored.items[1]
    assert store.delete("a") and not store.delete("a")
    assert store.get("a") is store.item("in_a") is store.item("msg_a") is None


def test_items_of_a_deleted_beginning_stay_with_what_continues_it() -> None:
    store = ResponseStore(2).of("")
    put(store, "a")
    first = store.get("a")
    assert first is not None
    put(store, "b", earlier=first.items)
    store.delete("a")
    second = store.get("b")
    assert second is not None and second.items[:2] == first.items and store.item("in_a") is None


def test_one_is_kept_whatever_its_size() -> None:
    store = ResponseStore(5, most_bytes=1000).of("")
    put(store, "a", "x" * 5000)
    assert store.get("a") is not None
    put(store, "b")
    assert store.get("a") is None and store.get("b") is not None


def test_an_owner_who_stores_much_loses_its_own() -> None:
    whole = ResponseStore(3, most_bytes=9000)
    few, many = whole.of("few"), whole.of("many")
    put(few, "a")
    for name in "bcdef":
        put(many, name)
    assert few.get("a") is not None and [many.get(name) is not None for name in "bcdef"] == [False] * 3 + [True] * 2
    many.delete("e")
    put(many, "large", "x" * 8000)  # and one more would be too many bytes
    put(few, "g")
    assert few.get("a") is not None and few.get("g") is not None and many.get("large") is None


@given(st.lists(st.tuples(st.sampled_from("pgd"), st.integers(0, 5), st.integers(0, 3)), max_size=40))
def test_bounds_hold_and_what_was_used_last_stays(steps: list[tuple[str, int, int]]) -> None:
    whole, used = ResponseStore(3, most_bytes=6000), list[str]()
    store = whole.of("")
    for number, (step, which, size) in enumerate(steps):
        name = str(which)
        if step == "p":
            if name in used:
                continue  # ids are never given twice
            put(store, name, str(number) * 1000 * size)
            used.append(name)
        elif step == "g" and store.get(name) is not None:
            used.remove(name)
            used.append(name)
        elif step == "d":
            assert store.delete(name) == (name in used)
            used = [one for one in used if one != name]
        kept = [name for _, name in whole.responses]
        assert used[len(used) - len(kept) :] == kept and len(kept) <= 3
        assert whole._num_bytes == sum(one.num_bytes for one in whole.responses.values())
        assert whole._num_bytes <= 6000 or len(kept) == 1
        assert set(whole.items) == {("", one) for stored in whole.responses.values() for one in stored.item_ids}
        used = kept


def test_each_owner_has_its_own_within_one_bound() -> None:
    whole = ResponseStore(2)
    alice, bob = whole.of("alice"), whole.of("bob")
    put(alice, "a", "A")
    put(bob, "a", "B")
    assert alice.get("a") is not None and alice.get("a") != bob.get("a")
    assert alice.item("msg_a") != bob.item("msg_a") is not None
    assert bob.delete("a") and bob.get("a") is bob.item("in_a") is None
    assert alice.get("a") is not None and alice.item("in_a") is not None
    put(bob, "b")
    put(bob, "c")
    assert alice.get("a") is not None and bob.get("b") is bob.item("in_b") is None and bob.get("c") is not None
