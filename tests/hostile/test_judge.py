"""The judge sees harm where there is some."""

from __future__ import annotations

import time

import pytest

from tests.hostile import judge
from tests.hostile.api import judged


def test_failures_and_hangs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "DEADLINE_S", 0.05)
    tally = judge.Tally("surface")
    with pytest.raises(AssertionError, match="nothing was tried"):
        tally.check()
    tally.take("good", lambda: "400")
    tally.check()
    tally.take("crash", lambda: str(1 / 0))
    with pytest.raises(AssertionError, match="crash: ZeroDivisionError"):
        tally.check()
    tally.failures.clear()
    tally.take("sleeper", lambda: str(time.sleep(60)))
    with pytest.raises(AssertionError, match="sleeper"):
        tally.check()
    assert (tally.num_inputs, tally.outcomes) == (2, {"400": 1})


@pytest.mark.parametrize(("status", "content"), [(500, b""), (503, b""), (200, b'data: {"error": "internal_error"}')])
def test_server_errors_are_failures(status: int, content: bytes) -> None:
    with pytest.raises(judge.FailureError):
        judged(status, content, "it")
    assert judged(400, b"{}", "it") == "400"
