"""Tools by the thousand: names are looked up, and not compared with each other."""

from __future__ import annotations

from router.api.responses.input_items import AdditionalToolsItem, ResponsesTool
from router.api.responses.tools import ServedTools, count


class Name(str):
    """Counts how often one is compared."""

    __slots__ = ()
    num_compared = 0

    def __eq__(self, other: object) -> bool:
        Name.num_compared += 1
        return str.__eq__(self, other)

    def __hash__(self) -> int:
        return str.__hash__(self)


def tool(kind: str, name: str, inner: list[ResponsesTool] | None = None) -> ResponsesTool:
    return ResponsesTool.model_construct(type=kind, name=name, tools=inner or [])


def test_names_are_compared_as_often_as_there_are_tools() -> None:
    spaces = [tool("namespace", space, [tool("function", Name(f"f{n}")) for n in range(500)]) for space in "ab"]
    added = AdditionalToolsItem.model_construct(
        type="additional_tools", tools=[tool("function", Name(f"g{n}")) for n in range(500)]
    )
    Name.num_compared = 0
    served = ServedTools.of(spaces, [added, added])
    names = [served.name_of(Name(f"f{n}"), space) for space in "ab" for n in range(500)]
    assert names == [f"f{n}" for n in range(500)] + [f"b__f{n}" for n in range(500)]
    assert len(served.functions) == 1500 and count(spaces) == 1002
    assert Name.num_compared < 20_000
