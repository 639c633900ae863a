"""A target's folder with something broken is served as it should be, or refused in one line, by every command alike."""

from __future__ import annotations

import random
from pathlib import Path

from tests.hostile.judge import Tally
from tests.hostile.model_folders import ModelFolders, attempt


def test_a_whole_folder_is_served_and_broken_ones_are_refused(tmp_path: Path) -> None:
    folders, choose = ModelFolders(tmp_path), random.Random(3).randrange
    assert attempt(tmp_path / "whole") == "served"
    tally = Tally("model folders")
    for _ in range(40):
        what, path = folders.broken(choose)
        tally.take(what, lambda path=path: attempt(path))  # type: ignore[misc]
    tally.check()
    assert tally.outcomes["refused"] > 10
