"""docs/reference is what `make reference` writes, and says what the code does."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest
from support.option_configs import Config, Positional

from docs.generate import tgi, variables
from docs.generate.markdown import cell
from docs.generate.option_page import default, names, option_tables, values
from docs.generate.pages import REFERENCE, pages
from launcher.bench.config import BenchConfig
from launcher.chat.config import ChatConfig
from launcher.clients.config import ClientConfig
from launcher.config import LauncherConfig
from launcher.doctor.config import DoctorConfig
from launcher.errors import LauncherError
from launcher.estimate.config import EstimateConfig
from launcher.models.config import ModelsConfig, PullConfig, RemoveConfig
from launcher.planning import commands
from launcher.planning.hardware import Hardware
from launcher.planning.memory import Estimate
from launcher.planning.plan import Endpoints, LaunchPlan
from model_server.config import DownloadConfig, ServeConfig
from model_server.quantize.config import QuantizeConfig
from router.api.errors import status_of
from router.api.openapi.answers import ERRORS
from router.config import RouterConfig
from router.errors import RouterError, StartupError
from wire.cli.options import Option, options_of
from wire.cli.parsing import parse

SOURCE = Path(__file__).parents[3] / "src"
CONFIGS = {
    "launcher.md": [LauncherConfig],
    "bench.md": [BenchConfig],
    "chat.md": [ChatConfig],
    "launch.md": [ClientConfig],
    "models.md": [ModelsConfig, PullConfig, RemoveConfig],
    "estimate.md": [EstimateConfig],
    "doctor.md": [DoctorConfig],
    "router.md": [RouterConfig],
    "model-server.md": [ServeConfig, DownloadConfig, QuantizeConfig],
}
VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|TERM")
NOT_VARIABLES = {"SC_CLK_TCK", "SC_PAGE_SIZE", "SC_PHYS_PAGES", "STRICT_SPREAD"}
"""Words of the same shape in modules that read the environment."""
OF_OTHER_PROGRAMS = {
    "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL", "ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL",
    "CLAUDE_CODE_DISABLE_1M_CONTEXT", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "CLAUDE_CODE_MAX_CONTEXT_TOKENS",
    "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_FOUNDRY", "CLAUDE_CODE_USE_VERTEX", "ENABLE_OLLAMA_API",
    "OPENAI_API_BASE_URL", "OPENAI_API_KEY",
}  # fmt: skip
"""Written into their settings."""
ALWAYS_THERE = {"LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"}
"""Handed to a child as they are, or set for it or for a library; no setting of ours."""


@pytest.fixture(name="pages", scope="module")
def made_pages() -> dict[str, str]:
    """Made here, not as tests are collected: they take seconds, and every process collects."""
    return pages()


@pytest.mark.parametrize("name", sorted(path.name for path in REFERENCE.iterdir()))
def test_the_committed_page_is_fresh(name: str, pages: dict[str, str]) -> None:
    assert (REFERENCE / name).read_text() == pages[name], f"docs/reference/{name} is stale: make reference"


def test_no_other_page_pretends_to_be_generated(pages: dict[str, str]) -> None:
    assert {path.name for path in REFERENCE.iterdir()} == set(pages)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_option_has_one_row(name: str, pages: dict[str, str]) -> None:
    rows = re.findall(r"^\| `(--[a-z-]+|[A-Z_]+)`.*\|$", pages[name].partition("## Variables of")[0], re.M)
    wanted = [opt.metavar if opt.positional else opt.flag for one in CONFIGS[name] for opt in options_of(one)]
    assert sorted(rows) == sorted(wanted)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_row_has_five_cells(name: str, pages: dict[str, str]) -> None:
    """A bar in a help text would shift them."""
    for line in pages[name].partition("## Variables of")[0].splitlines():
        if line.startswith(("| `-", "| `MODEL", "| `CLIENT")):
            assert len(re.split(r"(?<!\\)\|", line)) == 7, line


def test_ours_is_what_tgi_has_not(pages: dict[str, str]) -> None:
    for opt in options_of(LauncherConfig):
        row = next(line for line in pages["launcher.md"].splitlines() if line.startswith(f"| `{opt.flag}`"))
        assert ("ours)" not in row) == (opt.flag in tgi.LAUNCHER), row


def _option(config: type, name: str) -> Option:
    return next(opt for opt in options_of(config) if opt.name == name)


@pytest.mark.parametrize(
    ("name", "spelled", "value", "preset"),
    [
        ("max_batch_size", "`--max-batch-size`", "whole number from 0 to 1000", "–"),
        ("port", "`--port`, `-p`", "whole number from 0 to 65535", "`3000`"),
        ("ratio", "`--ratio`", "number", "`0.3`"),
        ("json_output", "`--json-output`, `-j`", "switch", "off"),
        ("convert", "`--convert`, `--no-convert`", "switch", "on"),
        ("sharded", "`--sharded`", "`true` or `false`", "–"),
        ("dtype", "`--dtype`", "`float16`, `bfloat16`", "–"),
        ("colour", "`--colour`", "`red`, `dark-blue`", "`red`"),
        ("origin", "`--origin`", "texts; the option may be repeated", "–"),
        ("graphs", "`--graphs`", "whole numbers; the option may be repeated, or one value cut at commas", "–"),
    ],
)
def test_an_option_in_words(name: str, spelled: str, value: str, preset: str) -> None:
    opt = _option(Config, name)
    assert (names(opt), values(opt), default(opt)) == (spelled, value, preset)


def test_an_argument_in_words() -> None:
    text = option_tables(Positional, lambda opt: "(ours)")
    assert "| `MODEL_ID` | – | text | required | m (ours). |" in text


def test_prose_in_a_table_keeps_its_signs() -> None:
    assert cell("a | b, x-<rank>, `-<rank>`\n and on") == "a \\| b, x-&lt;rank>, `-<rank>` and on"


def _words_of(module: Path) -> set[str]:
    """String constants of a module that reads the environment, if they look like the name of a variable."""
    text = module.read_text()
    if not re.search(r"\benviron\b|_environment\b|\benvironment=|in the environment of", text):
        return set()
    words = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    return {word for word in words if isinstance(word, str) and VARIABLE.fullmatch(word)}


def test_every_variable_that_the_code_names_is_described() -> None:
    named = set().union(*(_words_of(module) for module in SOURCE.rglob("*.py")))
    options = {opt.env for configs in CONFIGS.values() for one in configs for opt in options_of(one)}
    described = {one.name for one in variables.VARIABLES if one.in_code} - options
    found = named - NOT_VARIABLES - OF_OTHER_PROGRAMS - ALWAYS_THERE - options - set(variables.WITHOUT_EFFECT)
    assert found - described == set(), "describe them in docs/generate/variables.py"
    assert described - found == set(), "the code does not name them any more"


def test_a_variable_is_described_once() -> None:
    listed = [one.name for one in variables.VARIABLES] + [str(opt.env) for _, opt in variables.inherited()]
    assert len(listed) == len(set(listed))
    assert not set(listed) & {opt.env for opt in options_of(LauncherConfig)}


def _plan() -> LaunchPlan:
    return LaunchPlan(
        asked=LauncherConfig(model_id="demo"), model_id="demo", num_shard=1, on_gpu=False, max_input_tokens=None,
        max_batch_prefill_tokens=512, compute_type=None, hardware=Hardware(), info=None, task="generate",
        memory=Estimate(weights=None, cache_type=None, token=None, cache=None, tokens=None),
        endpoints=Endpoints(hostname="127.0.0.1", port=3000, uds_prefix="/run/x/shard", master_port=29500),
    )  # fmt: skip


@pytest.mark.parametrize(("child", "opt"), [pytest.param(*one, id=str(one[1].env)) for one in variables.inherited()])
def test_an_inherited_variable_reaches_its_process(child: str, opt: Option) -> None:
    value = {bool: "1" if opt.default is False else "0", int: "7", float: "7.5"}.get(opt.item, "/x")
    environ = {str(opt.env): value}
    plan = _plan()
    command = commands.router(plan, environ) if child == "router" else commands.shard(plan, 0, environ)
    config_type = RouterConfig if child == "router" else ServeConfig
    argv = list(command.argv[command.argv.index("-m") + 2 :])
    config = parse(config_type, argv if child == "router" else argv[1:], command.env)
    assert getattr(config, opt.name) != opt.default


def test_what_the_launcher_decides_is_not_inherited() -> None:
    environ = dict.fromkeys(commands.DECIDED, "9") | {"REQUEST_LOGPROBS": "0"}
    plan = _plan()
    router, shard = commands.router(plan, environ), commands.shard(plan, 0, environ)
    served = parse(RouterConfig, router.argv[router.argv.index("-m") + 2 :], router.env)
    assert (served.tokenizer_name, served.master_shard_uds_path) == ("demo", "/run/x/shard-0")
    assert (shard.env["RANK"], shard.env["WORLD_SIZE"]) == ("0", "1")
    with_logprobs = dataclasses.replace(plan, asked=dataclasses.replace(plan.asked, enable_prefill_logprobs=True))
    assert commands.shard(with_logprobs, 0, environ).env["REQUEST_LOGPROBS"] == "1"
    assert commands.router(with_logprobs, environ).env["REQUEST_LOGPROBS"] == "1"


def test_every_end_of_a_launch_is_named(pages: dict[str, str]) -> None:
    listed = set(re.findall(r"^\| `(\w+)` \|", pages["launcher.md"].partition("## Exit status")[2], re.M))
    assert listed == {kind.__name__ for kind in LauncherError.__subclasses__()}


def _kinds(kind: type[RouterError]) -> list[type[RouterError]]:
    return [kind, *(one for below in kind.__subclasses__() for one in _kinds(below))]


def test_every_refusal_is_listed() -> None:
    listed = {(status, name) for status, refusal in ERRORS.items() for name in refusal.texts}
    for kind in _kinds(RouterError):
        if "error_type" in vars(kind) and kind not in (RouterError, StartupError):
            status = status_of(kind.__new__(kind))
            assert (status, kind.error_type) in listed or status == 404, kind


def test_every_kind_of_value_is_linked_and_there(pages: dict[str, str]) -> None:
    text = pages["http.md"]
    headings = {line.removeprefix("### ").lower() for line in text.splitlines() if line.startswith("### ")}
    links = set(re.findall(r"\]\(#([a-z]+)\)", text))
    assert links <= headings and len(links) > 40


def test_the_whole_document_is_on_the_page(pages: dict[str, str]) -> None:
    text = pages["http.md"]
    for field in ("`max_new_tokens` | integer ≥ 1", "`top_p` | number > 0, ≤ 1", "`stop` | list of string, at most 4"):
        assert f"| {field} |" in text
    assert "any JSON" in text and '`"regex"`' in text
    assert "| `logit_bias` | object of number ≥ -100, ≤ 100 or list of `0` | – |" in text
