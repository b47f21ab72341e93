"""The pages of docs/reference and their content."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from docs.generate import tgi, variables
from docs.generate.http_page import http_page
from docs.generate.markdown import cell, code, page, table
from docs.generate.option_page import option_tables
from launcher import errors as launcher_errors
from launcher.batch.config import BatchConfig
from launcher.bench.config import BenchConfig
from launcher.chat.config import ChatConfig
from launcher.chat.conversation import COMMANDS
from launcher.chat.settings import DEFAULTS, PARAMETERS
from launcher.clients.config import ClientConfig
from launcher.config import LauncherConfig
from launcher.doctor.config import DoctorConfig
from launcher.estimate.config import EstimateConfig
from launcher.keys.config import KeysConfig
from launcher.models.config import ModelsConfig, PullConfig, RemoveConfig
from model_server.config import DownloadConfig, ServeConfig
from model_server.quantize.config import QuantizeConfig
from router.config import RouterConfig
from wire.cli import sizes
from wire.cli.options import Option
from wire.exit_status import LOST_PEER, MISSING_PEER, STALLED

REFERENCE = Path(__file__).parents[1] / "reference"

_RULES = """\
`--option value` and `--option=value` are the same. The command line wins over the variable, the variable over the
config file, that over the default. Options cannot be abbreviated; an option that is not a list may be given once.
Switches take no value on the command line; in a variable they are `1`, `true`, `yes`, `on` or `0`, `false`, `no`,
`off`. An empty variable counts as unset. A value that cannot be parsed ends the process with status 2 and a line that
names the value, the option or variable, and the reason."""
_CONFIG_FILE = """\
`--config launcher.yaml` reads options from a YAML file: their names, with `-` or `_`, and their values, several of
them as a list. Values are taken as they are written, paths are relative to the working folder. An unknown name ends
the start with status 2, as it does on the command line. A variable wins over the file, those of an image (PORT) too."""
_CONFIG_EXAMPLE = """\
    model-id: meta-llama/Llama-3.2-1B-Instruct
    max-total-tokens: 8k
    cors-allow-origin: [https://a.example, https://b.example]"""
_OURS = "Options that TGI lacks are marked (ours); where TGI reads the variable and has no option, (option ours)."
_SEE_RULES = "How options are spelled: [launcher.md](launcher.md)."


def pages() -> dict[str, str]:
    """File name → text."""
    return {
        "launcher.md": _launcher(),
        "batch.md": _batch(),
        "bench.md": _bench(),
        "chat.md": _chat(),
        "launch.md": _launch(),
        "keys.md": _keys(),
        "models.md": _models(),
        "estimate.md": _estimate(),
        "doctor.md": _doctor(),
        "router.md": _router(),
        "model-server.md": _model_server(),
        "http.md": http_page(),
    }


def _mark(flags: frozenset[str], variables_of: frozenset[str]) -> Callable[[Option], str]:
    def mark(opt: Option) -> str:
        if opt.metavar in flags if opt.positional else opt.flag in flags:
            return ""
        return "(option ours)" if opt.env in variables_of else "(ours)"

    return mark


def _launcher() -> str:
    other = [f"`{name}` ({cell(reason)})" for name, reason in variables.WITHOUT_EFFECT.items()]
    return page(
        "# launcher",
        "`launcher [OPTIONS]`, also `text-generation-launcher`: starts, watches and stops the shards and the router. "
        "`launcher serve MODEL [OPTIONS]` does the same, with the model instead of `--model-id`. "
        "[`launcher chat`](chat.md) and [`launcher bench`](bench.md) have pages of their own. Tab completes commands, "
        "options and values: "
        "[shell completion](../install.md#shell-completion).",
        _RULES,
        sizes.MEANING,
        _CONFIG_FILE,
        _CONFIG_EXAMPLE,
        _OURS,
        option_tables(LauncherConfig, _mark(frozenset(tgi.LAUNCHER), tgi.VARIABLES)),
        "## Variables of router and shards",
        "The launcher has no option for these. It passes its environment on, so a variable that is set for the "
        "launcher reaches the process that reads it. The values are those of the options in [router.md](router.md) and "
        "[model-server.md](model-server.md).",
        variables.inherited_table(),
        "## Other variables",
        variables.variable_table(),
        "Variables of TGI without effect here: " + "; ".join(other) + ".",
        "## Exit status",
        table(("Status", "Meaning"), _statuses()),
        'With status 1 the last line on standard error is `Error: NAME("sentence")`:',
        table(("Name", "Meaning"), _errors()),
    )


def _statuses() -> list[tuple[str, str]]:
    return [
        ("0", "the server stopped after a signal; also `--help`, `--version`, and `--env` without a model"),
        ("1", "the launch failed or a child process exited; see below"),
        ("2", "the command line or a variable could not be parsed"),
        ("128 + n", "a second signal n arrived while the server was stopping: everything was killed"),
    ]


def _errors() -> list[tuple[str, str]]:
    lines = re.findall(r"^[├└]── (\w+) +(.+)$", launcher_errors.__doc__ or "", re.M)
    return [(code(name), cell(meaning)) for name, meaning in lines]


def _bench() -> str:
    return page(
        "# launcher bench",
        "`launcher bench [OPTIONS]`: sends load to a server that speaks TGI's API or OpenAI's, and reports its "
        "throughput and latencies; [bench.md](../bench.md) shows how. It replaces TGI's `text-generation-benchmark`, "
        "which drives a shard directly.",
        _SEE_RULES,
        option_tables(BenchConfig, lambda opt: ""),
    )


def _chat() -> str:
    settings = ", ".join(f"`{name}`" for name in PARAMETERS)
    defaults = ", ".join(f"`{name}` {value}" for name, value in DEFAULTS.items())
    return page(
        "# launcher chat",
        "`launcher chat [MODEL] [OPTIONS]`: a chat in the terminal with a server that runs already (`--url`), or with "
        "MODEL, which is served on a free port of this machine as long as the chat lasts. Options for serving it "
        "follow `--`: `launcher chat demo -- --num-shard 2`.",
        "Answers are shown as they come, and each prompt is sent with the conversation before it. A terminal shows "
        "Markdown, and reasoning dimmed before the answer. Below each answer are its tokens and their rate. Ctrl-C "
        "stops an answer; at an empty prompt it ends the chat.",
        table(["Command", "Meaning"], [[code(usage), cell(meaning)] for usage, meaning in COMMANDS.items()]),
        f"`/set` knows {settings}. Where a model of this server brings no sampling parameters of its own, the chat "
        f"takes {defaults} and says so; another server uses its own defaults.",
        "A model without a chat template is refused before the first prompt.",
        "Where standard input or output is not a terminal, every line of the input is a prompt, commands are not read, "
        "and only the answers are written: `launcher chat demo < prompts.txt > answers.txt`. The first prompt "
        "without an answer ends the chat with status 1 and an error.",
        _SEE_RULES,
        option_tables(ChatConfig, lambda opt: ""),
    )


def _launch() -> str:
    return page(
        "# launcher launch",
        "`launcher launch CLIENT [OPTIONS]`: asks a running server for its model and writes what CLIENT needs for it "
        "into the settings of that program. It shows the change and asks first, keeps a copy of the file that was "
        "there, and leaves other settings as they are; `--print` writes nothing. Open WebUI has no file of settings: "
        "its variables are printed. [integrations.md](../integrations.md) has these programs and others.",
        _SEE_RULES,
        option_tables(ClientConfig, lambda opt: ""),
        "Exit status: 0, or 1 with `error: …`; 1 too where the question is not answered with yes.",
    )


def _models() -> str:
    return page(
        "# launcher models, pull and rm",
        "The models that are downloaded already: `launcher models` lists them, `launcher pull MODEL` downloads one, "
        "`launcher rm MODEL` removes one. A launch downloads what is missing by itself; a pull does it beforehand, and "
        "continues where the last one was interrupted.",
        _SEE_RULES,
        "## launcher models",
        option_tables(ModelsConfig, lambda opt: ""),
        "## launcher pull",
        option_tables(PullConfig, lambda opt: ""),
        "## launcher rm",
        option_tables(RemoveConfig, lambda opt: ""),
        "Exit status: 0, or 1 with `error: …`; 1 too where the question before a removal is not answered with yes.",
    )


def _batch() -> str:
    return page(
        "# launcher batch",
        "`launcher batch IN OUT --url URL` or `launcher batch IN OUT --model-id MODEL [-- OPTIONS]`: answers a file of "
        "requests in the form of OpenAI's Batch API, with a server that runs or with one that is started for it "
        "([running-for-others.md](../running-for-others.md#batches)).",
        _SEE_RULES,
        option_tables(BatchConfig, lambda opt: ""),
        "Exit status: 0 if every request has an answer with status 200, 1 if not, 2 if nothing was sent as a file or "
        "an option is wrong, 130 after Ctrl-C.",
    )


def _keys() -> str:
    return page(
        "# launcher keys",
        "`launcher keys new NAME`: makes an API key. Standard output gets its row for `--keys-file`, which has the "
        "key's SHA-256 only; standard error gets the key, which is kept nowhere "
        "([running-for-others.md](../running-for-others.md)).",
        _SEE_RULES,
        option_tables(KeysConfig, lambda opt: ""),
        "Exit status: 0, or 1 with `error: …` for a name that a file may not have.",
    )


def _estimate() -> str:
    return page(
        "# launcher estimate",
        "`launcher estimate MODEL [OPTIONS]`: what the weights and the KV cache of a model take, and how many tokens "
        "and requests fit, for each number of shards, with plain and 8-bit weights and cache. Of a model on the hub "
        "only the small JSON files and the sizes of the others are asked for. What the activations take is not "
        "counted; a server measures it when it starts.",
        _SEE_RULES,
        option_tables(EstimateConfig, lambda opt: ""),
        "Exit status: 0, or 1 with `error: …` for a model that cannot be found or served.",
    )


def _doctor() -> str:
    return page(
        "# launcher doctor",
        "`launcher doctor [OPTIONS]`: looks at the processor, the memory, the GPUs and their driver, torch, the C++ "
        "operators, the compiler, the folder of models, the port and the hub. Each line is `ok`, `warning` or `error`, "
        "with the command that fixes it. It waits for the hub for five seconds at most.",
        _SEE_RULES,
        option_tables(DoctorConfig, lambda opt: ""),
        "Exit status: 0 if this machine can serve, 1 if an error prevents it.",
    )


def _router() -> str:
    return page(
        "# router",
        "`router [OPTIONS]`, also `text-generation-router`: the HTTP server and the queue. The launcher starts it; "
        "alone it needs a shard's socket. `router print-schema` prints the OpenAPI document.",
        _SEE_RULES + " " + _OURS,
        option_tables(RouterConfig, _mark(tgi.ROUTER, tgi.VARIABLES)),
        "Exit status: 0 after a signal to stop, 1 with `Error: …` on standard error, 2 for a command line that cannot "
        f"be parsed, {STALLED} when the shards have work and do not answer for `--max-step-seconds`.",
    )


def _model_server() -> str:
    return page(
        "# model-server",
        "`model-server COMMAND …`, also `text-generation-server`: one shard, and the download of a model. The launcher "
        "runs both.",
        _SEE_RULES + " " + _OURS,
        "## serve",
        "`model-server serve MODEL_ID [OPTIONS]`: loads the model and serves `generate.v3` on a unix socket.",
        option_tables(ServeConfig, _mark(tgi.SERVE, tgi.SHARD_VARIABLES)),
        f"Exit status: 0 after a signal to stop, {LOST_PEER} if the shard exited only because another one did, "
        f"{MISSING_PEER} if another one did not connect, 1 for every other failure, 2 for a command line "
        "that cannot be parsed.",
        "## download-weights",
        "`model-server download-weights MODEL_ID [OPTIONS]`: fills the local hub cache.",
        option_tables(DownloadConfig, _mark(tgi.DOWNLOAD, frozenset())),
        "## quantize",
        "`model-server quantize MODEL_ID OUTPUT_DIR [OPTIONS]`: rounds the matrices of a checkpoint by GPTQ.",
        option_tables(QuantizeConfig, _mark(tgi.QUANTIZE, frozenset())),
    )
