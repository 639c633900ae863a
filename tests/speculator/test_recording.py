"""Recordings: whole, cut off anywhere, altered anywhere, continued."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speculator.errors import ConfigError
from speculator.recording import RecordingHeader, RecordingReader, RecordingWriter
from speculator.trace import encode_trace
from tests.fixtures.traces import make_trace

HEADER = RecordingHeader(target_fingerprint="f" * 64, model="toy", created_ms=1, note="a note")
NUM_TRACES = 4
PAYLOADS = [encode_trace(make_trace(seed, trace_id=f"trace-{seed}")) for seed in range(NUM_TRACES)]


def write(path: Path, payloads: list[bytes], header: RecordingHeader = HEADER) -> Path:
    with RecordingWriter(path, header) as writer:
        for index, payload in enumerate(payloads):
            writer.append(payload, trace_id=f"trace-{index}")
    return path


def read(path: Path) -> tuple[list[str], int, int]:
    """(trace ids, damaged entries, bytes cut off)."""
    with RecordingReader(path) as reader:
        ids = [trace.header.trace_id for trace in reader.traces()]
        return ids, reader.num_damaged, reader.num_cut_bytes


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write(tmp_path / "whole.rec", PAYLOADS)


def test_what_was_written_is_read(whole: Path) -> None:
    with RecordingReader(whole) as reader:
        assert reader.header == HEADER
        assert list(reader.payloads()) == PAYLOADS
    assert read(whole) == ([f"trace-{index}" for index in range(NUM_TRACES)], 0, 0)


def test_an_empty_recording_has_a_header_and_nothing_else(tmp_path: Path) -> None:
    assert read(write(tmp_path / "empty.rec", [])) == ([], 0, 0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_file_that_is_cut_off_loses_only_its_last_entry(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = whole.read_bytes()
    begin = len(content) - sum(8 + len(payload) for payload in PAYLOADS)
    length = data.draw(st.integers(begin, len(content)))
    short = tmp_path / "short.rec"
    short.write_bytes(content[:length])
    ends = [begin + sum(8 + len(payload) for payload in PAYLOADS[: count + 1]) for count in range(NUM_TRACES)]
    complete = [end for end in ends if end <= length]
    expected = [f"trace-{index}" for index in range(len(complete))]
    assert read(short) == (expected, 0, length - max(complete, default=begin))
    with RecordingWriter(short, HEADER) as writer:
        assert writer.known_ids == set(expected)
        assert writer.num_removed_bytes == length - max(complete, default=begin)
        writer.append(PAYLOADS[3], trace_id="trace-3")
    assert read(short) == ([*expected, "trace-3"], 0, 0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(data=st.data())
def test_an_altered_byte_never_makes_another_trace(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(whole.read_bytes())
    begin = len(content) - sum(8 + len(payload) for payload in PAYLOADS)
    content[data.draw(st.integers(begin, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    altered = tmp_path / "altered.rec"
    altered.write_bytes(bytes(content))
    with RecordingReader(altered) as reader:
        found = list(reader.payloads())
        assert all(payload in PAYLOADS for payload in found)
        assert len(found) < NUM_TRACES
        assert reader.num_damaged or reader.num_cut_bytes


def test_nothing_is_appended_behind_damage(whole: Path) -> None:
    content = bytearray(whole.read_bytes())
    content[-len(PAYLOADS[3]) - 20] ^= 1
    whole.write_bytes(bytes(content))
    assert read(whole)[1] == 1
    with pytest.raises(ConfigError, match="damaged"):
        RecordingWriter(whole, HEADER)
    assert whole.read_bytes() == bytes(content)


def test_traces_of_another_target_are_passed_over_and_counted(tmp_path: Path) -> None:
    other = encode_trace(make_trace(9, trace_id="other", target_fingerprint="0" * 64))
    path = write(tmp_path / "mixed.rec", [PAYLOADS[0], other, b"not a trace", PAYLOADS[1]])
    assert read(path) == (["trace-0", "trace-1"], 2, 0)


def test_another_target_does_not_continue_a_recording(whole: Path) -> None:
    with pytest.raises(ConfigError, match="another target"):
        RecordingWriter(whole, msgspec.structs.replace(HEADER, target_fingerprint="0" * 64))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a recording"),
        (b"PK\x03\x04 something else", "not a recording"),
        (b"slip-rec", "cut off"),
        (b"slip-rec\xff\xff\xff\xff", "cut off"),
        (b"slip-rec\x05\x00\x00\x00abc", "not valid"),
        (b"slip-rec\x01\x00\x00\x00\x80", "not valid"),
    ],
)
def test_what_is_not_a_recording_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        RecordingReader(path)


def test_another_format_version_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "future.rec", PAYLOADS, msgspec.structs.replace(HEADER, format_version=2))
    with pytest.raises(ConfigError, match="format version 2"):
        RecordingReader(path)


def test_a_file_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        RecordingReader(tmp_path / "missing.rec")
    with pytest.raises(ConfigError, match="cannot write"):
        RecordingWriter(tmp_path / "no" / "folder.rec", HEADER)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which is always out of space")
def test_a_full_disk_is_said() -> None:
    with pytest.raises(ConfigError, match="space"):
        write(Path("/dev/full"), PAYLOADS * 10)
