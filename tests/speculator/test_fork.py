"""A lineage begins with the base's draft, whoever dies on the way, and shares nothing with it from then on."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from speculator import fork as forking
from speculator.checkpoint import draft_config_json, draft_state, model_key, target_fingerprint
from speculator.errors import ConfigError, LifecycleError, StoreError, UnknownDraftError
from speculator.fork import fork
from speculator.lifecycle import State
from speculator.lineage import ensure_lineage, version_to_serve
from speculator.lineages import below, lineages_of
from speculator.store import DraftStore
from speculator.tenants import counts_of
from tests.crashes import Crash, dying_before
from tests.toy import make_toy_model, random_draft


@pytest.fixture(scope="module")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture
def base(toy_model: Path, tmp_path: Path) -> DraftStore:
    """Version 1 is good; version 2, newer, waits to be served."""
    store, draft = DraftStore(tmp_path / "drafts"), random_draft(toy_model, seed=1)
    ensure_lineage(store, toy_model, target_fingerprint(toy_model), draft_vocab_size=24)
    store.write(
        draft_state(draft),
        draft_config_json(draft.config),
        parent=1,
        target_fingerprint=target_fingerprint(toy_model),
        info={"tenants": {"tokens": {"anna": 7}}},
    )
    store.lifecycle.move(2, State.VALIDATED, actor="test")
    store.lifecycle.move(2, State.SCORED, actor="test")
    return store


def test_the_first_version_is_the_bases_last_good_one(base: DraftStore, toy_model: Path) -> None:
    code = fork(base, "code")
    assert code.root == base.root / "lineages" / "code"
    assert (code.lineage, base.lineage, lineages_of(base.root)) == ("code", "", ["code"])
    weights = base.load(1)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in code.load(1).items())
    assert code.lifecycle.states() == {1: State.PROMOTED}
    assert code.manifest(1).parent is None
    assert code.manifest(1).info["forked_from"] == 1
    assert ensure_lineage(code, toy_model, target_fingerprint(toy_model)) == 1
    assert base.versions() == [1, 2]


def test_any_version_that_may_be_served(base: DraftStore) -> None:
    code = fork(base, "code", version=2)
    assert torch.equal(code.load(1)["fc.weight"], base.load(2)["fc.weight"])
    assert version_to_serve(code, 1) == 1
    assert counts_of(code.manifest(1).info).tokens == {"anna": 7}, "erasing a tenant names the draft that knows of them"
    base.lifecycle.bar(2, actor="test", reason="bad")
    with pytest.raises(LifecycleError, match="version 2 may not be served"):
        fork(base, "math", version=2)


def test_whoever_dies_on_the_way_it_can_be_repeated(base: DraftStore, toy_model: Path) -> None:
    fingerprint = target_fingerprint(toy_model)
    for step in itertools.count():
        name = f"l{step}"
        for old in lineages_of(base.root):
            (below(base.root, old) / "lineage.json").unlink()
        store = DraftStore(below(base.root, name))
        try:
            with dying_before(step):
                fork(base, name)
        except Crash:
            if store.versions():
                assert store.lineage == name, "no version is ever taken for one of a base"
            elif store.lineage:
                with pytest.raises(StoreError, match=f"draft fork {name}"):
                    ensure_lineage(store, toy_model, fingerprint)
            if store.lifecycle.state(1) is not State.PROMOTED:
                fork(base, name)
            assert store.lifecycle.states() == {1: State.PROMOTED}
            assert store.versions() == [1]
        else:
            break
    assert step > 20


def test_what_a_killed_fork_began_with_stays(base: DraftStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(forking, "begin", _die)
        with pytest.raises(Crash):
            fork(base, "code")
    with pytest.raises(ConfigError, match="repeat it with --version 1"):
        fork(base, "code", version=2)
    for state in (State.LIVE, State.PROMOTED):  # the base goes on meanwhile
        base.lifecycle.move(2, state, actor="test")
    code = fork(base, "code")
    assert code.manifest(1).info["forked_from"] == 1
    assert code.lifecycle.states() == {1: State.PROMOTED}


def _die(*_: object, **__: object) -> None:
    raise Crash


def test_what_cannot_be_forked_names_the_fix(base: DraftStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = fork(base, "code")
    with pytest.raises(ConfigError, match="already"):
        fork(base, "code")
    code.lifecycle.bar(1, actor="test", reason="bad")
    with pytest.raises(ConfigError, match="already"):
        fork(base, "code")
    with pytest.raises(ConfigError, match="pass the base's store"):
        fork(code, "deeper")
    for name in ("", "base", "Code", "-a", "a-", "a/b", "../x", "a" * 33):
        with pytest.raises(ConfigError, match="no name for a lineage"):
            fork(base, name)
    with pytest.raises(UnknownDraftError, match="draft init"):
        fork(DraftStore(tmp_path / "empty"), "code")
    monkeypatch.setattr(forking, "MAX_LINEAGES", 1)
    with pytest.raises(ConfigError, match="the most there may be"):
        fork(base, "math")
    assert lineages_of(base.root) == ["code"]


def test_a_store_that_cannot_say_whose_it_is_is_not_used(base: DraftStore) -> None:
    code = fork(base, "code")
    for said in (b'{"name": 7}', b'{"name": ""}', b'{"name": "../../elsewhere"}'):
        (code.root / "lineage.json").write_bytes(said)
        with pytest.raises(StoreError, match=r"lineage\.json cannot be read"):
            _ = code.lineage


def test_keys_are_a_lineages_own(toy_model: Path) -> None:
    keys = {model_key(toy_model, "f" * 64, lineage) for lineage in ("", "code", "math")}
    assert keys == {"toy-ffffffffffff", "toy-ffffffffffff.code", "toy-ffffffffffff.math"}
