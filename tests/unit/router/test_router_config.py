"""The router's options: TGI's names and defaults, and what is refused before anything is loaded."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from router.cli import main
from router.config import RouterConfig, check
from router.errors import StartupError
from wire.cli.options import options_of
from wire.cli.parsing import UsageError, parse

TGI = {
    "--max-concurrent-requests": 128, "--max-best-of": 2, "--max-stop-sequences": 4, "--max-top-n-tokens": 5,
    "--max-input-tokens": None, "--max-total-tokens": None, "--waiting-served-ratio": 1.2,
    "--max-batch-prefill-tokens": 4096, "--max-batch-total-tokens": None, "--max-waiting-tokens": 20,
    "--max-batch-size": None, "--hostname": "0.0.0.0", "--port": 3000,
    "--master-shard-uds-path": "/tmp/text-generation-server-0", "--tokenizer-name": "bigscience/bloom",
    "--tokenizer-config-path": None, "--revision": None, "--trust-remote-code": False, "--validation-workers": 2,
    "--api-key": None, "--json-output": False, "--otlp-endpoint": None,
    "--otlp-service-name": "text-generation-inference.router", "--cors-allow-origin": (), "--ngrok": False,
    "--ngrok-authtoken": None, "--ngrok-edge": None, "--disable-grammar-support": False, "--max-client-batch-size": 4,
    "--usage-stats": "on", "--payload-limit": 2_000_000,
}  # fmt: skip


def test_tgis_options_have_tgis_defaults_and_variables() -> None:
    ours = {option.flag: option for option in options_of(RouterConfig)}
    for flag, default in TGI.items():
        assert ours[flag].default == default, flag
        assert ours[flag].env == flag.removeprefix("--").replace("-", "_").upper()
    # 33 options in TGI: these, --max-image-fetch-size (1 GiB there), and --prometheus-port, which opens a port there.
    assert len(TGI) + 2 == 33
    assert ours["--max-image-fetch-size"].default == 10 << 20
    assert ours["--prometheus-port"].default is None
    assert ours["--port"].short == "-p"


def test_the_command_line_that_tgis_launcher_writes() -> None:
    argv = shlex.split(
        "--max-client-batch-size 4 --max-concurrent-requests 128 --max-best-of 2 --max-stop-sequences 4 "
        "--max-top-n-tokens 5 --max-batch-prefill-tokens 4096 --waiting-served-ratio 0.3 --max-waiting-tokens 20 "
        "--validation-workers 2 --hostname 0.0.0.0 --port 3000 --prometheus-port 9000 --master-shard-uds-path /x-0 "
        "--tokenizer-name m --payload-limit 2000000 --max-input-tokens 10 --max-total-tokens 20 --usage-stats on "
        "--disable-grammar-support --tokenizer-config-path /c --max-batch-total-tokens 8000 --max-batch-size 9 "
        "--revision r --trust-remote-code --json-output --otlp-endpoint e --otlp-service-name n "
        "--cors-allow-origin a --cors-allow-origin b --api-key k"
    )
    config = parse(RouterConfig, argv, {"COMPUTE_TYPE": "1-gpu"})
    assert config.cors_allow_origin == ("a", "b") and config.waiting_served_ratio == 0.3
    assert config.compute_type == "1-gpu" and config.prometheus_port == 9000


def test_a_port_out_of_range() -> None:
    with pytest.raises(UsageError, match="65536"):
        parse(RouterConfig, ["--port", "65536"], {})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"validation_workers": 0}, "--validation-workers"),
        ({"max_batch_size": 0}, "--max-batch-size"),
        ({"max_best_of": 0}, "--max-best-of"),
        ({"max_client_batch_size": 0}, "--max-client-batch-size"),
        ({"max_input_tokens": 10, "max_total_tokens": 10}, "--max-input-tokens"),
        ({"max_batch_total_tokens": 4095}, "--max-batch-prefill-tokens"),
        ({"max_batch_total_tokens": 5000, "max_total_tokens": 5001}, "--max-total-tokens"),
        ({"image_hosts": ("x",), "image_fetch": "off"}, "--image-hosts"),
        ({"ngrok": True}, "ngrok"),
        ({"ngrok_edge": "x"}, "ngrok"),
        ({"tokenizer_config_path": "/nowhere/x.json"}, "--tokenizer-config-path"),
        ({"chat_template": "/nowhere/x.jinja"}, "--chat-template"),
    ],
)
def test_refused_at_once(options: dict[str, object], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        check(RouterConfig(**options))  # type: ignore[arg-type]


def test_a_sound_config_passes(tmp_path: Path) -> None:
    template = tmp_path / "x.jinja"
    template.write_text("x")
    check(RouterConfig(max_input_tokens=10, max_total_tokens=20, chat_template=str(template)))


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "router", *argv], capture_output=True, text=True, timeout=60)


def test_a_wrong_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["router", "--nonsense"])
    assert main() == 2
    assert "--nonsense" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["router", "print-schema"])
    assert main() == 0
    assert "/generate_stream" in json.loads(capsys.readouterr().out)["paths"]


def test_a_refusal_names_its_variables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MAX_INPUT_TOKENS", "9")
    monkeypatch.setattr(sys, "argv", ["router", "check-options", "--max-total-tokens", "9"])
    assert main() == 1
    assert capsys.readouterr().err.endswith("Given: 9 and 9 (from the environment: MAX_INPUT_TOKENS)\n")


def test_help_and_errors_of_the_process(tmp_path: Path) -> None:
    done = run("--help")
    assert done.returncode == 0 and "--max-concurrent" in done.stdout
    done = run("--tokenizer-name", str(tmp_path), "--hostname", "127.0.0.1", "--port", "0")
    assert done.returncode == 1 and "tokenizer.json" in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.startswith('Error: WebServer("') and done.stderr.count("\n") == 1
    done = run("--max-input-tokens", "9", "--max-total-tokens", "9", "--json-output")
    line = 'Error: ArgumentValidation("`--max-input-tokens` must be < `--max-total-tokens`. Given: 9 and 9")\n'
    assert (done.returncode, done.stderr) == (1, line)
    records = [json.loads(text) for text in done.stdout.splitlines()]
    assert records[-1]["level"] == "ERROR" and "Given: 9 and 9" in records[-1]["message"]
    done = run("--tokenizer-name", "demo", "--port", "0", "--master-shard-uds-path", str(tmp_path / "nobody-0"))
    assert done.returncode == 1 and done.stderr.startswith('Error: Backend("Unable to connect')


def test_a_start_imports_no_torch_transformers_or_image_library() -> None:
    code = "import sys, router.server.server; print({'torch', 'transformers', 'PIL'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()"
    code = "import sys, router.cli; print({'fastapi', 'grpc', 'tokenizers', 'numpy', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()"
