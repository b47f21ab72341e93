"""docs/embeddings.md and docs/migrating-from-tei.md against the code: routes, bodies, options, metrics."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from support import documents
from support.documents import bare, rows, section

from launcher.config import LauncherConfig
from launcher.config_checks import check
from router.api.embeddings import schema
from router.declared_metrics import DECLARED, POOLING
from router.schemas.base import Body
from router.server.pooled import MAX_CLIENT_BATCH_SIZE, MAX_CONCURRENT_REQUESTS
from router.server.pooled_app import create_pooled_app
from wire.cli.options import options_of
from wire.cli.other_servers.words import words_of
from wire.cli.parsing import parse

PAGE = documents.read("docs/embeddings.md")
TEI = documents.read("docs/migrating-from-tei.md")
BODIES: dict[str, type[Body]] = {
    "/embed": schema.EmbedBody, "/v1/embeddings": schema.EmbeddingsBody, "/similarity": schema.SimilarityBody,
    "/tokenize": schema.TokenizeTextsBody, "/rerank": schema.RerankBody, "/v2/rerank": schema.DocumentsBody,
    "/score": schema.ScoreBody, "/predict": schema.PredictBody, "/classify": schema.ClassifyBody,
}  # fmt: skip
SERVED = {
    f"{method.upper()} {path}" for path, one in create_pooled_app().openapi()["paths"].items() for method in one
} | {"GET /openapi.json", "GET /api-doc/openapi.json"}
OPTIONS = {opt.flag: opt for opt in options_of(LauncherConfig)}


def test_the_bodies_of_the_page_are_taken() -> None:
    commands = [shlex.split(one.replace("\\\n", " ")) for one in re.findall(r"^curl .+?(?=\n```)", PAGE, re.M | re.S)]
    asked = {words[1].partition(":3000")[2]: words[words.index("-d") + 1] for words in commands}
    assert asked.keys() == BODIES.keys()
    for path, body in asked.items():
        assert set(json.loads(body)) <= BODIES[path].field_names
        BODIES[path].model_validate_json(body)


def test_the_routes_of_the_page_are_those() -> None:
    paths = {path for _, path in (one.split() for one in SERVED)}
    named = {path for row in rows(section(PAGE, "Routes")) for path in re.findall(r"`(/[^`]*)`", row[1])}
    assert named <= paths
    assert {path for path in paths if "{" not in path} - named <= {"/version", "/ping", "/api-doc/openapi.json"}


def test_the_fields_of_the_page_are_read() -> None:
    known = {name for body in (*BODIES.values(), schema.TokensBody) for name in body.field_names}
    for row in rows(section(PAGE, "What a request may say")):
        assert set(bare(row[0]).split(", ")) <= known


def test_the_options_of_the_page_are_there() -> None:
    for row in rows(section(PAGE, "Options")):
        option, told = OPTIONS[bare(row[0])], bare(row[1])
        if told.isdigit():
            assert option.default == int(told)
    assert set(re.findall(r"`(--[a-z-]+)", PAGE)) <= OPTIONS.keys()
    assert f"{MAX_CLIENT_BATCH_SIZE} for these models" in PAGE and f"{MAX_CONCURRENT_REQUESTS} for these models" in PAGE


def test_the_metrics_are_those() -> None:
    for text in (PAGE, TEI):
        assert set(re.findall(r"`(t(?:e|gi)_[a-z_]+)`", text)) <= DECLARED.keys() | POOLING.keys()
    table = rows(section(TEI, "Metrics"))
    assert {bare(row[1]) for row in table} == {name for name in POOLING if name.startswith("te_")}


def test_the_commands_say_the_same() -> None:
    (theirs,) = documents.commands(TEI, "tei")
    (ours,) = documents.commands(TEI, "launches")
    check(parse(LauncherConfig, ours[1:], {}))
    ours_of = {row.word: row.ours for row in words_of("tei").options}
    for flag, value in zip(theirs[1::2], theirs[2::2], strict=True):
        assert f"{ours_of[flag]} {value}" in " ".join(ours), flag


@pytest.mark.parametrize("row", rows(section(TEI, "Routes")), ids=lambda row: bare(row[0]))
def test_our_route_is_there(row: list[str]) -> None:
    theirs, ours, state = bare(row[0]), bare(row[1]), row[2]
    assert (ours == "–") == (state == "none") == (theirs not in SERVED)
    assert ours in SERVED | {"–"}


def test_every_state_is_explained() -> None:
    states = {bare(row[0]) for row in rows(TEI.partition("## The command")[0])}
    used = {row[2] for heading in ("Routes", "Metrics") for row in rows(section(TEI, heading))}
    used |= {row[-2] for row in rows(section(TEI, "Options"))}
    assert used == states
