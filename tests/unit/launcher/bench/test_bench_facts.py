"""What a report says of the server, the machine and the command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from support.scripted_http import ScriptedServer

from launcher.bench import facts
from launcher.bench.apis import OpenAiApi, Sampling, TgiApi
from launcher.bench.config import BenchConfig
from launcher.bench.facts import Served, command_line, machine, served
from launcher.http_stream import Connection
from launcher.planning.hardware import Gpu, Hardware
from wire.cli.parsing import parse

GREEDY = Sampling(None, ignore_eos=True)
INFO = {
    "model_id": "m",
    "version": "3.3.4",
    "model_device_type": "cpu",
    "model_dtype": "torch.bfloat16",
    "quantize": None,
}
HERE = "http://127.0.0.1:3000"


@pytest.mark.parametrize(
    ("info", "server_name"),
    [
        (INFO | {"tercet_version": "0.4.0"}, "tercet 0.4.0 (cpu, bfloat16)"),
        (INFO | {"tercet_version": "0.4.0", "quantize": "eetq"}, "tercet 0.4.0 (cpu, bfloat16, eetq)"),
        (INFO, "TGI 3.3.4 (cpu, bfloat16)"),
        ({"model_id": "m"}, "TGI"),
    ],
)
async def test_servers_with_an_info_route(
    server: ScriptedServer, connection: Connection, answer: Callable[..., bytes], info: object, server_name: str
) -> None:
    server.answers = [answer(orjson.dumps(info))]
    assert await served(connection, TgiApi(GREEDY)) == Served("m", server_name)


async def test_servers_with_openais_api(
    server: ScriptedServer, connection: Connection, answer: Callable[..., bytes]
) -> None:
    models = b'{"data": [{"id": "other", "owned_by": "x"}, {"id": "m", "owned_by": "vllm"}]}'
    server.answers = [answer(b"no", "404 Not Found"), answer(models), answer(b'{"version": "0.32.0"}')]
    assert await served(connection, OpenAiApi(GREEDY, "m")) == Served("m", "vllm 0.32.0")


@pytest.mark.parametrize("body", [b"[]", b"not JSON", b'{"data": 1}', b'{"data": ["m"]}'])
async def test_a_server_that_says_nothing_of_itself(
    server: ScriptedServer, connection: Connection, answer: Callable[..., bytes], body: bytes
) -> None:
    server.answers = [answer(body), answer(body), answer(body)]
    assert await served(connection, OpenAiApi(GREEDY, "m")) == Served("m", "")


@pytest.mark.parametrize(
    ("url", "hardware", "expected"),
    [
        (HERE, Hardware(cpu="EPYC", cores=2, memory_bytes=2**33), "EPYC, 2 cores, 8.0 GiB"),
        ("http://localhost", Hardware(), "CPU, 1 core"),
        ("http://[::1]:80", Hardware(cpu="EPYC", gpus=(Gpu(card="h200"),) * 8), "EPYC, 1 core, 8 x h200"),
        (HERE, Hardware(cpu="EPYC", unused_gpus=2), "EPYC, 1 core, 2 x GPU"),
        ("https://api.example/v1", Hardware(cores=4), "CPU, 4 cores (clients); the server is at api.example"),
    ],
)
def test_the_machine(monkeypatch: pytest.MonkeyPatch, url: str, hardware: Hardware, expected: str) -> None:
    monkeypatch.setattr(facts, "detect", lambda environ: hardware)
    assert machine(url) == expected


def test_the_command_line_gives_the_same_run_again_but_not_the_key() -> None:
    words = ["--url", "http://h:1", "--concurrency", "1", "--concurrency", "64", "--no-ignore-eos", "--rate", "0.5,2",
             "--label", "my server", "--out", "o", "--prompt", "128", "--table"]  # fmt: skip
    config = parse(BenchConfig, [*words, "--api-key", "sesame"], {})
    assert command_line(config) == (
        "launcher bench --url http://h:1 --concurrency 1,64 --rate 0.5,2 --no-ignore-eos --label 'my server' --table "
        "--out o"
    )
    assert (config.out, command_line(BenchConfig())) == (Path("o"), "launcher bench")
