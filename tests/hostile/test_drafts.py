"""Nothing damaged or forged is loaded, and a running engine is as it was before somebody tried."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from speculator.versions.store import DraftStore
from tests.fixtures.drafts import make_draft
from tests.hostile import drafts
from tests.hostile.judge import FailureError, Tally


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> drafts.Original:
    return drafts.Original.of(make_draft(), tmp_path_factory.mktemp("original"))


def test_the_corpus_is_refused(original: drafts.Original, tmp_path: Path) -> None:
    tally = Tally("corpus")
    for name, files in drafts.corpus(original):
        store = drafts.put(tmp_path, files)
        tally.take(name, lambda name=name, store=store: f"{name}: {drafts.load(store, original)}")  # type: ignore[misc]
    tally.check()
    assert [outcome for outcome in tally.outcomes if "loaded" in outcome] == []


def test_mutated_files_are_refused_or_do_no_harm(original: drafts.Original, tmp_path: Path) -> None:
    tally, choose = Tally("mutated"), random.Random(0).randrange
    for number in range(150):
        store = drafts.put(tmp_path, drafts.mutate(original, choose))
        tally.take(str(number), lambda store=store: drafts.load(store, original))  # type: ignore[misc]
    tally.check()
    assert tally.outcomes["DraftFileError"] > 50


def test_a_changed_file_that_is_loaded_unvouched_is_a_failure(
    original: drafts.Original, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = {**original.files, drafts.WEIGHTS: original.files[drafts.WEIGHTS] + b"\0"}
    monkeypatch.setattr(DraftStore, "load", lambda *_, **__: original.state)
    with pytest.raises(FailureError, match="not what the manifest vouches for"):
        drafts.load(drafts.put(tmp_path / "a", changed), original)
    assert "as vouched" not in drafts.load(drafts.put(tmp_path / "b", drafts.vouched(changed)), original)


def test_what_is_no_file_is_refused(original: drafts.Original, tmp_path: Path) -> None:
    for name, store in drafts.odd_places(tmp_path, original):
        tally = Tally(name)
        tally.take(name, lambda store=store: drafts.load(store, original))  # type: ignore[misc]
        tally.check()
        assert tally.outcomes.keys() <= {"DraftFileError", "StoreError", "UnknownDraftError"}, (name, tally.outcomes)
