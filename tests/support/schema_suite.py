"""JSON Schema's own test suite, from the source distribution of `jsonschema`, kept in a folder of the user's cache."""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.published_models import cache, downloaded, made

VERSION = "4.26.0"
SHA256 = "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326"
DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
"""The suite's folders, and how their schemas may name themselves."""


def cases(draft: str) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    """Where a schema is from, the schema, and instances that are `valid` or not. Skips where there is no index."""
    folder = made(cache() / f"schema-suite-{VERSION}", _fetch) / draft
    for file in sorted(folder.rglob("*.json")):
        for group in json.loads(file.read_bytes()):
            yield f"{file.relative_to(folder)}: {group['description']}", group["schema"], group["tests"]


def _fetch(folder: Path) -> None:
    archive = downloaded("jsonschema", VERSION, folder, "--no-binary", "jsonschema")
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert found == SHA256, f"jsonschema {VERSION}: sha256 {found}"
    within = Path(f"jsonschema-{VERSION}", "json", "tests")
    with tarfile.open(archive) as files:
        for member in files:
            if member.isfile() and Path(member.name).is_relative_to(within) and member.name.endswith(".json"):
                path = folder / Path(member.name).relative_to(within)
                path.parent.mkdir(parents=True, exist_ok=True)
                opened = files.extractfile(member)
                assert opened is not None
                path.write_bytes(opened.read())
    archive.unlink()
