"""The unmodified client libraries, and a browser, against one running server; `make test-clients`.

Their pins exclude each other, so each group has a virtual environment of its own below `.venv-clients`, made of the
exact versions in `requirements`. The tests of a group lie in the folder of the group's name and learn the servers'
addresses from variables: TERCET_URL is a server with the demo model, TERCET_FAULTY_URL a router that demands a key and
fails on demand (see `faulty_router`), TERCET_AGENT_URL, for the groups that need it, a server with the model of
`support/agent_model.py`, TERCET_EMBED_URL, TERCET_RERANK_URL and TERCET_CLASSIFY_URL servers with tiny random models
of those tasks. The browser is Debian's chromium; where there is none its group is skipped.
Packages of Node.js are those of `package-lock.json` in the group's folder; without npm, or its registry, that group is
skipped. A group that needs torch gets the one of `constraints.txt` for CPUs.

With SHORT=1 the groups marked as long are left out; ONLY="codex opencode" names the groups to run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / ".venv-clients"
MAX_CONCURRENT = 6
START_LIMIT_S = 60.0
INSTALL_LIMIT_S = 900.0
TEST_LIMIT_S = 600.0
NODE_FILES = ("package.json", "package-lock.json")
KEY = "a-key"


@dataclass(frozen=True)
class Group:
    """Clients that can be installed together."""

    name: str
    clients: str
    is_long: bool = False
    needs_torch: bool = False
    needs_agent_model: bool = False
    needs_text_models: bool = False


GROUPS = (
    Group("newest", "huggingface_hub 2, openai 3, langchain-openai"),
    Group("older_hub", "text-generation, huggingface_hub 0.36, langchain-huggingface"),
    Group("anthropic_sdk", "anthropic"),
    Group("agent_libraries", "pydantic-ai, openai-agents"),
    Group("browser", "the page at / in Chromium", is_long=True),
    Group("instructor_client", "instructor", is_long=True),
    Group("codex", "Codex", is_long=True, needs_agent_model=True),
    Group("claude_code", "Claude Code", is_long=True, needs_agent_model=True),
    Group("opencode", "opencode", is_long=True, needs_agent_model=True),
    Group("open_webui", "Open WebUI", is_long=True, needs_torch=True),
    Group("ai_sdk", "the AI SDK for JavaScript", is_long=True),
    Group("envoy", "two servers behind Envoy", is_long=True),
    Group("ray_serve", "two replicas of Ray Serve", is_long=True),
    Group("older_openai", "litellm, openai 2, huggingface_hub 1", is_long=True),
    Group(
        "embedders", "openai, cohere, LangChain, LlamaIndex, litellm, Haystack", is_long=True, needs_text_models=True
    ),
    Group("lm_evaluation", "lm_eval on a published model", is_long=True, needs_torch=True),
)


@dataclass(frozen=True)
class Outcome:
    """What came of a group; times in seconds."""

    group: Group
    result: str
    has_passed: bool
    install_s: float
    test_s: float


def main() -> int:
    """Returns 0 if every test of every group has passed. Arguments go to pytest."""
    sys.path.insert(0, str(HERE.parent))
    from support.running_server import running_server

    is_short = os.environ.get("SHORT", "") not in ("", "0")
    only = os.environ.get("ONLY", "").split()
    if unknown := set(only) - {group.name for group in GROUPS}:
        sys.exit(f"error: no groups {', '.join(sorted(unknown))}; there are {', '.join(one.name for one in GROUPS)}")
    groups = [group for group in GROUPS if group.name in only or (not only and not (is_short and group.is_long))]
    options = ("--max-concurrent-requests", str(MAX_CONCURRENT), "--enable-prefill-logprobs")
    with running_server("demo", *options) as server, faulty_router() as faulty_url, contextlib.ExitStack() as others:
        addresses = {"TERCET_URL": server.url, "TERCET_FAULTY_URL": faulty_url, "TERCET_KEY": KEY}
        if any(group.needs_agent_model for group in groups):
            addresses["TERCET_AGENT_URL"] = others.enter_context(agent_server())
        if any(group.needs_text_models for group in groups):
            addresses |= others.enter_context(text_servers())
        addresses["TERCET_PYTHON"] = sys.executable
        addresses["TERCET_SCREENSHOTS"] = str(ENVIRONMENTS / "screenshots")
        outcomes = [tried(group, addresses | {"TERCET_PERMITS": str(MAX_CONCURRENT)}, sys.argv[1:]) for group in groups]
    print(table(outcomes))
    return 0 if all(outcome.has_passed for outcome in outcomes) else 1


@contextlib.contextmanager
def agent_server() -> Iterator[str]:
    """The address of a server with the model of `support/agent_model.py`."""
    from support.agent_model import write_agent_model
    from support.running_server import running_server

    with tempfile.TemporaryDirectory(prefix="tercet-agent-") as folder:
        write_agent_model(Path(folder))
        with running_server(folder, "--tool-call-parser", "hermes") as server:
            yield server.url


@contextlib.contextmanager
def text_servers() -> Iterator[dict[str, str]]:
    """The addresses of a server for vectors, one for scores and one for labels."""
    from support.encoder_models import write_model, write_sentence_files
    from support.running_server import running_server

    kind = "AutoModelForSequenceClassification"
    with contextlib.ExitStack() as stack:
        embed, rerank, classify = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tercet-texts-"))) for _ in range(3)
        )
        write_model(embed, "bert")
        write_sentence_files(embed, prompts={"query": "query "})
        write_model(rerank, "roberta", kind=kind, num_labels=1)
        write_model(classify, "distilbert", kind=kind, id2label={0: "bad", 1: "so-so", 2: "good"})
        folders = {"EMBED": embed, "RERANK": rerank, "CLASSIFY": classify}
        yield {
            f"TERCET_{name}_URL": stack.enter_context(running_server(folder)).url for name, folder in folders.items()
        }


@contextlib.contextmanager
def faulty_router() -> Iterator[str]:
    """The address of a `faulty_router` process."""
    from support.running_server import free_port

    port = free_port()
    path = os.pathsep.join(filter(None, (str(HERE.parent / "unit" / "router"), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, str(HERE / "faulty_router.py"), str(port), KEY], env=os.environ | {"PYTHONPATH": path}
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def tried(group: Group, addresses: dict[str, str], arguments: list[str]) -> Outcome:
    """Installs the group's environment if that has not been done, and runs its tests."""
    print(f"\n=== {group.name}: {group.clients}", flush=True)
    began = time.monotonic()
    try:
        python = installed(group)
    except UnreachableError as error:
        return Outcome(group, f"skipped: {error}", True, time.monotonic() - began, 0.0)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        return Outcome(group, f"not installed: {error}", False, time.monotonic() - began, 0.0)
    ready = time.monotonic()
    command = [str(python), "-m", "pytest", "-c", str(HERE / "pytest.ini"), "--rootdir", str(HERE), *arguments]
    try:
        status = subprocess.run(
            [*command, str(HERE / group.name)], env=environment(addresses), cwd=HERE, timeout=TEST_LIMIT_S
        ).returncode
        result = "passed" if status == 0 else f"failed (pytest: {status})"
    except subprocess.TimeoutExpired:
        status, result = 1, f"not done after {TEST_LIMIT_S:g} s"
    return Outcome(group, result, status == 0, ready - began, time.monotonic() - ready)


def installed(group: Group) -> Path:
    """The interpreter of the group's environment. Raises CalledProcessError, TimeoutExpired or UnreachableError."""
    requirements = HERE / "requirements" / f"{group.name}.txt"
    of_node = [path for path in (HERE / group.name / name for name in NODE_FILES) if path.is_file()]
    of_torch = [ROOT / "constraints.txt"] if group.needs_torch else []
    npm = shutil.which("npm") if of_node else None
    folder = ENVIRONMENTS / group.name
    mark = folder / ".installed"
    lists = [requirements, *of_torch, *(of_node if npm else [])]
    wanted = hashlib.sha256(b"".join(path.read_bytes() for path in lists)).hexdigest()
    python = folder / "bin" / "python"
    if mark.is_file() and mark.read_text() == wanted:
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, timeout=INSTALL_LIMIT_S)
    if group.needs_torch:
        torch = [str(python), str(ROOT / "environment" / "install_torch.py"), "--build", "cpu"]
        subprocess.run(torch, check=True, timeout=INSTALL_LIMIT_S)
    # The list is complete: what it does not name is not installed, another torch least of all.
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*install, "-r", str(requirements)], check=True, timeout=INSTALL_LIMIT_S)
    subprocess.run([str(python), "-m", "pip", "check", "--quiet"], check=True, timeout=INSTALL_LIMIT_S)
    if npm:
        for path in of_node:
            shutil.copy(path, folder)
        install_from_npm(npm, folder)
    mark.write_text(wanted)
    return python


class UnreachableError(Exception):
    """npm's registry is not there."""


def install_from_npm(npm: str, folder: Path) -> None:
    """Raises CalledProcessError, TimeoutExpired, or UnreachableError if the registry knows nothing of npm either."""
    # Not `ci`, which asks of the registry what other platforms would install, too, and fails where that is not there.
    command = [npm, "install", "--no-save", "--no-audit", "--no-fund", "--loglevel=error"]
    try:
        subprocess.run(command, cwd=folder, check=True, timeout=INSTALL_LIMIT_S)
    except subprocess.CalledProcessError:
        asked = [npm, "view", "npm", "version", "--fetch-retries=0", "--prefer-online"]
        if subprocess.run(asked, capture_output=True, timeout=INSTALL_LIMIT_S).returncode:
            raise UnreachableError("npm does not reach its registry") from None
        raise


def environment(addresses: dict[str, str]) -> dict[str, str]:
    """A user's environment: no offline mode, no token, no proxy, none of the project's paths."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "OPENAI_", "PYTHON"))}
    quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
    quiet["HAYSTACK_TELEMETRY_ENABLED"] = "False"
    home = {"HF_HOME": str(ENVIRONMENTS / "hf-home"), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    return kept | quiet | home | addresses


def table(outcomes: list[Outcome]) -> str:
    lines = [f"{'group':<16}{'install':>9}{'tests':>9}  result", "-" * 62]
    for one in outcomes:
        lines.append(
            f"{one.group.name:<16}{one.install_s:>7.0f} s{one.test_s:>7.0f} s  {one.result}: {one.group.clients}"
        )
    return "\n" + "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
