"""`launcher launch`: what is written into the settings of other programs, and what stays of them."""

from __future__ import annotations

import json
import os
import pty
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from launcher.clients.command import run_client
from launcher.clients.config import ClientConfig
from launcher.clients.settings import PROGRAMS, Server, UnreadableError, open_webui

SERVER = Server(url="http://127.0.0.1:3000", model='org/a "b"', context=4096)
WITH_KEY = Server(url="http://127.0.0.1:3000", model="m", api_key="it's secret")


def test_claude_keeps_other_settings() -> None:
    before = {"permissions": {"allow": ["Bash"]}, "env": {"X": "1", "ANTHROPIC_API_KEY": "old"}}
    after = json.loads(PROGRAMS["claude"].extended(json.dumps(before), WITH_KEY))
    assert after["permissions"] == before["permissions"]
    assert after["env"]["X"] == "1" and "ANTHROPIC_API_KEY" not in after["env"]
    assert after["env"]["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:3000"
    assert after["env"]["ANTHROPIC_AUTH_TOKEN"] == "it's secret"
    assert after["env"]["ANTHROPIC_DEFAULT_SONNET_MODEL"] == "m"


def test_opencode_keeps_other_providers() -> None:
    before = {"provider": {"other": {"npm": "x"}}, "theme": "dark"}
    after = json.loads(PROGRAMS["opencode"].extended(json.dumps(before), SERVER))
    assert after["theme"] == "dark" and after["provider"]["other"] == {"npm": "x"}
    assert after["model"] == 'tercet/org/a "b"'
    assert after["provider"]["tercet"]["options"] == {"baseURL": "http://127.0.0.1:3000/v1", "apiKey": "none"}
    assert after["provider"]["tercet"]["models"]['org/a "b"']["limit"]["context"] == 4096
    with_key = json.loads(PROGRAMS["opencode"].extended("", WITH_KEY))
    assert with_key["provider"]["tercet"]["options"]["apiKey"] == "{env:TERCET_API_KEY}"


def test_opencode_may_have_comments() -> None:
    text = '{ // mine\n "theme": "a // b, }", /* two\nlines */ "list": [1, 2,], "url": "http://x/\\"/*",\n}\n'
    after = json.loads(PROGRAMS["opencode"].extended(text, SERVER))
    assert (after["theme"], after["list"], after["url"]) == ("a // b, }", [1, 2], 'http://x/"/*')
    assert after["model"] == 'tercet/org/a "b"'
    commented = "// mine\n" + json.dumps(after)
    assert PROGRAMS["opencode"].extended(commented, SERVER) == commented  # it has these settings already


def test_claude_may_have_comments() -> None:
    text = '{ // mine\n "theme": "dark", "env": {"A": "http://x//y", /* two\nlines */ "B": "1",},\n}\n'
    after = json.loads(PROGRAMS["claude"].extended(text, SERVER))
    assert after["theme"] == "dark" and after["env"]["A"] == "http://x//y" and after["env"]["B"] == "1"
    assert after["env"]["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:3000"
    commented = "// mine\n" + json.dumps(after)
    assert PROGRAMS["claude"].extended(commented, SERVER) == commented  # it has these settings already


CODEX = """# mine
model = "gpt"
approval_policy = "never" # asked for

[model_providers.tercet]
name = "old"
base_url = "http://elsewhere"

[mcp_servers.x]
command = "y"
model = "stays"
"""


def test_codex_keeps_comments_and_other_tables() -> None:
    text = PROGRAMS["codex"].extended(CODEX, SERVER)
    after = tomllib.loads(text)
    assert "# mine\n" in text and "# asked for\n" in text
    assert (after["model"], after["model_provider"], after["model_context_window"]) == ('org/a "b"', "tercet", 4096)
    assert after["mcp_servers"] == {"x": {"command": "y", "model": "stays"}}
    assert after["model_providers"]["tercet"] == {
        "name": "Tercet", "base_url": "http://127.0.0.1:3000/v1", "wire_api": "responses",
    }  # fmt: skip
    assert tomllib.loads(PROGRAMS["codex"].extended("", WITH_KEY))["model_providers"]["tercet"]["env_key"]


def test_claude_asks_no_other_server_or_model() -> None:
    env = {"CLAUDE_CODE_USE_BEDROCK": "1", "ANTHROPIC_MODEL": "opus", "X": "1"}
    after = json.loads(PROGRAMS["claude"].extended(json.dumps({"env": env}), SERVER))["env"]
    assert "CLAUDE_CODE_USE_BEDROCK" not in after and "ANTHROPIC_SMALL_FAST_MODEL" not in after
    assert after["ANTHROPIC_MODEL"] == SERVER.model and after["X"] == "1"
    assert after["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] == "1"


def test_claude_knows_the_context_of_the_server() -> None:
    text = PROGRAMS["claude"].extended("", SERVER)
    env = json.loads(text)["env"]
    assert env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "4096" and env["CLAUDE_CODE_DISABLE_1M_CONTEXT"] == "1"
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS" not in json.loads(PROGRAMS["claude"].extended(text, WITH_KEY))["env"]


def test_codex_uses_no_profile_of_another_model() -> None:
    before = 'profile = "a"\n"model" = "gpt"\n[profiles.a]\nmodel = "o3"\n[model_providers."tercet"]\nname = "old"\n'
    after = tomllib.loads(PROGRAMS["codex"].extended(before, SERVER))
    assert "profile" not in after and after["profiles"] == {"a": {"model": "o3"}}
    assert after["model"] == SERVER.model and after["model_providers"]["tercet"]["name"] == "Tercet"


@pytest.mark.parametrize(("program", "name"), [("claude", "env"), ("opencode", "provider")])
def test_null_is_nothing(program: str, name: str) -> None:
    assert json.loads(PROGRAMS[program].extended(json.dumps({name: None}), SERVER))[name]


@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_twice_is_the_same_as_once(program: str) -> None:
    once = PROGRAMS[program].extended("", SERVER)
    assert PROGRAMS[program].extended(once, SERVER) == once


@pytest.mark.parametrize(
    ("program", "text", "message"),
    [
        ("claude", "// a comment\n{", "not JSON"),
        ("claude", '{"env": 1}', "`env` in it"),
        ("opencode", "[1]", "not a JSON object"),
        ("opencode", '{"provider": []}', "`provider` in it"),
        ("codex", "model = ", "not TOML"),
        ("codex", 'instructions = """\nmodel = 1\n"""\n', "not one that can be extended line by line"),
        ("codex", 'model_providers = {other = {name = "x"}}\n', "not one that can be extended line by line"),
    ],
)
def test_a_file_that_cannot_be_extended(program: str, text: str, message: str) -> None:
    with pytest.raises(UnreadableError, match=message):
        PROGRAMS[program].extended(text, SERVER)


def test_open_webui_in_a_shell() -> None:
    script = open_webui(WITH_KEY) + 'echo "$OPENAI_API_KEY $OPENAI_API_BASE_URL"'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "it's secret http://127.0.0.1:3000/v1\n"


ANSWERS: dict[str, Any] = {
    "/v1/models": {"data": [{"id": "demo", "max_model_len": 2048}, {"id": "adapter"}]},
    "/info": {"has_chat_template": True},
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wants_key = self.headers.get("authorization") == "Bearer wrong"
            self.send_response(401 if wants_key else 200)
            self.end_headers()
            self.wfile.write(json.dumps(ANSWERS[self.path]).encode())

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_file_is_written_and_what_was_there_is_kept(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {"CODEX_HOME": str(tmp_path / "codex")}
    place = tmp_path / "codex" / "config.toml"
    assert run_client(ClientConfig(client="codex", url=f"{url}/v1", yes=True), environ) == 0
    assert tomllib.loads(place.read_text())["model_context_window"] == 2048
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert "Now run: codex" in capsys.readouterr().err
    place.chmod(0o640)
    first = place.read_text()
    for model, kept in (("adapter", "config.toml.before-tercet"), ("demo", "config.toml.before-tercet-2")):
        assert run_client(ClientConfig(client="codex", url=url, yes=True, model=model), environ) == 0
        assert kept in capsys.readouterr().err
    assert (place.parent / "config.toml.before-tercet").read_text() == first == place.read_text()
    assert stat.S_IMODE(place.stat().st_mode) == 0o640
    assert run_client(ClientConfig(client="codex", url=url), environ) == 0
    assert "has these settings already" in capsys.readouterr().err
    assert len(list(place.parent.iterdir())) == 3


def test_a_mark_before_the_text_and_a_file_that_is_read_only(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "settings.json"
    place.write_text('{"theme": "dark"}', encoding="utf-8-sig")
    place.chmod(0o444)
    config, environ = ClientConfig(client="claude", url=url, yes=True), {"CLAUDE_CONFIG_DIR": str(tmp_path)}
    assert run_client(config, environ) == 1
    assert f"{place} is read-only: make it writable" in capsys.readouterr().err
    place.chmod(0o644)
    assert run_client(config, environ) == 0
    assert json.loads(place.read_text(encoding="utf-8"))["theme"] == "dark"


def test_printed_and_not_written(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"CLAUDE_CONFIG_DIR": str(tmp_path / "claude")}
    assert run_client(ClientConfig(client="claude", url=url, print=True), environ) == 0
    assert json.loads(capsys.readouterr().out)["env"]["ANTHROPIC_BASE_URL"] == url
    assert not (tmp_path / "claude").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "nope"}, "has no model nope (it lists: demo, adapter)"),
        ({"api_key": "wrong"}, "wants a key"),
        ({"url": "http://127.0.0.1:1"}, "no server answers at http://127.0.0.1:1 (Connection refused): start one with"),
        ({"url": "http://"}, "is not the address of a server"),
    ],
)
def test_a_server_that_cannot_be_used(
    url: str, options: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_client(ClientConfig(**({"client": "claude", "url": url} | options)), {"HOME": str(tmp_path)}) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_base_model_is_refused(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(ANSWERS, "/info", {"has_chat_template": False})
    assert run_client(ClientConfig(client="claude", url=url), {}) == 1
    assert "demo has no chat template" in capsys.readouterr().err


def test_a_model_that_generates_no_text(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(ANSWERS, "/info", {"task": "embed"})
    assert run_client(ClientConfig(client="claude", url=url, print=True), {"HOME": str(tmp_path)}) == 1
    assert "demo generates no text (its task is embed): serve a chat model" in capsys.readouterr().err
    monkeypatch.setitem(ANSWERS, "/info", {"task": "generate"})
    cards = [{"id": "vectors", "task": "embed"}, {"id": "chat", "task": "generate"}]
    monkeypatch.setitem(ANSWERS, "/v1/models", {"data": cards})
    assert run_client(ClientConfig(client="claude", url=url, print=True), {"HOME": str(tmp_path)}) == 0
    assert '"ANTHROPIC_DEFAULT_OPUS_MODEL": "chat"' in capsys.readouterr().out


@pytest.mark.parametrize(("answer", "status"), [("y", 0), ("n", 1), ("", 1)])
def test_the_question(url: str, answer: str, status: int, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "launch", "claude", "--url", url], stdin=theirs, capture_output=True,
        text=True, timeout=60, env={**os.environ, "CLAUDE_CONFIG_DIR": str(tmp_path)},
    )  # fmt: skip
    os.close(ours)
    os.close(theirs)
    assert done.returncode == status
    assert f"Write this to {tmp_path}/settings.json? [y/N]" in done.stdout
    assert (tmp_path / "settings.json").exists() == (status == 0)
