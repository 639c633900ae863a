"""What the figures of `benchmarks.ranks` mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.faults.accounts import durable_uses
from benchmarks.faults.ranks import Notes
from benchmarks.ranks import Curve


def test_two_curves_differ_by_their_worst_point() -> None:
    alone, together = (
        Curve(loss=loss, accept_length=[], tokens_per_s=1.0, kept_bytes=0) for loss in ([4.0, 2.0], [4.1, 1.9])
    )
    assert together.difference(alone) == pytest.approx(0.05)
    assert alone.difference(alone) == 0


def test_the_notes_of_this_life_name_its_processes(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes")
    before = ["alive 0 11", "alive 1 12", "resumed a", "resumed a", "used x", "saving b"]
    notes.path.write_text("".join(f"{line}\n" for line in [*before, "alive 1 14", "alive 0 13", "resumed b"]))
    assert notes.pids(len(before)) == {0: 13, 1: 14}
    assert (notes.count("resumed", len(before)), notes.count("saving", 0)) == (1, 1)


def test_both_ranks_resume_before_either_uses_anything() -> None:
    notes = ["used 1", "saving a", "used 2", "resumed a", "resumed a", "used 2", "used 3", "saving b"]
    assert durable_uses(notes, "b") == ({"1": 1, "2": 1, "3": 1}, 1)
