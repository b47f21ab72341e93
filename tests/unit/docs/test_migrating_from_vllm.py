"""Our side of each row of docs/migrating-from-vllm.md against the code."""

from __future__ import annotations

import re

import pytest
from pydantic import BaseModel
from starlette.testclient import TestClient
from support import documents
from support.documents import bare, rows, section

from docs.generate import variables
from launcher.bench.config import BenchConfig
from launcher.config import LauncherConfig
from launcher.config_checks import check
from router.api.chat.schema import ChatBody, ChatCompletion, Usage
from router.api.completions.schema import Completion, CompletionBody
from router.declared_metrics import DECLARED
from router.schemas.openai import StreamOptions
from router.schemas.other_fields import HARMLESS, REFUSED
from router.server.app import create_app
from router.server.pooled_app import create_pooled_app
from wire.cli.options import options_of
from wire.cli.parsing import parse
from wire.cli.spelling import spell

TEXT = documents.read("docs/migrating-from-vllm.md")
LAUNCHER = {opt.flag: opt for opt in options_of(LauncherConfig)}
OPTIONS = [row for row in rows(section(TEXT, "Options")) if row[0].startswith("`--")]
VARIABLES = [row for row in rows(section(TEXT, "Options")) if row[0].startswith("`VLLM")]
FIELDS = rows(section(TEXT, "Fields of a request"))
BODIES: dict[str, type[BaseModel]] = {"chat": ChatBody, "text": CompletionBody}
DEFAULTS = {
    "--max-num-queued-reqs": "128", "--gpu-memory-utilization": "1", "--port": "3000",
    "--shutdown-timeout": "90", "--host": "0.0.0.0",
}  # fmt: skip
"""Rows that name our default."""


def _variables() -> set[str]:
    known = {one.name for one in variables.VARIABLES} | {str(opt.env) for _, opt in variables.inherited()}
    return known | {str(opt.env) for opt in LAUNCHER.values()}


def test_every_state_is_explained() -> None:
    states = {bare(row[0]) for row in rows(TEXT.partition("## The command")[0])}
    used = {row[-2] for table in (OPTIONS, VARIABLES, FIELDS) for row in table}
    used |= {row[-2] for heading in ("Routes", "Metrics") for row in rows(section(TEXT, heading))}
    assert used == states


@pytest.mark.parametrize("row", OPTIONS, ids=lambda row: bare(row[0]))
def test_our_option_is_there(row: list[str]) -> None:
    spelled, _, ours, state, meaning = (bare(cell) for cell in row)
    theirs = spelled.partition(",")[0]
    if ours == "–":
        assert state in ("none", "always on")
        return
    assert ours in LAUNCHER or ours in _variables()
    assert (state == "same") <= (theirs == ours)
    if (preset := DEFAULTS.get(theirs)) is not None:
        assert preset in meaning and spell(LAUNCHER[ours].default) == preset


def test_options_in_the_text_are_there() -> None:
    ours = {opt.flag for opt in options_of(BenchConfig)} | set(LAUNCHER)
    theirs = {spelling for row in OPTIONS for spelling in bare(row[0]).split(", ")}
    named = set(re.findall(r"`(--[a-z-]+)`", TEXT)) - theirs
    assert named <= ours


@pytest.mark.parametrize("row", VARIABLES, ids=lambda row: bare(row[0]))
def test_our_variable_is_there(row: list[str]) -> None:
    assert bare(row[1]) in _variables() | {"–"}


def test_the_commands_say_the_same() -> None:
    (theirs,) = documents.commands(TEXT, "vllm")
    (ours,) = documents.commands(TEXT, "launches")
    config = parse(LauncherConfig, ours[1:], {})
    check(config)
    given = dict(zip(theirs[3::2], theirs[4::2], strict=True))
    assert config.model_id == theirs[2]
    map_of = {bare(row[0]).partition(",")[0]: bare(row[2]) for row in OPTIONS}
    for flag, value in given.items():
        assert f"{map_of[flag]} {value}" in " ".join(ours), flag


def test_our_route_is_there() -> None:
    app = create_app()
    paths = [item for one in (app, create_pooled_app()) for item in one.openapi()["paths"].items()]
    served = {(method.upper(), path) for path, one in paths for method in one}
    with TestClient(app, raise_server_exceptions=False) as client:
        for row in rows(section(TEXT, "Routes")):
            method, path = bare(row[0]).split()
            ours = bare(row[1])
            if ours == "–":
                answer = client.request(method, path, json={} if method == "POST" else None)
                assert answer.status_code == 404, path
                if "names the chat route" in row[3]:
                    assert "/v1/chat/completions" in answer.text
            else:
                assert tuple(ours.split()) in served
                assert (row[2] == "same") <= (bare(row[0]) == ours)


def test_what_has_no_field_is_refused_by_name_or_harmless() -> None:
    refused = {bare(row[0]) for row in FIELDS if bare(row[2]) == "none"}
    for family in ("chat", "completions"):
        assert refused and refused <= REFUSED[family].keys() | HARMLESS[family]


@pytest.mark.parametrize("row", FIELDS, ids=lambda row: bare(row[0]))
def test_a_field_is_read_where_it_is_said(row: list[str]) -> None:
    field, where, state, _ = (bare(cell) for cell in row)
    routes = {name for name, body in BODIES.items() if field in body.model_fields}
    assert routes == ({*where.split(", ")} - {"–"})
    assert (state == "none") == (not routes)


@pytest.mark.parametrize(
    ("flag", "bound"),
    [("--max-client-batch-size", 4)],
)
def test_the_bounds_are_those(flag: str, bound: int) -> None:
    assert f"`{flag}` ({bound})" in TEXT and LAUNCHER[flag].default == bound


def test_what_answers_lack() -> None:
    sentence = section(TEXT, "Fields of a request").partition("Answers lack ")[2].partition(".\n")[0]
    lacking = {name.rpartition(".")[2] for name in re.findall(r"`([\w.]+)`", sentence)}
    has = set(Usage.model_fields)
    for model in (ChatCompletion, Completion):
        has |= set(model.model_fields) | set(model.model_fields["choices"].annotation.__args__[0].model_fields)  # type: ignore[union-attr]
    assert len(lacking) == 3 and not lacking & has
    assert set(StreamOptions.model_fields) == {"include_usage", "continuous_usage_stats"}


def test_our_metric_is_there() -> None:
    for row in rows(section(TEXT, "Metrics")):
        ours = bare(row[1])
        assert ours in DECLARED or (ours, row[2]) == ("–", "none"), row
        for label, value in re.findall(r'`(\w+)="(\w+)"', row[3]):
            assert value in dict(DECLARED[ours].labels)[label]
        for name in re.findall(r"tgi_\w+", row[3]):
            assert name in DECLARED
