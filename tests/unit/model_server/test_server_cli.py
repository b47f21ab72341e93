"""The model server's command line: TGI's options with TGI's defaults, stock command lines, what is refused and how."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from model_server.cli import main, serve
from model_server.config import DownloadConfig, ServeConfig, check
from model_server.errors import StartupError
from model_server.quantize.config import QuantizeConfig
from wire.cli.options import options_of
from wire.cli.parsing import UsageError, parse

SWITCH = "switch"
STAGES = {"NUM_STAGE": "2", "RANK": "0", "WORLD_SIZE": "2"}
SERVE: dict[str, Any] = {
    "--revision": None, "--sharded": SWITCH, "--quantize": None, "--speculate": None, "--dtype": None,
    "--kv-cache-dtype": None, "--trust-remote-code": SWITCH, "--uds-path": Path("/tmp/text-generation-server"),
    "--logger-level": "INFO", "--json-output": SWITCH, "--otlp-endpoint": None,
    "--otlp-service-name": "text-generation-inference.server", "--max-input-tokens": None,
}  # fmt: skip
DOWNLOAD: dict[str, Any] = {
    "--revision": None, "--extension": ".safetensors", "--auto-convert": SWITCH, "--logger-level": "INFO",
    "--json-output": SWITCH, "--trust-remote-code": SWITCH, "--merge-lora": SWITCH,
}  # fmt: skip
QUANTIZE: dict[str, Any] = {
    "--revision": None, "--logger-level": "INFO", "--json-output": SWITCH, "--trust-remote-code": SWITCH,
    "--upload-to-model-id": None, "--percdamp": 0.01, "--act-order": SWITCH, "--groupsize": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config_type", "arguments", "expected", "count"),
    [
        (ServeConfig, ["model_id"], SERVE, 13),
        (DownloadConfig, ["model_id"], DOWNLOAD, 7),
        (QuantizeConfig, ["model_id", "output_dir"], QUANTIZE, 8),
    ],
)
def test_tgis_options(config_type: type, arguments: list[str], expected: dict[str, Any], count: int) -> None:
    options = {opt.flag: opt for opt in options_of(config_type)}
    assert [opt.name for opt in options.values() if opt.positional] == arguments
    assert len(expected) == count
    for flag, default in expected.items():
        opt = options[flag]
        assert opt.is_switch is opt.is_negatable is (default is SWITCH), flag
        assert opt.default == (False if default is SWITCH else default), flag
        # typer binds no variables: what the launcher inherits must not reach into a command that does not name it.
        assert opt.env is None, flag


def test_variables_of_the_launcher_stay_with_the_launcher() -> None:
    inherited = {
        "REVISION": "r", "DTYPE": "float16", "TRUST_REMOTE_CODE": "1", "MAX_INPUT_TOKENS": "4", "QUANTIZE": "gptq",
        "JSON_OUTPUT": "true", "OTLP_ENDPOINT": "http://x", "SPECULATE": "2", "KV_CACHE_DTYPE": "fp8_e5m2",
    }  # fmt: skip
    assert parse(ServeConfig, ["m"], inherited) == ServeConfig(model_id="m")
    assert parse(DownloadConfig, ["m"], inherited) == DownloadConfig(model_id="m")


def test_command_lines_of_tgis_launcher() -> None:
    shard = parse(
        ServeConfig,
        shlex.split(
            "org/m --uds-path /tmp/x --logger-level WARN --json-output --trust-remote-code --sharded --dtype bfloat16 "
            "--revision r --otlp-endpoint http://o:1 --otlp-service-name s --max-input-tokens 9"
        ),
        {
            "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
            "ATTENTION": "flashinfer",
            "PREFIX_CACHING": "true", "CUDA_MEMORY_FRACTION": "1", "MAX_TOTAL_TOKENS": "10", "MAX_BATCH_SIZE": "4",
            "CUDA_GRAPHS": "1,2", "DISABLE_CUSTOM_KERNELS": "True", "REQUEST_LOGPROBS": "1", "WATERMARK_GAMMA": "0.5",
        },
    )  # fmt: skip
    check(shard)
    assert shard.place == (1, 2)
    assert (shard.attention, shard.prefix_caching, shard.cuda_graphs) == ("flashinfer", True, [1, 2])
    assert (shard.disable_custom_kernels, shard.request_logprobs) == (True, True)
    fetched = parse(
        DownloadConfig,
        shlex.split(
            "org/m --extension .safetensors --logger-level INFO --json-output --merge-lora --revision r "
            "--trust-remote-code"
        ),
        {},
    )
    assert fetched.merge_lora and fetched.extension == ".safetensors"
    assert not parse(DownloadConfig, ["m", "--no-merge-lora", "--no-json-output", "--no-auto-convert"], {}).merge_lora


def test_a_shard_alone_needs_nothing_of_the_environment() -> None:
    alone = parse(ServeConfig, ["demo", "--no-sharded"], {"RANK": "3", "WORLD_SIZE": "4"})
    check(alone)
    assert alone.place == (0, 1)


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        (["--speculate", "2"], STAGES, "^`--speculate 2` cannot be combined with `--num-stage`: only the last stage"),
        (["--speculator", "mtp"], STAGES, "^`--speculator mtp` cannot be combined"),
        (["--speculator", "a", "--speculate", "2"], STAGES, "^`--speculator a` and `--speculate 2` cannot be combined"),
        ([], {"ROPE_SCALING": "dynamic", "ROPE_FACTOR": "2"}, "ROPE_SCALING dynamic is not served yet"),
        ([], {"ROPE_FACTOR": "0"}, "ROPE_FACTOR must be > 0"),
        ([], {"WEIGHTS_CACHE_OVERRIDE": "/w"}, "WEIGHTS_CACHE_OVERRIDE is not served yet"),
        (["--sharded"], {}, "--sharded needs the variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"),
        (["--sharded"], {"RANK": "0"}, "--sharded needs the variables"),
        (["--sharded"], {"WORLD_SIZE": "2"}, "--sharded needs the variables"),
    ],
)
def test_refused(argv: list[str], environ: dict[str, str], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        check(parse(ServeConfig, ["demo", *argv], environ))


@pytest.mark.parametrize(
    ("environ", "factor"),
    [({}, None), ({"ROPE_SCALING": "linear"}, 1.0), ({"ROPE_FACTOR": "2.5"}, 2.5),
     ({"ROPE_SCALING": "linear", "ROPE_FACTOR": "4"}, 4.0)],
)  # fmt: skip
def test_rope(environ: dict[str, str], factor: float | None) -> None:
    config = parse(ServeConfig, ["demo"], environ)
    check(config)
    assert config.linear_rope_factor == factor


def test_heads_as_the_model_are_refused_beside_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2, "base_model_name_or_path": "org/base"}')
    monkeypatch.setattr("wire.log.log_setup.configure", lambda *args, **named: None)
    monkeypatch.setattr("model_server.distributed.peer_watch.leave_at_once", sys.exit)
    with pytest.raises(SystemExit):
        environ = STAGES | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
        serve(parse(ServeConfig, [str(tmp_path), "--sharded"], environ))
    assert "`--model-id` names heads that draft for org/base, which is served with them" in caplog.text
    assert f"`--speculator {tmp_path}` cannot be combined with `--num-stage`" in caplog.text


def test_no_speculation_is_no_wish() -> None:
    check(parse(ServeConfig, ["demo", "--speculate", "0"], {}))
    check(parse(ServeConfig, ["demo", "--sharded"], {"RANK": "0", "WORLD_SIZE": "1"}))


@pytest.mark.parametrize(
    "argv",
    [["serve"], ["serve", "demo", "--quantize", "int3"], ["serve", "demo", "--dtype", "fp16"],
     ["download-weights", "m", "--extension", ".bin"], ["quantize", "m"], ["convert", "m"]],
)  # fmt: skip
def test_usage_errors(argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["model-server", *argv])
    assert main() == 2
    assert "--help" in capsys.readouterr().err


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "model_server", *argv], capture_output=True, text=True, timeout=120, check=False
    )


def test_refusals_of_the_process(tmp_path: Path) -> None:
    """Exit status 1 and one line, long before torch could be imported."""
    (tmp_path / "adapter_config.json").write_text("{}")
    for argv, words in (
        (["serve", "demo", "--sharded"], "--sharded needs the variables"),
        (["download-weights", str(tmp_path), "--merge-lora"], "holds an adapter that does not name its base model"),
    ):
        done = run(*argv)
        assert (done.returncode, done.stderr) == (1, ""), done
        assert words in done.stdout and done.stdout.count("\n") == 1
    done = run("download-weights", "demo", "--extension", ".safetensors", "--merge-lora", "--json-output")
    assert done.returncode == 0, done


def test_help_needs_nothing_heavy() -> None:
    program = (
        "import sys; from model_server.cli import main; sys.argv = ['x', *sys.argv[1:]]; assert main() == 0;"
        "sys.exit(int(bool({'torch', 'transformers', 'huggingface_hub', 'grpc'} & set(sys.modules))))"
    )
    for command in ([], ["serve"], ["download-weights"], ["quantize"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *command, "--help"], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done


def test_world_sizes_start_at_one() -> None:
    with pytest.raises(UsageError, match="WORLD_SIZE"):
        parse(ServeConfig, ["demo", "--sharded"], {"RANK": "0", "WORLD_SIZE": "0"})
