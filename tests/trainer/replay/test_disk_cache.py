"""Encoded traces on disk: put, taken over, removed; and a disk that refuses."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from speculator.errors import StoreError
from speculator.host import sync
from trainer.replay.trace_source import TraceFiles


def test_what_was_put_is_there_for_the_next_process(tmp_path: Path) -> None:
    folder = tmp_path / "replay"
    assert TraceFiles(folder).take_over("a") is None
    TraceFiles(folder).put("a", b"first")
    TraceFiles(folder).put("a", b"again")
    TraceFiles(folder).put("../../etc/b", b"a producer's word")
    assert TraceFiles(folder).take_over("a") == b"again"
    assert TraceFiles(folder).take_over("../../etc/b") == b"a producer's word"
    assert len(list(folder.iterdir())) == 2
    assert list(tmp_path.iterdir()) == [folder]


def test_a_process_removes_what_it_put_or_took_over_and_nothing_else(tmp_path: Path) -> None:
    one, other = TraceFiles(tmp_path), TraceFiles(tmp_path)
    for trace_id in "abc":
        one.put(trace_id, b"")
    other.put("d", b"")
    other.keep([])
    one.keep(["b"])
    left = TraceFiles(tmp_path)
    assert [left.take_over(trace_id) is not None for trace_id in "abcd"] == [False, True, False, False]
    left.keep([])
    assert list(tmp_path.iterdir()) == []


def test_a_start_sweeps_what_no_checkpoint_lists(tmp_path: Path) -> None:
    shelf = TraceFiles(tmp_path / "replay")
    shelf.sweep([])
    for trace_id in "ab":
        shelf.put(trace_id, b"")
    (tmp_path / "replay" / "x.123.tmp").write_bytes(b"half")
    # Stands for what cannot be unlinked, as NFS keeps a removed file that somebody has open.
    (tmp_path / "replay" / ".nfs0001").mkdir()
    TraceFiles(tmp_path / "replay").sweep(["b"])
    (tmp_path / "replay" / ".nfs0001").rmdir()
    assert len(list((tmp_path / "replay").iterdir())) == 1
    assert shelf.take_over("b") == b""


def test_what_a_checkpoint_lists_is_synced_once(tmp_path: Path) -> None:
    synced: list[Path] = []
    shelf = TraceFiles(tmp_path, synced.append)
    for trace_id in "abc":
        shelf.put(trace_id, b"")
    shelf.sync(["a", "b", "unknown"])
    shelf.sync(["a", "b"])
    assert (len(synced), len(set(synced)), synced[-1]) == (3, 3, tmp_path)
    shelf.keep("ab")
    shelf.put("a", b"again")
    shelf.sync(["a", "c"])
    assert len(synced) == 5, "what was removed needs nothing"


def test_a_disk_that_refuses_is_no_failure(tmp_path: Path) -> None:
    failures = [OSError(errno.EIO, "Input/output error")]

    def refuse_once(_: Path) -> None:
        if failures:
            raise failures.pop()

    (tmp_path / "file").write_bytes(b"")
    shelf = TraceFiles(tmp_path / "file")
    shelf.put("a", b"payload")
    assert shelf.take_over("a") is None
    other = TraceFiles(tmp_path / "replay", refuse_once)
    other.put("a", b"payload")
    other.sync(["a"])
    other.sync(["a"])
    assert other.take_over("a") == b"payload"


def test_a_trace_that_cannot_be_removed_ends_the_trainer_with_the_fix(tmp_path: Path) -> None:
    """As in a folder that a backup gave back to root: what cannot be removed cannot be erased either."""
    shelf = TraceFiles(tmp_path)
    shelf.put("a", b"")
    [path] = tmp_path.iterdir()
    path.unlink()
    path.mkdir()
    for remove in (lambda: shelf.keep([]), lambda: shelf.remove(["a"])):
        with pytest.raises(StoreError, match="give that folder to the trainer's user"):
            remove()
    path.rmdir()
    shelf.keep([])
    assert shelf.take_over("a") is None


def test_a_file_that_somebody_else_removed_keeps_no_other_from_the_disk(tmp_path: Path) -> None:
    synced: list[Path] = []

    def counted(path: Path) -> None:
        sync(path)
        synced.append(path)

    shelf = TraceFiles(tmp_path, counted)
    for trace_id in "abc":
        shelf.put(trace_id, trace_id.encode())
    next(path for path in tmp_path.iterdir() if path.read_bytes() == b"b").unlink()
    shelf.sync("abc")
    synced.clear()
    shelf.put("d", b"d")
    shelf.remove("d")
    shelf.sync("abcd")
    assert synced == [], "all are safe, or gone"
