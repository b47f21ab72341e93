"""Each row of docs/migrating-from-tgi.md against TGI's list and against the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from starlette.testclient import TestClient
from support import documents
from support.documents import bare, rows, section

from docs.generate import tgi, variables
from docs.generate.option_page import default
from launcher import errors as launcher_errors
from launcher.config import DEFAULT_MODEL_ID, LauncherConfig
from launcher.config_checks import check
from launcher.errors import ArgumentValidation
from model_server.config import DownloadConfig, ServeConfig
from router.api.openapi.answers import ERRORS
from router.api.platforms import kserve
from router.config import RouterConfig
from router.declared_metrics import DECLARED
from router.server.app import create_app
from router.server.startup import (
    CPU_DEFAULT_STEP_TOKENS,
    CPU_STEP_TOKENS,
    GPU_DEFAULT_STEP_TOKENS,
    GPU_STEP_TOKENS,
)
from wire.cli.commands import run_command
from wire.cli.options import Option, options_of
from wire.cli.parsing import parse

TEXT = documents.read("docs/migrating-from-tgi.md")
STATES = {"same", "better", "different", "not yet"}
OPTIONS = {opt.flag: opt for opt in options_of(LauncherConfig)}
FLAGS = rows(section(TEXT, "Options of the launcher"))
EXAMPLES: dict[str, str] = {
    "--model-id": "demo", "--revision": "main", "--validation-workers": "4", "--sharded": "false", "--num-shard": "2",
    "--quantize": "awq", "--speculate": "2", "--dtype": "float32", "--kv-cache-dtype": "fp8_e5m2",
    "--max-concurrent-requests": "7", "--max-best-of": "7", "--max-stop-sequences": "7", "--max-top-n-tokens": "7",
    "--max-input-tokens": "7", "--max-input-length": "7", "--max-total-tokens": "7", "--waiting-served-ratio": "0.7",
    "--max-batch-prefill-tokens": "7", "--max-batch-total-tokens": "7", "--max-waiting-tokens": "7",
    "--max-batch-size": "7", "--cuda-graphs": "1,2", "--hostname": "127.0.0.1", "--port": "8080",
    "--prometheus-port": "9001", "--shard-uds-path": "/run/shard", "--master-addr": "127.0.0.1",
    "--master-port": "29501", "--huggingface-hub-cache": "/data", "--weights-cache-override": "/data",
    "--cuda-memory-fraction": "0.5", "--rope-scaling": "linear", "--rope-factor": "2",
    "--otlp-endpoint": "http://127.0.0.1:4317", "--otlp-service-name": "x", "--cors-allow-origin": "http://a",
    "--api-key": "secret", "--watermark-gamma": "0.4", "--watermark-delta": "1", "--ngrok-authtoken": "x",
    "--ngrok-edge": "x", "--tokenizer-config-path": __file__, "--max-client-batch-size": "7", "--lora-adapters": "a",
    "--usage-stats": "off", "--payload-limit": "7", "--graceful-termination-timeout": "7",
}  # fmt: skip
"""A value of each option that is no switch."""


def _argv(opt: Option) -> list[str]:
    # The two words about the tunnel mean nothing without its switch.
    more = ["--ngrok"] if opt.flag.startswith("--ngrok-") else []
    return [opt.flag, *more] if opt.is_switch else [opt.flag, EXAMPLES[opt.flag], *more]


def test_every_flag_of_tgi_has_a_row() -> None:
    assert [bare(row[0]) for row in FLAGS] == list(tgi.LAUNCHER) and len(FLAGS) == 54


def test_every_state_is_one_of_four() -> None:
    assert [bare(row[0]) for row in rows(TEXT.partition("## The command")[0])] == [
        "same", "better", "different", "not yet",
    ]  # fmt: skip
    for heading, column in (
        ("Options of the launcher", 3), ("Variables without an option", 1), ("Routes", 3), ("Refusals", 2),
        ("Metrics", 3), ("Logs and exits", 3),
    ):  # fmt: skip
        for row in rows(section(TEXT, heading)):
            assert row[column] in STATES and row[-1].strip(), row


@pytest.mark.parametrize("row", FLAGS, ids=lambda row: bare(row[0]))
def test_the_defaults_are_those(row: list[str]) -> None:
    flag, theirs, ours, state, _ = (bare(cell) for cell in row)
    opt = OPTIONS[flag]
    of_tgi = tgi.LAUNCHER[flag].default
    assert theirs == ("off" if opt.is_switch else of_tgi or "–")
    assert ours == (DEFAULT_MODEL_ID if flag == "--model-id" else bare(default(opt)))
    if state == "same":
        assert theirs == ours


@pytest.mark.parametrize("flag", tgi.LAUNCHER)
def test_the_flag_is_spelled_as_in_tgi(flag: str) -> None:
    opt, theirs = OPTIONS[flag], tgi.LAUNCHER[flag]
    assert opt.env == (None if flag == "--env" else flag.removeprefix("--").upper().replace("-", "_"))
    assert (opt.short or "") == theirs.short
    assert opt.is_switch == (theirs.default == "false")
    if theirs.choices and opt.item is not bool:
        assert set(theirs.choices) <= set(opt.choices)


@pytest.mark.parametrize("row", FLAGS, ids=lambda row: bare(row[0]))
def test_what_is_not_yet_is_refused_and_the_rest_is_not(row: list[str]) -> None:
    opt = OPTIONS[bare(row[0])]
    argv = _argv(opt)
    config = parse(LauncherConfig, argv, {})
    if row[3] == "not yet":
        with pytest.raises(ArgumentValidation, match="not served yet"):
            check(config)
    else:
        check(config)
    if opt.env and "--ngrok" not in argv:
        assert parse(LauncherConfig, [], {opt.env: "true" if opt.is_switch else argv[1]}) == config


@pytest.mark.parametrize("name", ["docs/migrating-from-tgi.md", "docs/migrating-from-vllm.md"])
def test_the_bounds_of_a_step_are_those(name: str) -> None:
    lines = documents.read(name).splitlines()
    row = next(line for line in lines if line.startswith("| `--max-") and "`--max-batch-prefill-tokens` |" in line)
    for usual, most in ((CPU_DEFAULT_STEP_TOKENS, CPU_STEP_TOKENS), (GPU_DEFAULT_STEP_TOKENS, GPU_STEP_TOKENS)):
        assert f"at most {usual}" in row and f"{most} " in row
    assert f"{CPU_STEP_TOKENS} while there is a backlog" in row


def test_every_variable_of_tgi_has_a_row() -> None:
    listed = {bare(row[0]): row[1] for row in rows(section(TEXT, "Variables without an option"))}
    assert set(listed) == tgi.VARIABLES
    read = {one.name for one in variables.VARIABLES} | {opt.env for _, opt in variables.inherited()}
    read |= {opt.env for opt in OPTIONS.values()}
    for name, state in listed.items():
        assert (name in read) != (name in variables.WITHOUT_EFFECT), name
        assert name in read or state == "different", name


def _routes(*, with_kserve: bool) -> set[tuple[str, str]]:
    app = create_app()
    if with_kserve:
        app.include_router(kserve.routes)
    found: set[tuple[str, str]] = set()
    for path, operations in _all_operations(app):
        found |= {(method, re.sub(r":path", "", path)) for method in operations}
    return found


def _all_operations(app: Any) -> Iterator[tuple[str, set[str]]]:
    schema = app.openapi()
    for path, operations in schema["paths"].items():
        yield path, {method.upper() for method in operations}
    for route in app.routes:
        if getattr(route, "path", "") in ("/docs", app.openapi_url) and getattr(route, "methods", None):
            yield route.path, set(route.methods) - {"HEAD"}


def _listed_routes() -> dict[tuple[str, str], list[str]]:
    listed = {}
    for row in rows(section(TEXT, "Routes")):
        method, path = bare(row[0]).split()
        listed[method, path] = row
    return listed


def test_every_route_of_tgi_has_a_row_and_is_served() -> None:
    listed = _listed_routes()
    assert set(listed) == set(tgi.ROUTES)
    always, with_kserve = _routes(with_kserve=False), _routes(with_kserve=True)
    for route, row in listed.items():
        assert bare(row[1]) == (tgi.ROUTES[route] or "open"), route
        assert route in with_kserve, route
        assert (route not in always) == ("KSERVE_API=true" in row[2]), route
        assert row[3] != "same" or bare(row[1]) == bare(row[2]), route


def test_the_key_is_demanded_where_it_is_said() -> None:
    app = create_app(api_key="secret")
    app.include_router(kserve.routes)
    with TestClient(app, raise_server_exceptions=False) as client:
        for (method, path), row in _listed_routes().items():
            answer = client.request(method, path.format(name="m", version="1"), json={} if method == "POST" else None)
            assert (answer.status_code == 401) == bare(row[2]).startswith("key"), (method, path)


def test_every_kind_of_refusal_has_a_row() -> None:
    text = section(TEXT, "Refusals")
    listed = {bare(row[0]): int(row[1]) for row in rows(text)}
    assert listed == tgi.ERRORS
    ours = {name: status for status, refusal in ERRORS.items() for name in refusal.texts}
    for name, status in listed.items():
        assert ours[name] == status
    new = {name: int(status) for name, status in re.findall(r"`(\w+)` (\d{3})", text)}
    assert {name: status for name, status in ours.items() if name not in listed}.items() <= new.items()
    with TestClient(create_app(), raise_server_exceptions=False) as client:
        for name, answer in (("not_found", client.get("/x")), ("method_not_allowed", client.put("/generate"))):
            assert (answer.json()["error_type"], answer.status_code) == (name, new[name])


def test_every_metric_of_tgi_has_a_row() -> None:
    listed = {bare(row[0]): row for row in rows(section(TEXT, "Metrics"))}
    assert set(listed) == set(tgi.METRICS)
    for name, (kind, labels) in tgi.METRICS.items():
        _, theirs, ours, state, _ = listed[name]
        assert theirs == kind
        assert ours == (DECLARED[name].kind if name in DECLARED else "–")
        if name in DECLARED:
            one = DECLARED[name]
            assert set(labels) <= {value for _, values in one.labels for value in values}, name
            assert state != "same" or kind == one.kind


def test_the_ends_of_a_launch() -> None:
    ours = {kind.__name__ for kind in launcher_errors.LauncherError.__subclasses__()}
    assert set(tgi.EXITS) - ours == {"ShardDisconnected"} and ours - set(tgi.EXITS) == {"NodeLost", "NodeFailed"}
    assert "the same names except `ShardDisconnected`, and `NodeLost`" in TEXT
    assert ArgumentValidation("a").report() == 'Error: ArgumentValidation("a")'


def test_a_wrong_command_line_ends_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert "| a wrong command line | status 2 | status 2 | same |" in TEXT
    assert run_command(LauncherConfig, lambda config: 0, prog="launcher", argv=["--no-such"]) == 2
    assert "--no-such" in capsys.readouterr().err


def test_the_texts_that_scrapers_look_for_are_written() -> None:
    row = next(row for row in rows(TEXT) if row[0] == "texts that scrapers look for")
    packages = (documents.ROOT / "src" / name for name in ("launcher", "router"))
    source = "".join(path.read_text() for package in packages for path in package.rglob("*.py"))
    words = re.findall(r"`([^`]+)`", row[1])
    assert len(words) == 4
    for word in words:
        assert f'"{word}"' in source, word


def test_every_command_is_understood_and_the_same_for_both() -> None:
    configs = []
    for words in documents.commands(TEXT, "launches"):
        image = [index for index, word in enumerate(words) if word.startswith(("text-generation", "tercet"))]
        config = parse(LauncherConfig, words[image[0] + 1 :], {})
        check(config)
        configs.append(config)
    assert len(configs) == 3 and configs[1] == configs[2]


def test_the_chart() -> None:
    chart = yaml.safe_load(documents.block(TEXT, "chart"))
    environ = {one["name"]: one["value"] for one in chart["env"] if "value" in one}
    config = parse(LauncherConfig, chart["args"], environ)
    check(config)
    assert set(environ) <= {opt.env for opt in OPTIONS.values()}
    assert config.port == chart["ports"][0]["containerPort"]
    assert chart["terminationGracePeriodSeconds"] >= config.graceful_termination_timeout + 15
    paths = {chart[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {("GET", path) for path in paths} <= _routes(with_kserve=False)


TGI_SHARD = """serve /data/model --uds-path /tmp/text-generation-server --logger-level INFO --json-output
    --trust-remote-code --sharded --dtype float16 --revision main --otlp-endpoint http://127.0.0.1:4317
    --otlp-service-name text-generation-inference.router --max-input-tokens 4096"""
TGI_DOWNLOAD = """download-weights model --extension .safetensors --logger-level INFO --json-output --revision main
    --trust-remote-code --merge-lora"""
TGI_ROUTER = """--max-client-batch-size 4 --max-concurrent-requests 128 --max-best-of 2 --max-stop-sequences 4
    --max-top-n-tokens 5 --max-batch-prefill-tokens 4096 --waiting-served-ratio 0.3 --max-waiting-tokens 20
    --validation-workers 2 --hostname 0.0.0.0 --port 3000 --prometheus-port 9000
    --master-shard-uds-path /tmp/text-generation-server-0 --tokenizer-name model --payload-limit 2000000
    --max-input-tokens 4096 --max-total-tokens 8192 --usage-stats on --disable-grammar-support
    --max-batch-total-tokens 16000 --max-batch-size 8 --revision main --trust-remote-code --json-output
    --otlp-service-name text-generation-inference.router --cors-allow-origin http://a --api-key secret"""


def test_what_tgis_launcher_passes_is_understood() -> None:
    parse(RouterConfig, TGI_ROUTER.split(), {})
    parse(ServeConfig, TGI_SHARD.split()[1:], {})
    parse(DownloadConfig, TGI_DOWNLOAD.split()[1:], {})
    assert {opt.flag for opt in options_of(RouterConfig)} >= tgi.ROUTER
    for flags, config_type in ((tgi.SERVE, ServeConfig), (tgi.DOWNLOAD, DownloadConfig)):
        theirs = {flag for flag in flags if flag.startswith("--")}
        assert theirs <= {opt.flag for opt in options_of(config_type)}
