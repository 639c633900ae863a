"""The first version of a lineage becomes a good one, whoever dies or races on the way."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from speculator.draft.checkpoint import check_fits, config_from_json, draft_config_json, draft_state, target_fingerprint
from speculator.draft.eagle3 import DraftConfig
from speculator.errors import ConfigError, DraftFileError, DraftMismatchError, StoreError
from speculator.target_folder import read_config
from speculator.versions.lifecycle import Lifecycle, VersionState
from speculator.versions.lineage import admit, ensure_lineage, load_draft
from speculator.versions.store import DraftStore
from tests.fixtures.faults import Crash, dying_before
from tests.fixtures.toy import make_toy_model, random_draft


@pytest.fixture(scope="module")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("models") / "toy")


def ensure(store: DraftStore, model: Path) -> int:
    return ensure_lineage(store, model, target_fingerprint(model), draft_vocab_size=24)


def write(store: DraftStore, model: Path) -> int:
    draft = random_draft(model, seed=0)
    fingerprint = target_fingerprint(model)
    return store.write(
        draft_state(draft), draft_config_json(draft.config), parent=None, target_fingerprint=fingerprint, info={}
    ).version


def test_the_first_version_is_good_wherever_its_writer_died(toy_model: Path, tmp_path: Path) -> None:
    for step in itertools.count():
        store = DraftStore(tmp_path / str(step))
        try:
            with dying_before(step):
                ensure(store, toy_model)
        except Crash:
            assert ensure(DraftStore(store.root), toy_model) == 1
            assert store.lifecycle.states() == {1: VersionState.PROMOTED}
        else:
            break
    assert step > 20
    assert ensure(store, toy_model) == 1
    assert len(store.lifecycle.history(1)) == 5, "a good version is not promoted at every start"


def test_processes_that_start_together_agree(toy_model: Path, tmp_path: Path) -> None:
    for turn in range(5):
        store = DraftStore(tmp_path / str(turn))
        write(store, toy_model)
        together = threading.Barrier(3)

        def start(_: int, store: DraftStore = store, together: threading.Barrier = together) -> int:
            together.wait()
            return ensure(DraftStore(store.root), toy_model)

        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(start, range(3))) == [1, 1, 1]
        assert store.lifecycle.state(1) is VersionState.PROMOTED


def test_of_two_that_find_the_store_empty_one_is_first(toy_model: Path, tmp_path: Path) -> None:
    """With another vocabulary each: a trainer that goes on from its own could never resume on the other's."""
    fingerprint, together = target_fingerprint(toy_model), threading.Barrier(2)

    class Slow(DraftStore):
        def latest(self) -> int | None:
            found = super().latest()
            together.wait()
            return found

    def start(size: int) -> int:
        return ensure_lineage(Slow(tmp_path), toy_model, fingerprint, draft_vocab_size=size)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(start, (24, 32))) == [1, 1]
    assert DraftStore(tmp_path).versions() == [1]
    assert DraftStore(tmp_path).lifecycle.states() == {1: VersionState.PROMOTED}


def test_one_that_another_has_promoted_before_its_writer_records_it_is_first(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = Lifecycle.move

    def after_the_other(states: Lifecycle, version: int, state: VersionState, **why: Any) -> bool:
        if state is VersionState.WRITTEN and not states.states():
            monkeypatch.setattr(Lifecycle, "move", move)
            assert ensure(DraftStore(tmp_path), toy_model) == 1
        return move(states, version, state, **why)

    monkeypatch.setattr(Lifecycle, "move", after_the_other)
    assert ensure(DraftStore(tmp_path), toy_model) == 1
    assert DraftStore(tmp_path).lifecycle.states() == {1: VersionState.PROMOTED}


def with_config(toy_model: Path, folder: Path, **change: object) -> Path:
    shutil.copytree(toy_model, folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **change}))
    return folder


def test_a_draft_for_a_smaller_window_is_refused_with_both_numbers(toy_model: Path, tmp_path: Path) -> None:
    small = with_config(toy_model, tmp_path / "small", max_position_embeddings=256)
    store = DraftStore(tmp_path / "drafts")
    assert ensure(store, small) == 1
    with pytest.raises(DraftMismatchError, match=r"max_position_embeddings is 256, the target's 512"):
        ensure(store, toy_model)
    # What it was made for holds all that a smaller window has.
    assert ensure(store, with_config(toy_model, tmp_path / "smaller", max_position_embeddings=128)) == 1


def test_a_drafts_rotary_base_is_its_own_and_without_one_it_is_what_every_engine_takes(toy_model: Path) -> None:
    draft = draft_config_json(DraftConfig.for_target(read_config(toy_model), draft_vocab_size=4))
    del draft["rope_theta"]
    bases = {
        10_000.0: draft,
        5e5: {**draft, "rope_theta": 5e5},
        77.0: {**draft, "rope_parameters": {"rope_theta": 77.0}},
    }
    for base, written in bases.items():
        config = config_from_json(written)
        assert config.rope_theta == base
        check_fits(config, toy_model)


def test_what_is_asked_of_a_fresh_draft_is_not_ignored_where_there_is_one(toy_model: Path, tmp_path: Path) -> None:
    store, fingerprint = DraftStore(tmp_path), target_fingerprint(toy_model)
    switches = ["fc_norm"]
    slim = {"draft_vocab_size": 4, "intermediate_size": 32}
    ensure_lineage(store, toy_model, fingerprint, seed=5, texts=["zzz"], switches=switches, **slim)
    # Texts may have grown since.
    texts: list[dict[str, object]] = [{"texts": ["zzz"]}, {"texts": ["aaa"]}]
    for alike in ({}, slim, {"seed": 5}, *texts, {"switches": switches}):
        assert ensure_lineage(store, toy_model, fingerprint, **alike) == 1  # type: ignore[arg-type]
    for other, says in (
        ({"draft_vocab_size": 8}, "of 8 is asked for, .* of 4 tokens"),
        ({"intermediate_size": 48}, "of 48 is asked for, .* of 32"),
        ({"seed": 6}, "from seed 5: leave --seed 6 out"),
        ({"switches": ["norm_output"]}, "with norm_output is asked for, .* without it"),
    ):
        with pytest.raises(ConfigError, match=says):
            ensure_lineage(store, toy_model, fingerprint, **other)  # type: ignore[arg-type]
    assert store.versions() == [1]


def test_a_version_on_trial_is_not_promoted_by_a_start(toy_model: Path, tmp_path: Path) -> None:
    store = DraftStore(tmp_path)
    ensure(store, toy_model)
    version = write(store, toy_model)
    admit(store, version, target_fingerprint=target_fingerprint(toy_model), actor="trainer", reason="better")
    store.lifecycle.move(version, VersionState.LIVE, actor="engine:a")
    assert ensure(store, toy_model) == 2
    store.lifecycle.bar(1, actor="operator:me", reason="r")
    assert ensure(store, toy_model) == 2
    assert store.lifecycle.state(2) is VersionState.LIVE
    store.lifecycle.bar(2, actor="engine:a", reason="worse")
    with pytest.raises(StoreError, match="drafts promote"):
        ensure(store, toy_model)


def test_a_version_that_cannot_be_read_back_is_quarantined(toy_model: Path, tmp_path: Path) -> None:
    store = DraftStore(tmp_path / "drafts")
    version = write(store, toy_model)
    path = store.folder(version) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DraftFileError, match="sha256"):
        admit(store, version, target_fingerprint=target_fingerprint(toy_model), actor="trainer", reason="better")
    last = store.lifecycle.history(version)[-1]
    assert last.state is VersionState.QUARANTINED
    assert "sha256" in last.reason


def test_a_vocabulary_that_the_target_does_not_have_is_refused(toy_model: Path, tmp_path: Path) -> None:
    store, fingerprint = DraftStore(tmp_path), target_fingerprint(toy_model)
    draft = random_draft(toy_model, seed=0)
    for shift in (1 << 40, -(1 << 40), 47):
        state = draft_state(draft)
        state["d2t"] += shift
        version = store.write(
            state, draft_config_json(draft.config), parent=None, target_fingerprint=fingerprint, info={}
        ).version
        with pytest.raises(DraftMismatchError, match="tokens that the target does not have"):
            load_draft(store, version, embed=draft.embed, target_fingerprint=fingerprint)
