"""Refusals before anything is started; and that nothing is left behind."""

from __future__ import annotations

import os
import re
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from launcher.config import LauncherConfig
from launcher.errors import ArgumentValidation
from launcher.planning import preflight
from launcher.planning.hardware import Gpu, Hardware
from launcher.planning.model_info import ModelInfo


def listener() -> socket.socket:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    return server


def config(**fields: Any) -> LauncherConfig:
    return LauncherConfig(**fields)


@pytest.mark.parametrize(
    "name, value, reason",
    [
        ("MAX_STEP_SECONDS", "soon", r"invalid value 'soon' for '--max-step-seconds .*MAX_STEP_SECONDS.*: expected a"),
        ("AIP_HEALTH_ROUTE", "health", "--aip-health-route health is not a path"),
        ("CHAT_TEMPLATE", "nowhere.jinja", "--chat-template nowhere.jinja is not a file"),
    ],
)
def test_variables_that_only_the_router_knows(name: str, value: str, reason: str) -> None:
    with pytest.raises(ArgumentValidation, match=reason):
        preflight.check_router_variables({**os.environ, name: value})


def test_the_router_does_not_see_what_is_wrong_of_the_launcher_s_own_variables() -> None:
    preflight.check_router_variables({**os.environ, "PORT": "http", "MAX_TOTAL_TOKENS": "many"})


def test_a_free_port() -> None:
    with listener() as server:
        port = server.getsockname()[1]
        with pytest.raises(ArgumentValidation, match=rf"`--port` {port} is in use"):
            preflight.http_port(config(port=port), "127.0.0.1")
    assert preflight.http_port(config(port=port), "127.0.0.1") == port
    assert preflight.http_port(config(port=0), "127.0.0.1") > 0
    assert preflight.http_port(config(port=0, aip_http_port=port), "127.0.0.1") == port


def test_a_busy_metrics_port_is_no_reason_to_stay_away(caplog: pytest.LogCaptureFixture) -> None:
    with listener() as server:
        port = server.getsockname()[1]
        assert preflight.without_busy_metrics_port(config(prometheus_port=port), "127.0.0.1").prometheus_port is None
        assert f"`--prometheus-port` {port} is in use" in caplog.text and "continuing without it" in caplog.text
    for asked in (config(prometheus_port=port), config(prometheus_port=0), config()):
        assert preflight.without_busy_metrics_port(asked, "127.0.0.1") == asked


def test_an_address_of_another_machine() -> None:
    with pytest.raises(ArgumentValidation, match="--hostname"):
        preflight.http_port(config(port=0), "192.0.2.1")


@pytest.mark.parametrize(("name", "address"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("localhost", None)])
def test_listening_address(name: str, address: str | None) -> None:
    found = preflight.listening_address(config(hostname=name))
    assert found == address if address else preflight.is_ip_address(found)


def test_unknown_name() -> None:
    with pytest.raises(ArgumentValidation, match="--hostname"):
        preflight.listening_address(config(hostname="no.such.host.invalid"))


def test_rendezvous_port() -> None:
    assert preflight.rendezvous_port(config(), 1) == 29500
    with listener() as server:
        taken = server.getsockname()[1]
        with pytest.raises(ArgumentValidation, match="--master-port"):
            preflight.rendezvous_port(config(master_port=taken), 2)
        # Somewhere else it is not ours to test.
        assert preflight.rendezvous_port(config(master_port=taken, master_addr="10.0.0.1"), 2) == taken


def test_rendezvous_port_moves_when_the_default_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with listener() as server:
        monkeypatch.setattr(preflight, "DEFAULT_MASTER_PORT", server.getsockname()[1])
        port = preflight.rendezvous_port(config(), 2)
        assert port not in (0, server.getsockname()[1])


def test_private_directory() -> None:
    with preflight.socket_prefix(config(), 2, os.environ, str) as prefix:
        folder = Path(prefix).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.stat().st_uid == os.getuid()
        (folder / "shard-0").touch()
    assert not folder.exists()


def test_a_folder_for_sockets_is_announced_before_it_is_there() -> None:
    announced: dict[str, bool] = {}
    with preflight.private_directory({}, lambda path: announced.update({path: Path(path).exists()})) as folder:
        assert announced == {str(folder): False}


def test_another_folder_where_tmp_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    real = Path.mkdir

    def mkdir(path: Path, mode: int) -> None:
        tried.append(str(path.parent))
        if path.parent == Path("/tmp"):
            raise OSError(30, "Read-only file system")
        real(path, mode=mode)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with preflight.socket_prefix(config(), 1, os.environ, str) as prefix:
        assert Path(prefix).parent.parent in (tmp_path, Path("/dev/shm"))
    assert tried[:2] == ["/tmp", str(tmp_path)]


def test_no_folder_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ArgumentValidation, match=r"no folder .*nowhere: No such file.*make /tmp writable or give `--sh"
    ):
        preflight._made_in([str(tmp_path / "nowhere")], str)
    deep = tmp_path / ("x" * 110)
    deep.mkdir()
    with pytest.raises(ArgumentValidation, match="too long for a socket"):
        preflight._made_in([str(deep)], str)
    assert list(deep.iterdir()) == []


@pytest.mark.parametrize(
    ("gpus", "memory_gib", "weights_gib", "words"),
    [
        (0, 8, 16, None),
        (0, 8, 17, "17.0 GiB of weights, which cannot fit in the 8.0 GiB of this machine; use a smaller model"),
        (0, None, 999, None),
        (2, 8, 100, None),
        (2, 8, 200, "GiB of 2 GPUs; use more GPUs (`--num-shard`)"),
        (2, 8, None, None),
    ],
)
def test_weights_that_cannot_fit(gpus: int, memory_gib: int | None, weights_gib: int | None, words: str | None) -> None:
    hardware = Hardware(
        gpus=(Gpu(card="c", memory_mib=40 << 10),) * gpus, memory_bytes=memory_gib and memory_gib << 30, cores=2
    )
    info = ModelInfo(weight_bytes=weights_gib and (weights_gib << 30) + 2)
    if words is None:
        preflight.check_memory("m", hardware, ModelInfo(weight_bytes=weights_gib and weights_gib << 30), gpus or 1)
        return
    with pytest.raises(ArgumentValidation, match=re.escape(words)):
        preflight.check_memory("m", hardware, info, gpus or 1)


def test_weights_that_fit_once_they_are_quantized() -> None:
    hardware, info = Hardware(memory_bytes=8 << 30), ModelInfo(weight_bytes=32 << 30)
    preflight.check_memory("m", hardware, info, 1, "eetq")
    for flag in (None, "gptq"):
        with pytest.raises(ArgumentValidation, match=r"32\.0 GiB of weights, which cannot fit"):
            preflight.check_memory("m", hardware, info, 1, flag)


def test_given_prefix_is_locked_and_cleared(tmp_path: Path) -> None:
    prefix = str(tmp_path / "s")
    asked = config(shard_uds_path=prefix)
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(f"{prefix}-0")
    dead.close()
    with preflight.socket_prefix(asked, 1, os.environ, str) as found:
        assert found == prefix
        assert not Path(f"{prefix}-0").exists()
        with (
            pytest.raises(ArgumentValidation, match=rf"--shard-uds-path.*pid {os.getpid()}"),
            preflight.socket_prefix(asked, 1, os.environ, str),
        ):
            pass
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(f"{prefix}-0")
    assert not Path(f"{prefix}-0").exists()
    with preflight.socket_prefix(asked, 1, os.environ, str):
        pass


@pytest.mark.parametrize("suffix", ["-0", "-1", ".lock"])
def test_what_is_no_socket_is_never_taken(tmp_path: Path, suffix: str) -> None:
    prefix = str(tmp_path / "s")
    Path(prefix + suffix).write_text("work of months")
    with (
        pytest.raises(ArgumentValidation, match=rf"`--shard-uds-path`: {prefix}{suffix} exists and is not .*another"),
        preflight.socket_prefix(config(shard_uds_path=prefix), 2, os.environ, str),
    ):
        pass
    assert Path(prefix + suffix).read_text() == "work of months"


def test_what_took_the_place_of_a_socket_stays(tmp_path: Path) -> None:
    prefix = str(tmp_path / "s")
    with preflight.socket_prefix(config(shard_uds_path=prefix), 1, os.environ, str):
        Path(f"{prefix}-0").write_text("a file")
    assert Path(f"{prefix}-0").read_text() == "a file"


def test_a_living_socket_is_never_taken(tmp_path: Path) -> None:
    prefix = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(f"{prefix}-1")
        alive.listen()
        with (
            pytest.raises(ArgumentValidation, match="is listening"),
            preflight.socket_prefix(config(shard_uds_path=prefix), 2, os.environ, str),
        ):
            pass
        assert Path(f"{prefix}-1").exists()


@pytest.mark.parametrize("prefix", ["/no/such/folder/s", "/tmp/" + "x" * 120])
def test_impossible_prefixes(prefix: str) -> None:
    with (
        pytest.raises(ArgumentValidation, match="--shard-uds-path"),
        preflight.socket_prefix(config(shard_uds_path=prefix), 1, os.environ, str),
    ):
        pass


def test_a_gguf_file_of_a_folder_or_repository() -> None:
    found = preflight.with_gguf_file(config(model_id="org/name/", gguf_file="a-Q4_K_M.gguf"))
    assert (found.model_id, found.gguf_file) == ("org/name/a-Q4_K_M.gguf", None)
    assert preflight.with_gguf_file(config(model_id="org/name")).model_id == "org/name"


def test_an_empty_name_is_not_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a-Q4_K_M.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert preflight.with_gguf_file(config(model_id="")).model_id == ""


def test_the_only_gguf_file_of_a_folder_needs_no_option(tmp_path: Path) -> None:
    def served(model_id: str = str(tmp_path)) -> str | None:
        return preflight.with_gguf_file(config(model_id=model_id)).model_id

    assert served() == str(tmp_path)
    (tmp_path / "a-Q4_K_M.gguf").touch()
    (tmp_path / "config.json").write_text("{}")
    assert served() == served(f"{tmp_path}/") == f"{tmp_path}/a-Q4_K_M.gguf"
    assert served(f"{tmp_path}/a-Q4_K_M.gguf") == f"{tmp_path}/a-Q4_K_M.gguf"
    (tmp_path / "model.gguf").touch()
    assert served() == str(tmp_path)  # of several, none
    (tmp_path / "a-Q4_K_M.gguf").unlink()
    assert served() == str(tmp_path)  # the folder that the download step made of a file
    (tmp_path / "model.gguf").rename(tmp_path / "b.gguf")
    (tmp_path / "model.safetensors").touch()
    assert served() == str(tmp_path)


@pytest.mark.parametrize(
    ("model_id", "name", "message"),
    [
        (None, "a.gguf", "`--gguf-file` needs the folder or repository of the file as `--model-id`"),
        ("m/b.gguf", "a.gguf", "`--gguf-file` needs the folder or repository of the file as `--model-id`"),
        ("m", "../a.gguf", "`--gguf-file` ../a.gguf is no name of a GGUF file in the folder of `--model-id`"),
        ("m", "/a.gguf", "`--gguf-file` /a.gguf is no name of a GGUF file in the folder of `--model-id`"),
        ("m", "model.safetensors", "`--gguf-file` model.safetensors is no name of a GGUF file in the folder of `--mo"),
    ],
)
def test_a_gguf_file_that_cannot_be_meant(model_id: str | None, name: str, message: str) -> None:
    with pytest.raises(ArgumentValidation) as caught:
        preflight.with_gguf_file(config(model_id=model_id, gguf_file=name))
    assert str(caught.value).startswith(message)


def test_a_port_that_is_chosen_early_is_none_that_connections_get() -> None:
    first_of_connections = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = {preflight.bindable_port("--shard-port", "127.0.0.1", 0) for _ in range(5)}
    assert max(ports) < first_of_connections and len(ports) > 1


@pytest.mark.parametrize(
    ("given", "refused"),
    [({"num_stage": 2}, "cannot be combined with `--num-stage`"), ({"speculate": 0}, "drafts nothing")],
)
def test_heads_as_the_model_are_refused_where_nothing_is_drafted(
    tmp_path: Path, given: dict[str, int], refused: str
) -> None:
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2, "base_model_name_or_path": "org/base"}')
    asked = config(model_id=str(tmp_path))
    assert preflight.with_base_model(asked, {}).speculator == str(tmp_path)
    with pytest.raises(ArgumentValidation, match=f"^`--model-id` names heads that draft for org/base, .* {refused}"):
        preflight.with_base_model(config(model_id=str(tmp_path), **given), {})
