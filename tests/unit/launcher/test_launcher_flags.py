"""TGI's 54 flags, one by one: type and default, the command line, the environment, and which of the two wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.config import LauncherConfig
from wire.cli.options import options_of
from wire.cli.parsing import UsageError, parse

U64 = 2**64 - 1
U32 = 2**32 - 1

# flag, its type, its default, a value for the command line, another for the environment.
FLAGS: list[tuple[str, Any, Any, Any, Any]] = [
    ("model-id", str, None, "org/a", "org/b"),
    ("revision", str, None, "main", "refs/pr/1"),
    ("validation-workers", U64, 2, 3, 4),
    ("sharded", "bool", None, True, False),
    ("num-shard", 1024, None, 2, 4),
    ("quantize", ("awq", "compressed-tensors", "eetq", "exl2", "gptq", "marlin", "bitsandbytes", "bitsandbytes-nf4",
                  "bitsandbytes-fp4", "fp8"), None, "gptq", "awq"),
    ("speculate", 15, None, 1, 2),
    ("dtype", ("float16", "bfloat16", "float32"), None, "float16", "bfloat16"),
    ("kv-cache-dtype", ("fp8_e4m3fn", "fp8_e5m2"), None, "fp8_e5m2", "fp8_e4m3fn"),
    ("trust-remote-code", "switch", False, True, True),
    ("max-concurrent-requests", U64, 128, 1, 2),
    ("max-best-of", U64, 2, 3, 4),
    ("max-stop-sequences", U64, 4, 5, 6),
    ("max-top-n-tokens", U32, 5, 6, 7),
    ("max-input-tokens", U32, None, 10, 11),
    ("max-input-length", U32, None, 12, 13),
    ("max-total-tokens", U32, None, 14, 15),
    ("waiting-served-ratio", float, 0.3, 1.2, 0.5),
    ("max-batch-prefill-tokens", U32, None, 16, 17),
    ("max-batch-total-tokens", U32, None, 18, 19),
    ("max-waiting-tokens", U64, 20, 21, 22),
    ("max-batch-size", U32, None, 23, 24),
    ("cuda-graphs", "numbers", [], [1, 2], [0]),
    ("hostname", str, "0.0.0.0", "127.0.0.1", "::1"),
    ("port", 65535, 3000, 80, 8080),
    ("prometheus-port", 65535, None, 9000, 9001),
    ("shard-uds-path", str, None, "/run/a", "/run/b"),
    ("master-addr", str, "localhost", "10.0.0.1", "10.0.0.2"),
    ("master-port", 65535, None, 29500, 29501),
    ("huggingface-hub-cache", Path, None, Path("/a"), Path("/b")),
    ("weights-cache-override", Path, None, Path("/c"), Path("/d")),
    ("disable-custom-kernels", "switch", False, True, True),
    ("cuda-memory-fraction", float, 1.0, 0.5, 0.25),
    ("rope-scaling", ("linear", "dynamic"), None, "linear", "dynamic"),
    ("rope-factor", float, None, 2.0, 4.0),
    ("json-output", "switch", False, True, True),
    ("otlp-endpoint", str, None, "http://a:1", "http://b:2"),
    ("otlp-service-name", str, "text-generation-inference.router", "a", "b"),
    ("cors-allow-origin", "texts", [], ["http://a", "http://b"], ["http://a,http://b"]),
    ("api-key", str, None, "a", "b"),
    ("watermark-gamma", float, None, 0.5, 0.25),
    ("watermark-delta", float, None, 2.0, 1.0),
    ("ngrok", "switch", False, True, True),
    ("ngrok-authtoken", str, None, "a", "b"),
    ("ngrok-edge", str, None, "a", "b"),
    ("tokenizer-config-path", Path, None, Path("/a"), Path("/b")),
    ("disable-grammar-support", "switch", False, True, True),
    ("env", "switch", False, True, None),
    ("max-client-batch-size", U64, 4, 5, 6),
    ("lora-adapters", str, None, "a", "b=c@d"),
    ("usage-stats", ("on", "off", "no-stack"), "on", "off", "no-stack"),
    ("payload-limit", U64, 2_000_000, 1, 2),
    ("enable-prefill-logprobs", "switch", False, True, True),
    ("graceful-termination-timeout", U32, 90, 10, 20),
]  # fmt: skip
NAMES = [flag for flag, *_ in FLAGS]


def spelled(flag: str, kind: Any, value: Any) -> list[str]:
    """On the command line, as TGI's users write it."""
    if kind == "switch":
        return [f"--{flag}"]
    if kind == "texts":
        return [word for item in value for word in (f"--{flag}", item)]
    return [f"--{flag}", in_environment(value)]


def in_environment(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def asked(argv: list[str], environ: dict[str, str], flag: str) -> Any:
    return getattr(parse(LauncherConfig, argv, environ), flag.replace("-", "_"))


def variable(flag: str) -> str:
    return flag.upper().replace("-", "_")


def test_all_of_them_are_here() -> None:
    assert len(set(NAMES)) == 54
    assert {opt.flag.removeprefix("--") for opt in options_of(LauncherConfig)} >= set(NAMES)


@pytest.mark.parametrize(("flag", "kind", "default", "given", "inherited"), FLAGS, ids=NAMES)
def test_flag(flag: str, kind: Any, default: Any, given: Any, inherited: Any) -> None:
    name, argv = variable(flag), spelled(flag, kind, given)
    assert asked([], {}, flag) == default
    assert asked(argv, {}, flag) == given
    assert asked([], {name: ""}, flag) == default
    if inherited is None:
        assert asked([], {name: "true"}, flag) == default
        return
    environ = {name: in_environment(inherited)}
    assert asked([], environ, flag) == inherited
    # The command line wins, and then nobody looks at the variable, which may be wrong.
    assert asked(argv, {name: "false" if kind == "switch" else in_environment(inherited)}, flag) == given
    if kind != "texts":
        assert asked(argv, {name: "\0nonsense"}, flag) == given


@pytest.mark.parametrize(("flag", "kind"), [(flag, kind) for flag, kind, *_ in FLAGS], ids=NAMES)
def test_what_no_flag_takes(flag: str, kind: Any) -> None:
    name = variable(flag)
    if isinstance(kind, int):
        refused = [str(kind + 1), "-1", "1.5", "x", "", "1_0"]
        assert asked([f"--{flag}={kind}"], {}, flag) == kind
    elif kind is float:
        refused = ["x", "", "nan", "inf", "1_0"]
    elif isinstance(kind, tuple):
        refused = ["x", "", kind[0].upper()]
        assert all(asked([f"--{flag}", word], {}, flag) == word for word in kind)
    elif kind == "bool":
        refused = ["x", ""]
    elif kind == "numbers":
        refused = ["x", "1,-2", "1;2"]
    else:
        refused = []
    for text in refused:
        with pytest.raises(UsageError) as caught:
            parse(LauncherConfig, [f"--{flag}={text}"], {})
        assert f"--{flag}" in str(caught.value)
        if text:
            with pytest.raises(UsageError) as caught:
                parse(LauncherConfig, [], {name: text})
            assert name in str(caught.value) and repr(text.split(",")[-1]) in str(caught.value)
    if kind == "switch":
        for words in ([f"--{flag}=true"], [f"--no-{flag}"]):
            with pytest.raises(UsageError):
                parse(LauncherConfig, words, {})
    elif kind not in ("numbers", "texts"):
        twice = [f"--{flag}", in_environment(next(row[3] for row in FLAGS if row[0] == flag))] * 2
        with pytest.raises(UsageError, match="cannot be used multiple times"):
            parse(LauncherConfig, twice, {})


@pytest.mark.parametrize("flag", [flag for flag, kind, *_ in FLAGS if kind == "switch" and flag != "env"])
def test_switches_from_the_environment(flag: str) -> None:
    """TGI takes `true` and `false` alone; charts that say 1 or True are understood here."""
    for text, expected in (("true", True), ("1", True), ("True", True), ("YES", True), ("on", True), ("false", False),
                           ("0", False), ("no", False), ("Off", False), ("", False)):  # fmt: skip
        assert asked([], {variable(flag): text}, flag) is expected
    with pytest.raises(UsageError, match=variable(flag)):
        parse(LauncherConfig, [], {variable(flag): "maybe"})


def test_short_names() -> None:
    config = parse(LauncherConfig, ["-p", "81", "-e", "-g", "7"], {})
    assert (config.port, config.env, config.graceful_termination_timeout) == (81, True, 7)


@pytest.mark.parametrize("flag", ["port", "prometheus-port", "master-port"])
def test_ports_that_kubernetes_exports_for_its_services(flag: str, caplog: pytest.LogCaptureFixture) -> None:
    default = next(row[2] for row in FLAGS if row[0] == flag)
    assert asked([], {variable(flag): "tcp://10.0.0.1:9000"}, flag) == default
    assert variable(flag) in caplog.text


@pytest.mark.parametrize("argv", [["--model_id", "x"], ["--model", "x"], ["--models-id", "x"], ["x"], ["-x"], ["--"]])
def test_names_are_exact(argv: list[str]) -> None:
    if argv == ["--"]:
        assert parse(LauncherConfig, argv, {}) == LauncherConfig()
        return
    with pytest.raises(UsageError, match="unexpected argument"):
        parse(LauncherConfig, argv, {})
