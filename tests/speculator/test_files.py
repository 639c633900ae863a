"""A JSON value a line, whatever the values hold."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculator.errors import ConfigError
from speculator.host import json_line, read_json_lines, split_lines, sync

EVERY_END = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
VALUES = st.dictionaries(
    st.text(), st.text(EVERY_END + 'a"\\é😀') | st.integers(-(2**63), 2**63) | st.none(), max_size=4
)


def read(path: Path) -> dict[int, dict[str, Any]]:
    return dict(read_json_lines(path, dict[str, Any], example='{"a": 1}'))


@settings(max_examples=50, deadline=None)
@given(st.lists(VALUES, max_size=5), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_a_file_is_read_by_its_line_feeds(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any], end: str, bom: bool
) -> None:
    """As others write it: with text as it is, or from Windows."""
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    text = end.join(json.dumps(value, ensure_ascii=False) for value in values)
    path.write_bytes(text.encode("utf-8-sig" if bom else "utf-8"))
    assert read(path) == dict(enumerate(values, 1))


@given(VALUES)
def test_what_is_written_is_one_line_to_every_reader(value: dict[str, Any]) -> None:
    line = json_line(value)
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line) == value


@given(st.lists(st.binary().filter(lambda line: b"\n" not in line), max_size=5), st.integers(1, 9))
def test_a_stream_is_cut_by_its_line_feeds(lines: list[bytes], size: int) -> None:
    sent = b"".join(line + b"\n" for line in lines) + b"cut off"
    parts = [sent[at : at + size] for at in range(0, len(sent), size)]
    assert list(split_lines(parts)) == lines


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{}\n\n{"a":', "line 3 is not JSON"),
        (b"[1]", r"line 1 does not fit \(Expected `object`"),
        (b'{}\n{"a": ' + b"[" * 200_000, "line 2 is not JSON"),
        (b'{"a": NaN}', "line 1 is not JSON"),
        (b'{"a": 1e999}', "line 1 does not fit"),
        (b'{"a": "\\ud800"}', r"line 1 is not JSON \(an escape that is half a character\)"),
        (b'{"a": "\\ud83d\\ude00 \\udE00"}', "half a character"),
        (b'{}\n{"a": "\xe9"}', "line 2 is not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "line 1 is not UTF-8"),
        ('{"a": 1}'.encode("utf-16-le"), "line 1 holds null bytes, as UTF-16 does"),
        ('{"a": "\u2028"}\u2028{}'.encode(), "line 1 is not JSON"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as refusal:
        read(path)
    assert str(refusal.value).startswith(f"{path}, line ")
    assert str(refusal.value).endswith('write one JSON object a line, like {"a": 1}')
    assert len(str(refusal.value).splitlines()) == 1


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match=f"^{path} cannot be read"):
            read(path)


def test_a_folder_that_cannot_be_flushed_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in shared folders of VirtualBox; a file that cannot be flushed may be lost."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) or is_broken:
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    is_broken = False
    monkeypatch.setattr(os, "fsync", fsync)
    (tmp_path / "file").touch()
    sync(tmp_path)
    sync(tmp_path / "file")
    is_broken = True
    with pytest.raises(OSError, match="Invalid argument"):
        sync(tmp_path / "file")
