"""Files of lines that something has happened to, a few of those of `benchmarks.bad_inputs`."""

from __future__ import annotations

import random
from pathlib import Path

from tests.hostile import line_files
from tests.hostile.judge import Tally

COUNT = 60


def test_broken_files_are_refused_in_one_line_that_names_them(tmp_path: Path) -> None:
    choose = random.Random(0).randrange
    tally = Tally("prompt files")
    for number in range(COUNT):
        raw = line_files.broken(choose)
        tally.take(
            str(number), lambda raw=raw, n=number: line_files.read(tmp_path / "f.jsonl", raw, as_groups=n % 2 > 0)
        )
    tally.check()
    assert set(tally.outcomes) == {"read", "refused"}
