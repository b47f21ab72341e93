"""Addresses of collectors, missing packages, contexts from outside, and an end that never waits long."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
from support.recorded_spans import RecordedSpans, id_of, parent_of

from wire import tracing
from wire.tracing import Tracing, TracingError, check, current, end, inside

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def recorded() -> RecordedSpans:
    return RecordedSpans()


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("http://127.0.0.1:4317", ("127.0.0.1:4317", False)),
        ("https://collector.example:443", ("collector.example:443", True)),
        ("http://collector", ("collector:4317", False)),
        ("collector:4317", ("collector:4317", False)),
        ("http://[::1]:4317/", ("[::1]:4317", False)),
    ],
)
def test_addresses(endpoint: str, address: tuple[str, bool]) -> None:
    assert tracing._address(endpoint) == address
    check(endpoint)


@pytest.mark.parametrize(
    "endpoint", ["", "http://", "ftp://x:1", "http://x:y", "http://x:99999", "a b", "http://x:0", "http://u:p@x:1"]
)
def test_what_is_no_address_is_refused(endpoint: str) -> None:
    with pytest.raises(TracingError, match="--otlp-endpoint"):
        check(endpoint)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check(None)
    for name in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc"):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, name, None)
            check(None)
            with pytest.raises(TracingError, match=r"pip install 'tercet\[trace\]'"):
                check("http://127.0.0.1:4317")
            with pytest.raises(TracingError):
                Tracing.to_collector("http://127.0.0.1:4317", "x")


@pytest.mark.parametrize("command", [["router"], ["model_server", "serve", "demo"], ["launcher", "--model-id", "demo"]])
def test_each_process_says_so_in_one_line(command: list[str]) -> None:
    code = (
        "import sys, runpy; sys.modules['opentelemetry.sdk'] = None; "
        f"sys.argv = {[command[0], *command[1:], '--otlp-endpoint', 'http://127.0.0.1:1']!r}; "
        f"runpy.run_module({command[0]!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "tercet[trace]" in line]
    assert len(lines) == 1 and "Traceback" not in done.stdout + done.stderr


def test_nothing_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, router.server.server, model_server.rpc.server; "
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_traceparent_becomes_the_parent(recorded: RecordedSpans) -> None:
    remote = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
    span = recorded.tracing.start("a", kind="server", remote=remote)
    metadata = dict(recorded.tracing.metadata(span))
    end(span)
    assert metadata["traceparent"] == f"00-{TRACE}-{id_of(span):016x}-01"
    assert metadata["tracestate"] == "vendor=1"
    assert f"{parent_of(recorded.one('a')):016x}" == SPAN


def test_a_parent_that_is_not_sampled_is_traced_too(recorded: RecordedSpans) -> None:
    end(recorded.tracing.start("a", remote={"traceparent": f"00-{TRACE}-{SPAN}-00"}))
    assert parent_of(recorded.one("a"))


@pytest.mark.parametrize(
    "text",
    [
        "", "x", f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more", f"00-{TRACE[:-1]}-{SPAN}-01", f"00-{'g' * 32}-{SPAN}-01", "\x00" * 55, "é" * 55,
    ],
)  # fmt: skip
def test_a_malformed_traceparent_is_ignored(recorded: RecordedSpans, text: str) -> None:
    end(recorded.tracing.start("a", remote={"traceparent": text}))
    assert parent_of(recorded.one("a")) == 0


def test_an_errors_text_is_not_told(recorded: RecordedSpans) -> None:
    end(recorded.tracing.start("a"), ValueError("a prompt"))
    (span,) = recorded.all()
    assert span.status.status_code.name == "ERROR" and span.status.description == "ValueError"
    assert "prompt" not in span.to_json()


def test_the_current_span(recorded: RecordedSpans) -> None:
    outer, inner = recorded.tracing.start("a"), recorded.tracing.start("b")
    with inside(outer):
        with inside(inner):
            assert current.get() is inner
        assert current.get() is outer
    assert current.get() is None


def test_a_collector_that_is_down_does_not_hold_up_the_end(caplog: pytest.LogCaptureFixture) -> None:
    made = Tracing.to_collector("http://127.0.0.1:9", "x")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            end(made.start("a"))
        made.close()
    assert len([record for record in caplog.records if record.name.startswith("opentelemetry")]) <= 2
