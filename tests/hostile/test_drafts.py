"""Nothing damaged or forged is loaded."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from speculator.versions.store import DraftStore
from tests.fixtures.drafts import make_draft
from tests.hostile import drafts
from tests.hostile.judge import FailureError, tallied


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> drafts.Original:
    return drafts.Original.of(make_draft(), tmp_path_factory.mktemp("original"))


def test_the_corpus_is_refused(original: drafts.Original, tmp_path: Path) -> None:
    for name, attempt in drafts.corpus_inputs(tmp_path, original):
        tally = tallied(name, iter([(name, attempt)]))
        tally.check()
        assert not any("loaded" in outcome for outcome in tally.outcomes), name


def test_mutated_files_are_refused_or_do_no_harm(original: drafts.Original, tmp_path: Path) -> None:
    tally = tallied("mutated", drafts.mutated_inputs(tmp_path, original, random.Random(0).randrange, 150))
    tally.check()
    assert tally.outcomes["DraftFileError"] > 50


def test_a_changed_file_that_is_loaded_unvouched_is_a_failure(original: drafts.Original, tmp_path: Path) -> None:
    class Trusting(DraftStore):
        def load(self, *_: Any, **__: Any) -> dict[str, Tensor]:
            return original.state

    changed = {**original.files, drafts.WEIGHTS: original.files[drafts.WEIGHTS] + b"\0"}
    for files in (changed, drafts.vouched(changed)):
        drafts.put(tmp_path / str(files is changed), files)
    with pytest.raises(FailureError, match="not what the manifest vouches for"):
        drafts.load(Trusting(tmp_path / "True"), original)
    assert drafts.load(Trusting(tmp_path / "False"), original) == "loaded, the same"


def test_what_is_no_file_is_refused(original: drafts.Original, tmp_path: Path) -> None:
    tally = tallied("odd places", drafts.odd_places(tmp_path, original))
    tally.check()
    assert tally.outcomes.keys() <= {"DraftFileError", "StoreError", "UnknownDraftError"}, tally.outcomes
