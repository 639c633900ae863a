"""An operator's own filter: what it is asked, what becomes of its answer, and names that cannot be used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import structlog

from serving.capture.filter import FILTER_REASONS, CaptureFilter
from serving.capture.recorder import DROP_REASONS, TraceRecorder
from speculator.errors import ConfigError
from speculator.trace import Trace
from tests.fixtures.toy import toy_tokenizer
from tests.fixtures.traces import make_trace
from tests.fixtures.waiting import wait_until

MODULE = """
asked = []

def keep(text, tenant):
    asked.append((text, tenant))
    if text == "fail":
        raise ValueError(text)
    if text == "exit":
        raise SystemExit(text)
    if text == "panic":
        raise BaseException(text)
    if text == "undecided":
        return None
    return "card" not in text and tenant != "clinic"

no_function = 1
"""


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    toy_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(autouse=True)
def _importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of an operator's own."""
    (tmp_path / "an_operators_filter.py").write_text(MODULE)
    (tmp_path / "a_broken_filter.py").write_text("raise RuntimeError('no\\nmodel')")
    monkeypatch.syspath_prepend(str(tmp_path))


class Stream:
    """A stream that remembers what was appended."""

    max_bytes = 1 << 20

    def __init__(self) -> None:
        self.written: list[str] = []

    def append(self, payload: bytes, *, trace_id: str) -> str:
        self.written.append(trace_id)
        return "1-0"


def trace_of(text: str, *, tenant: str = "default") -> Trace:
    tokenizer = toy_tokenizer()
    made = make_trace(T=len(text), R=1, labelled_from=0, trace_id=text, tenant=tenant)
    made.token_ids[:] = np.array([tokenizer.convert_tokens_to_ids(character) for character in text], np.int32)
    return made


def test_the_recorder_drops_what_the_filter_refuses_or_fails_at(
    model_dir: Path,
) -> None:
    stream, keep = Stream(), CaptureFilter.load("an_operators_filter:keep", model_dir)
    assert keep is not None
    recorder = TraceRecorder(stream, max_buffer_bytes=1 << 30, reason_to_drop=keep.reason_to_drop)
    with structlog.testing.capture_logs() as lines:
        for text in ("plain", "a card", "fail", "exit", "panic", "undecided", "also plain"):
            recorder.submit(trace_of(text))
        recorder.submit(trace_of("not of theirs", tenant="clinic"))
        wait_until(lambda: recorder.stats().pending == 0)
    assert stream.written == ["plain", "also plain"]
    assert recorder.stats().dropped_by_reason == {"filtered": 2, "filter_failed": 4}
    assert set(FILTER_REASONS) <= set(DROP_REASONS)
    recorder.close(5)
    from an_operators_filter import asked  # type: ignore[import-not-found]

    assert asked[0] == ("plain", "default")
    assert asked[-1] == ("not of theirs", "clinic")
    told = str(lines)
    assert told.count("the capture filter") == 4
    assert "an_operators_filter.py:7" in told
    assert "ValueError: fail" not in told
    assert "panic" not in told


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("an_operators_filter", "write MODULE:FUNCTION"),
        ("an_operators_filter:", "write MODULE:FUNCTION"),
        ("an_operators_filter:keep()", "write MODULE:FUNCTION"),
        ("/srv/filter.py:keep", "write MODULE:FUNCTION"),
        ("no_such_filter:keep", "No module named 'no_such_filter'"),
        ("an_operators_filter:kept", "cannot be imported"),
        ("a_broken_filter:keep", "RuntimeError: no model"),
        ("an_operators_filter:no_function", "is not a function"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused_in_one_line(name: str, told: str, model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="SLIPSTREAM_CAPTURE_FILTER") as refused:
        CaptureFilter.load(name, model_dir)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_target_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no readable tokenizer\.json"):
        CaptureFilter.load("an_operators_filter:keep", tmp_path)


def test_who_still_asks_for_the_former_filter_is_told_before_anything_leaves(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_DROP_PERSONAL_DATA", "1")
    with pytest.raises(ConfigError, match="SLIPSTREAM_CAPTURE_FILTER"):
        CaptureFilter.load(None, model_dir)
    for off in ("0", "", "False", " no ", "OFF"):
        monkeypatch.setenv("SLIPSTREAM_DROP_PERSONAL_DATA", off)
        assert CaptureFilter.load(None, model_dir) is None
