"""Environment variables without an option: read by our code by name, or by a library that we use.

A test looks for variables that the code reads and this table lacks.
"""

from __future__ import annotations

from dataclasses import dataclass

from docs.generate import tgi
from docs.generate.markdown import cell, code, table
from launcher.config import LauncherConfig
from launcher.planning.commands import DECIDED
from model_server.config import ServeConfig
from router.config import RouterConfig
from wire.cli.options import Option, options_of


@dataclass(frozen=True)
class Variable:
    """`reader`: the process or library that reads it. `in_code`: our own code names it."""

    name: str
    reader: str
    effect: str
    in_code: bool = False


VARIABLES = (
    Variable("RAY_ADDRESS", "launcher", "HOST:PORT of the Ray cluster of `--placement ray`.", in_code=True),
    Variable("LWS_GROUP_SIZE", "launcher", "Set by LeaderWorkerSet: the default of `--nnodes`.", in_code=True),
    Variable("LWS_WORKER_INDEX", "launcher", "Set by LeaderWorkerSet: the default of `--node-rank`.", in_code=True),
    Variable(
        "LWS_LEADER_ADDRESS", "launcher",
        "Set by LeaderWorkerSet: the default of `--master-addr` with several nodes.", in_code=True,
    ),
    Variable(
        "TORCHELASTIC_USE_AGENT_STORE", "launcher",
        "Set to `True` by torchrun, whose own store listens on `MASTER_PORT`: with several nodes, node 0 listens on "
        "the next port.",
        in_code=True,
    ),
    Variable("GROUP_WORLD_SIZE", "launcher", "Set by torchrun: the default of `--nnodes`.", in_code=True),
    Variable("GROUP_RANK", "launcher", "Set by torchrun: the default of `--node-rank`.", in_code=True),
    Variable(
        "HF_TOKEN", "hub library", "Token for gated and private models; a token file in `HF_HOME` works too.",
        in_code=True,
    ),
    Variable("HUGGING_FACE_HUB_TOKEN", "hub library", "An older name of `HF_TOKEN`, which wins."),
    Variable("HF_API_TOKEN", "launcher", "Passed to every child as `HF_TOKEN`, which it replaces.", in_code=True),
    Variable("HF_HUB_OFFLINE", "hub library", "`1`: nothing is downloaded, only the cache is used.", in_code=True),
    Variable(
        "HF_HUB_CACHE", "launcher, hub library",
        "Directory of the hub cache; overrides `HUGGINGFACE_HUB_CACHE`, and is overridden by "
        "`--huggingface-hub-cache`.",
        in_code=True,
    ),
    Variable("HF_HOME", "launcher, hub library", "The hub cache is `$HF_HOME/hub`.", in_code=True),
    Variable(
        "XDG_CACHE_HOME", "launcher, hub library",
        "Used instead of `~/.cache`, which contains the hub cache.", in_code=True,
    ),
    Variable("HF_ENDPOINT", "launcher, hub library", "Address of the hub or of a mirror.", in_code=True),
    Variable(
        "HF_HUB_DOWNLOAD_TIMEOUT", "download", "Seconds without data after which a transfer is tried again. Unset: 10.",
    ),
    Variable("TRANSFORMERS_OFFLINE", "hub library", "As `HF_HUB_OFFLINE`; `--env` shows it.", in_code=True),
    Variable("HF_XET_HIGH_PERFORMANCE", "hub library", "`1`: more bandwidth and memory for downloads."),
    Variable("HF_HUB_USER_AGENT_ORIGIN", "hub library", "A word that is added to the user agent."),
    Variable(
        "HF_HUB_DISABLE_PROGRESS_BARS", "hub library",
        "Set to 1 for the child processes; the log has its own records of progress.", in_code=True,
    ),
    Variable(
        "CUDA_VISIBLE_DEVICES", "launcher, CUDA",
        "Which GPUs are used. `all`: every GPU. Empty or `-1`: none, so the CPU is used.", in_code=True,
    ),
    Variable(
        "TRITON_CACHE_DIR", "Triton",
        "Where compiled kernels are stored; the launcher logs if there are none yet. Default: `~/.triton/cache`.",
        in_code=True,
    ),
    Variable(
        "NVIDIA_VISIBLE_DEVICES", "container runtime", "Which GPUs a container sees; `--env` shows it.",
    ),
    Variable(
        "OMP_NUM_THREADS", "shard",
        "Threads of a shard on a CPU. Unset: the number of CPUs divided by the number of shards, one less for a small "
        "model.",
        in_code=True,
    ),
    Variable(
        "TERCET_NATIVE", "shard",
        "`0`: torch's operators on a CPU instead of ours. `1`: ours for all matrices, even those that oneDNN "
        "multiplies faster.",
        in_code=True,
    ),
    Variable(
        "TERCET_INSTRUCTION_SET", "shard",
        "The best instruction set that the C++ operators may use: `amx`, `avx512_bf16`, `avx512` or `avx2`. Unset: "
        "the best that the CPU supports.",
        in_code=True,
    ),
    Variable(
        "CLAUDE_CONFIG_DIR", "`launcher launch claude`", "Folder of Claude Code's settings. Unset: `~/.claude`.",
        in_code=True,
    ),
    Variable("CODEX_HOME", "`launcher launch codex`", "Folder of Codex' settings. Unset: `~/.codex`.", in_code=True),
    Variable("XDG_CONFIG_HOME", "`launcher launch opencode`", "Used instead of `~/.config`.", in_code=True),
    Variable(
        "TERCET_API_KEY", "codex, opencode", "The server's key, in settings that `launcher launch` writes.",
        in_code=True,
    ),
    Variable("LOG_COLORIZE", "launcher", "`0`: no colours on a terminal.", in_code=True),
    Variable("TERM", "launcher", "`dumb`: no progress bars on a terminal.", in_code=True),
    Variable("TERMINAL_WIDTH", "every command", "Columns of a help page in a pipe. Unset: 120.", in_code=True),
    Variable("TERCET_BARS", "download", "Set to 1 by the launcher if it draws progress bars.", in_code=True),
    Variable(
        "TERCET_PHASES", "router, shard", "Set to 1 by the launcher: the log contains the phases of the start.",
        in_code=True,
    ),
    Variable(
        "TOKENIZERS_PARALLELISM", "tokenizers", "Set to `false` for the conversion and the trial of a tokenizer.",
        in_code=True,
    ),
    Variable("RAYON_NUM_THREADS", "tokenizers", "Set to 1 for the trial of a tokenizer.", in_code=True),
    Variable("TRANSFORMERS_VERBOSITY", "transformers", "Set for the conversion of a tokenizer.", in_code=True),
    Variable(
        "GLOO_SOCKET_IFNAME", "shard", "Network interface that shards on CPUs use. Set to `lo` if all shards are on "
        "one machine, in a group of nodes by the launcher to the interface of `--node-addr`.",
        in_code=True,
    ),
    Variable(
        "NCCL_SOCKET_IFNAME", "shard", "As `GLOO_SOCKET_IFNAME`, for the connections of NCCL in a group of nodes.",
        in_code=True,
    ),
    Variable(
        "GRPC_EXPERIMENTS", "gRPC", "Unset: gRPC's event engine is off between the processes of a server.",
        in_code=True,
    ),
    Variable("TORCH_NCCL_AVOID_RECORD_STREAMS", "torch", "Set to 1 for the shards.", in_code=True),
    Variable(
        "PYTORCH_ALLOC_CONF", "torch", "Set to `expandable_segments:True` for the shards unless this or the next "
        "variable has a value, which may be empty.",
        in_code=True,
    ),
    Variable("PYTORCH_CUDA_ALLOC_CONF", "torch", "The name of the former before torch 2.9.", in_code=True),
    Variable("SAFETENSORS_FAST_GPU", "safetensors", "Set to 1 for the shards.", in_code=True),
    Variable("NCCL_*", "NCCL", "As NCCL documents them; the launcher passes them on."),
    Variable("OTEL_*", "OpenTelemetry", "Headers, attributes and the like of exported spans; see `--otlp-endpoint`."),
    Variable("DOCKER_LABEL", "launcher", "Shown by `--env`.", in_code=True),
    Variable("GIT_SHA", "launcher", "Shown by `--env`.", in_code=True),
)  # fmt: skip

WITHOUT_EFFECT = {
    "HF_HUB_ENABLE_HF_TRANSFER": "the hub library has no such transfer any more; see `HF_XET_HIGH_PERFORMANCE`",
    "USE_FLASH_ATTENTION": "use `--attention`",
    "ZE_AFFINITY_MASK": "Intel's GPUs are not served",
    "DEBUG": "use `--log-level debug` or `--profile`",
}
"""Variables of TGI that are not read here."""


def inherited() -> list[tuple[str, Option]]:
    """Options of the children that the launcher has not: their variables reach the child through the launcher."""
    taken = {opt.env for opt in options_of(LauncherConfig)} | DECIDED
    found: dict[str, tuple[str, Option]] = {}
    for child, config_type in (("router", RouterConfig), ("shard", ServeConfig)):
        for opt in options_of(config_type):
            if opt.env and opt.env not in taken:
                found.setdefault(opt.env, (child, opt))
    return list(found.values())


def inherited_table() -> str:
    rows = []
    for child, opt in inherited():
        own = "" if opt.env in tgi.VARIABLES or opt.flag in tgi.ROUTER else " (ours)"
        rows.append((code(str(opt.env)), child, cell(opt.help).rstrip(".") + own + "."))
    return table(("Variable", "Handed on to", "Meaning"), rows)


def variable_table() -> str:
    rows = [(code(one.name), one.reader, cell(one.effect)) for one in VARIABLES]
    return table(("Variable", "Read by", "Effect"), rows)
