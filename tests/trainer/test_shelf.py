"""Encoded traces on disk: put, taken over, removed; and a disk that refuses."""

from __future__ import annotations

from pathlib import Path

from trainer.shelf import Shelf


def test_what_was_put_is_there_for_the_next_process(tmp_path: Path) -> None:
    folder = tmp_path / "replay"
    assert Shelf(folder).take_over("a") is None
    Shelf(folder).put("a", b"first")
    Shelf(folder).put("a", b"again")
    Shelf(folder).put("../../etc/b", b"a producer's word")
    assert Shelf(folder).take_over("a") == b"again"
    assert Shelf(folder).take_over("../../etc/b") == b"a producer's word"
    assert len(list(folder.iterdir())) == 2
    assert list(tmp_path.iterdir()) == [folder]


def test_a_process_removes_what_it_put_or_took_over_and_nothing_else(tmp_path: Path) -> None:
    one, other = Shelf(tmp_path), Shelf(tmp_path)
    for trace_id in "abc":
        one.put(trace_id, b"")
    other.put("d", b"")
    other.keep([])
    one.keep(["b"])
    left = Shelf(tmp_path)
    assert [left.take_over(trace_id) is not None for trace_id in "abcd"] == [False, True, False, False]
    left.keep([])
    assert list(tmp_path.iterdir()) == []


def test_a_start_sweeps_what_no_checkpoint_lists(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "replay")
    shelf.sweep([])
    for trace_id in "ab":
        shelf.put(trace_id, b"")
    (tmp_path / "replay" / "x.123.tmp").write_bytes(b"half")
    Shelf(tmp_path / "replay").sweep(["b"])
    assert len(list((tmp_path / "replay").iterdir())) == 1
    assert shelf.take_over("b") == b""


def test_a_disk_that_refuses_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    shelf = Shelf(tmp_path / "file")
    shelf.put("a", b"payload")
    assert shelf.take_over("a") is None
