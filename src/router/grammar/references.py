"""Where the references of a JSON schema lead, as JSON pointers from its root."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urljoin

ROOT = "#"
_ANCHORS = ("$anchor", "$dynamicAnchor")


class Places:
    """Paths by address and anchor."""

    def __init__(self) -> None:
        self._paths = {"": ROOT}

    def __len__(self) -> int:
        return len(self._paths)

    def add(self, schema: Mapping[str, Any], path: str, address: str) -> str:
        """Note names, and return the address within."""
        given = schema.get("$id")
        if isinstance(given, str) and not given.startswith("#"):
            address = urljoin(address, given).removesuffix("#")
            self._paths[address] = path
        elif isinstance(given, str):  # as older versions of JSON Schema write an anchor
            self._paths[address + given] = path
        for keyword in _ANCHORS:
            if isinstance(anchor := schema.get(keyword), str):
                self._paths[f"{address}#{anchor}"] = path
        return address

    def find(self, reference: str, address: str) -> str | None:
        """Return the path that a reference names, if any."""
        whole = address + reference if reference.startswith("#") else urljoin(address, reference)
        document, _, fragment = whole.partition("#")
        if fragment and not fragment.startswith("/"):
            return self._paths.get(whole)
        path = self._paths.get(document)
        return None if path is None else path + unquote(fragment)


def step(path: str, *names: str | int) -> str:
    """Return the path of a member."""
    return "/".join([path, *(str(name).replace("~", "~0").replace("/", "~1") for name in names)])
