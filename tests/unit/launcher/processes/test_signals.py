"""Signals end a wait, and the handlers of before come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from launcher.processes.signals import ECHO_S, Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_wait(number: signal.Signals, request: pytest.FixtureRequest) -> None:
    # Whoever runs the tests may ignore it (nohup does), and Signals leaves an ignored SIGHUP alone.
    before = signal.signal(number, signal.SIG_DFL)
    request.addfinalizer(lambda: signal.signal(number, before))
    with Signals() as signals:
        timer = threading.Timer(0.05, os.kill, (os.getpid(), number))
        timer.start()
        began = time.monotonic()
        signals.wait(120)
        assert time.monotonic() - began < 60
        timer.join()
        assert signals.received == [number]


def test_the_end_of_a_child_ends_a_wait() -> None:
    with Signals() as signals:
        process = subprocess.Popen([sys.executable, "-S", "-c", "pass"])
        began = time.monotonic()
        signals.wait(120)
        assert time.monotonic() - began < 60
        assert signals.received == []
        process.wait()


def test_a_change_is_told_once_and_stops_nothing() -> None:
    with Signals() as signals:
        assert not signals.pop_change()
        os.kill(os.getpid(), signal.SIGUSR2)
        signals.wait(30)
        assert signals.pop_change() and not signals.pop_change()
        assert not signals.pop() and signals.received == []


def test_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)]
    with Signals():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)]
    assert after == before


def test_an_ignored_hang_up_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            signals.wait(0.01)
            assert signals.received == []
    finally:
        signal.signal(signal.SIGHUP, before)


def test_notify() -> None:
    signals = Signals()
    signals.notify(15)
    signals.notify(2)
    signals.wait(120)
    signals.wait(0)
    assert signals.received == [15, 2]
    signals.close()


def test_an_echo_of_a_signal_is_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("launcher.processes.signals.time", SimpleNamespace(monotonic=lambda: now))
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        signals.wait(0)
        assert signals.received == [signal.SIGTERM]
        now += 2 * ECHO_S
        os.kill(os.getpid(), signal.SIGTERM)
        signals.wait(0)
        assert signals.received == [signal.SIGTERM] * 2
        os.kill(os.getpid(), signal.SIGINT)
        signals.wait(0)
        assert signals.received == [signal.SIGTERM, signal.SIGTERM, signal.SIGINT], "another one is a wish of its own"


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "signal")])
def test_what_a_second_one_does_is_said(number: int, word: str) -> None:
    signals = Signals()
    signals.notify(number)
    assert signals.remark == f"a second {word} ends everything now"
    signals.close()
