"""The event log, read from its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from speculator.versions.lifecycle import EventLog


@pytest.mark.parametrize("block_bytes", [1, 16, 100, 1 << 20])
def test_the_newest_come_first_however_the_file_is_read(
    tmp_path: Path, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speculator.versions.lifecycle._BLOCK_BYTES", block_bytes)
    monkeypatch.setattr("speculator.versions.lifecycle._MAX_BYTES", 600)
    log = EventLog(tmp_path)
    assert log.tail(3) == []
    for number in range(9):
        log.append("kind", actor="test", number=number, text="ä" * number)
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"at_ms": 1, "ki')  # what a crash cut short
    assert (tmp_path / "events.1.jsonl").exists()
    assert [event.fields["number"] for event in log.tail(7)] == [2, 3, 4, 5, 6, 7, 8]
    log.append("kind", actor="test", number=9)
    assert [event.fields["number"] for event in log.tail(2)] == [8, 9]
