"""Facts that a figure needs: which model and server answered, on which machine, asked by which command."""

from __future__ import annotations

import dataclasses
import ipaddress
import shlex
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import orjson

from launcher.bench.apis import Api
from launcher.bench.config import BenchConfig
from launcher.http_stream import BadAnswerError, Connection
from launcher.planning.hardware import Gpu, Hardware, detect
from wire.cli.options import Option, options_of
from wire.cli.spelling import spell


@dataclasses.dataclass(frozen=True)
class Served:
    """What answers at a URL, as far as it says; empty where it does not."""

    model: str
    server: str


async def served(connection: Connection, api: Api) -> Served:
    """By TGI's /info, else by what servers with OpenAI's API have in common. Raises OSError."""
    info = await _object(connection, "/info")
    if info.get("model_id"):
        name = f"tercet {info['tercet_version']}" if "tercet_version" in info else f"TGI {info.get('version', '')}"
        how = ", ".join(
            str(info[key]).removeprefix("torch.")
            for key in ("model_device_type", "model_dtype", "quantize")
            if info.get(key)
        )
        return Served(str(info["model_id"]), f"{name.strip()} ({how})" if how else name.strip())
    model = str(api.body("", 1).get("model", ""))
    listed = (await _object(connection, "/v1/models")).get("data")
    cards = [card for card in listed if isinstance(card, dict)] if isinstance(listed, list) else []
    owner = next((str(card.get("owned_by") or "") for card in cards if card.get("id") == model), "")
    version = str((await _object(connection, "/version")).get("version", ""))
    return Served(model, f"{owner} {version}".strip())


async def _object(connection: Connection, path: str) -> dict[str, Any]:
    """The JSON object at `path`; empty if there is none."""
    try:
        answer = orjson.loads(await connection.get(path))
    except (BadAnswerError, orjson.JSONDecodeError):
        return {}
    return answer if isinstance(answer, dict) else {}


def machine(url: str) -> str:
    """The machine of clients and server, or of the clients and where the server is."""
    hardware = detect({})
    host = urlsplit(url).hostname or ""
    return _described(hardware) if _is_loopback(host) else f"{_described(hardware)} (clients); the server is at {host}"


def _described(hardware: Hardware) -> str:
    cores = "1 core" if hardware.cores == 1 else f"{hardware.cores} cores"
    memory = [f"{hardware.memory_bytes / 2**30:.1f} GiB"] if hardware.memory_bytes else []
    gpus = hardware.gpus or tuple(Gpu() for _ in range(hardware.unused_gpus))
    counted = [f"{count} x {name}" for name, count in Counter(gpu.card or "GPU" for gpu in gpus).items()]
    return ", ".join([hardware.cpu or "CPU", cores, *memory, *counted])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def given_options(config: BenchConfig) -> list[Option]:
    """List the options that differ from their defaults, without the key."""
    return [
        opt for opt in options_of(BenchConfig) if getattr(config, opt.name) != opt.default and not opt.header
    ]  # fmt: skip


def command_line(config: BenchConfig) -> str:
    """The shortest one that gives this run again, without the key."""
    words = ["launcher", "bench"]
    for opt in given_options(config):
        value = getattr(config, opt.name)
        if opt.is_switch:
            words.append(opt.flag if value else opt.negative_flag)
        else:
            words += [opt.flag, ",".join(map(spell, value)) if opt.is_repeated else spell(value)]
    return shlex.join(words)
