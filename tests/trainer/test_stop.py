"""A trainer hears that it is to end whatever its main thread does."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from tests.fixtures.waiting import wait_until
from trainer.process import stop_on_signals


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_heard_while_the_main_thread_is_busy_outside_python(number: int) -> None:
    stop, stopped_s = stop_on_signals(), []

    def end() -> None:
        os.kill(os.getpid(), number)
        if stop.wait(20):
            stopped_s.append(time.monotonic())

    thread = threading.Thread(target=end)
    thread.start()
    # As a backward pass does, this computes without a look at signals, and lets other threads run.
    hashlib.pbkdf2_hmac("sha256", b"words", b"salt", 500_000)
    ended_s = time.monotonic()
    thread.join()
    assert stopped_s
    assert stopped_s[0] < ended_s


def test_other_signals_end_nothing() -> None:
    stop, heard = stop_on_signals(), []
    kept = signal.signal(signal.SIGUSR2, lambda *_: heard.append(True))
    try:
        signal.raise_signal(signal.SIGUSR2)
        wait_until(lambda: heard)
        assert not stop.wait(0.05)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop.wait(10)
    finally:
        signal.signal(signal.SIGUSR2, kept)


def test_a_closed_terminal_ends_nothing_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop_on_signals()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
