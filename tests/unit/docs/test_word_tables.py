"""Tables that are written into the guides for users of other servers and into the README: fresh, and true here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from support import documents
from support.documents import bare, rows, section

from docs.generate import variables
from docs.generate.figures import README, readme
from docs.generate.word_tables import guides
from launcher.config import LauncherConfig, ServeConfig
from launcher.config_checks import check
from router.server.app import create_app
from router.server.pooled_app import create_pooled_app
from wire.cli.options import options_of
from wire.cli.other_servers.words import SERVERS, words_of
from wire.cli.parsing import parse

GUIDES: Mapping[Path, str] = guides()
LLAMA_CPP = documents.read("docs/migrating-from-llama-cpp.md")
FLAGS = {opt.flag for opt in options_of(LauncherConfig)}
VARIABLES = {str(opt.env) for opt in options_of(LauncherConfig)}
VARIABLES |= {one.name for one in variables.VARIABLES} | {str(opt.env) for _, opt in variables.inherited()}


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.name)
def test_the_tables_are_fresh(path: Path) -> None:
    assert path.read_text() == GUIDES[path], f"docs/{path.name} is stale: make reference"


def test_the_readme_has_the_figures_of_the_results() -> None:
    text = README.read_text()
    assert text == readme()[README], "README.md is stale: make reference"
    assert text.count("<!-- figures: ") == 2 and text.count("** × ") >= 1  # cells in which another server is faster


def test_each_server_has_a_guide() -> None:
    texts = "".join(GUIDES.values())
    for server in SERVERS:
        if server != "general":
            kind = "options" if words_of(server).options else "commands"
            assert f"<!-- words: {server} {kind} -->" in texts


@pytest.mark.parametrize("server", SERVERS)
def test_our_side_is_there(server: str) -> None:
    for row in (*words_of(server).options, *words_of(server).variables):
        assert row.ours in FLAGS | VARIABLES | {"–"}, row
        assert row.state != "same" or row.ours == row.word


def test_the_commands_of_llama_cpp_say_the_same() -> None:
    (theirs,) = documents.commands(LLAMA_CPP, "llama.cpp")
    (ours,) = documents.commands(LLAMA_CPP, "launches")
    check(parse(ServeConfig, ours[2:], {}))
    words = words_of("llama_cpp")
    meant = dict(words.aliases)
    ours_of = {row.word: row.ours for row in words.options}
    for flag, value in zip(theirs[1::2], theirs[2::2], strict=True):
        flag_here = ours_of[meant.get(flag, flag)]
        assert f"{flag_here} {value}".removeprefix("--model-id ") in " ".join(ours), flag


def test_the_routes_of_llama_cpp() -> None:
    apps = (create_app(), create_pooled_app())
    paths = [item for app in apps for item in app.openapi()["paths"].items()]
    served = {f"{method.upper()} {path}" for path, one in paths for method in one}
    table = rows(section(LLAMA_CPP, "Routes"))
    assert {bare(row[1]) for row in table} <= served | {"–"}
    assert all((bare(row[0]) in served) == (bare(row[0]) == bare(row[1])) for row in table)
