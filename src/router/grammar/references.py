"""Where the references of a JSON schema lead, as JSON pointers from its root."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urljoin

ROOT = "#"
MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values have schemas by names of any kind."""
DATA = frozenset({"const", "enum", "default", "examples", "example"})
"""Keywords whose values are data: a `$ref` or an anchor in there is none."""
_ANCHORS = ("$anchor", "$dynamicAnchor")
_OLD = re.compile(r"json-schema\.org/\w+-0([3-7])/")

Address = tuple[str, ...]
"""Of the document within which a schema is, in each reading."""


@dataclass
class _Reading:
    """Paths as some versions of JSON Schema read them."""

    identities: tuple[str, ...]
    # Whether what is beside a `$ref` says nothing, and there are no anchors but in the identity.
    is_old: bool
    paths: dict[str, str] = field(default_factory=lambda: {"": ROOT})

    def add(self, schema: Mapping[str, Any], path: str, address: str) -> str:
        given = next((schema[one] for one in self.identities if one in schema), None)
        if not isinstance(given, str) or (self.is_old and "$ref" in schema):
            pass
        elif given.startswith("#"):  # as older versions write an anchor
            self.paths[address + given] = path
        else:
            address = urljoin(address, given).removesuffix("#")
            self.paths[address] = path
        for keyword in () if self.is_old else _ANCHORS:
            if isinstance(anchor := schema.get(keyword), str):
                self.paths[f"{address}#{anchor}"] = path
        return address

    def find(self, reference: str, address: str) -> str | None:
        whole = address + reference if reference.startswith("#") else urljoin(address, reference)
        document, _, fragment = whole.partition("#")
        if fragment and not fragment.startswith("/"):
            return self.paths.get(whole)
        path = self.paths.get(document)
        return None if path is None else path + unquote(fragment)


class Places:
    """Paths by address and anchor."""

    # A schema that does not name its version is of any; with `$defs`, of one that has it.

    def __init__(self, root: Any) -> None:
        self._root = root
        said = root.get("$schema") if isinstance(root, dict) else None
        found = _OLD.search(said) if isinstance(said, str) else None
        self.is_alone = found is not None
        new, since_6 = _Reading(("$id",), is_old=False), _Reading(("$id",), is_old=True)
        since_4 = _Reading(("id", "$id"), is_old=True)
        if found is not None:
            self._readings = [since_4 if int(found[1]) < 6 else since_6]
        elif isinstance(said, str) or (isinstance(root, dict) and "$defs" in root):
            self._readings = [new]
        else:
            self._readings = [new, since_6, since_4]
        self.address: Address = ("",) * len(self._readings)
        # Addresses by the identity of the schemas within.
        self.within: dict[int, Address] = {}

    def __len__(self) -> int:
        return sum(len(one.paths) for one in self._readings)

    def add(self, schema: Mapping[str, Any], path: str, address: Address) -> Address:
        """Note names, and return the address within."""
        address = tuple(one.add(schema, path, given) for one, given in zip(self._readings, address, strict=True))
        self.within[id(schema)] = address
        return address

    def find(self, reference: str, address: Address) -> str | None:
        """Return the path that a reference names, if any.

        Raises:
            ValueError: Another version names another.
        """
        path, *others = (one.find(reference, given) for one, given in zip(self._readings, address, strict=True))
        if path is not None and any(one not in (None, path) and at(self._root, one) is not None for one in others):
            text = "leads elsewhere in older versions of JSON Schema: say in `$schema` which is meant"
            raise ValueError(f"the `$ref` {reference} {text}")
        return path

    def named(self, reference: str, address: Address) -> Any:
        """Return what a reference names, if anything."""
        path = self.find(reference, address)
        return None if path is None else at(self._root, path)


def places_of(root: Any) -> Places:
    """Note the names of all schemas within."""
    places = Places(root)
    waiting = [(root, ROOT, places.address)]
    while waiting:
        schema, path, address = waiting.pop()
        if isinstance(schema, dict):
            address = places.add(schema, path, address)
            parts = [(step(path, keyword), keyword, one) for keyword, one in schema.items() if keyword not in DATA]
            inner = [
                (step(place, name), one)
                for place, keyword, map_ in parts
                if keyword in MAPS and isinstance(map_, dict)
                for name, one in map_.items()
            ]
            inner += [(place, one) for place, keyword, one in parts if keyword not in MAPS]
        else:
            inner = [(step(path, number), one) for number, one in enumerate(schema)]
        waiting += [(one, place, address) for place, one in inner if isinstance(one, dict | list)]
    return places


def at(root: Any, path: str) -> Any:
    """Return what is at a path, if anything."""
    for name in path.split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list):
            root = root[int(key)] if key.isdecimal() and len(key) < 10 and int(key) < len(root) else None
        else:
            root = root.get(key) if isinstance(root, dict) else None
    return root


def step(path: str, *names: str | int) -> str:
    """Return the path of a member."""
    return "/".join([path, *(str(name).replace("~", "~0").replace("/", "~1") for name in names)])
