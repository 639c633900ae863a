"""What an operator does with draft versions, on a real store and a real Redis."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
import torch
from safetensors.torch import load_file

from speculator.draft.checkpoint import config_from_json, draft_config_json, draft_state
from speculator.errors import (
    ConfigError,
    DraftFileError,
    DraftMismatchError,
    LifecycleError,
    SlipstreamError,
    StoreError,
    StreamError,
    UnknownDraftError,
)
from speculator.redis.control_plane import DraftPointer
from speculator.versions.lifecycle import Lifecycle, VersionState
from speculator.versions.operator import DraftOperator, tensor_change
from speculator.versions.store import DraftStore
from tests.fixtures.drafts import CONFIG, make_draft
from tests.fixtures.faults import Crash

TARGET = "a" * 64
TO_SCORED = (VersionState.WRITTEN, VersionState.VALIDATED, VersionState.SCORED)
TO_GOOD = (*TO_SCORED, VersionState.LIVE, VersionState.PROMOTED)


@pytest.fixture
def store(tmp_path: Path) -> DraftStore:
    return DraftStore(tmp_path / "drafts")


@pytest.fixture
def pointer(redis_client: redis.Redis) -> DraftPointer:
    return DraftPointer(redis_client, "toy")


@pytest.fixture
def desk(store: DraftStore, pointer: DraftPointer) -> DraftOperator:
    return DraftOperator(store, lambda: pointer, target_fingerprint=TARGET)


def add(store: DraftStore, *states: VersionState, seed: int = 0, **changes: Any) -> int:
    values: dict[str, Any] = {"parent": None, "target_fingerprint": TARGET, "info": {}} | changes
    version = store.write(draft_state(make_draft(seed)), draft_config_json(CONFIG), **values).version
    for state in states[1:]:
        store.lifecycle.move(version, state, actor="test")
    return version


def damage(store: DraftStore, version: int, name: str = "model.safetensors") -> None:
    path = store.root / "versions" / f"{version:06d}" / name
    path.write_bytes(path.read_bytes()[:-1])


def events(store: DraftStore) -> list[tuple[str, str, int]]:
    return [(event.kind, event.actor, event.fields["version"]) for event in store.lifecycle.events.tail(99)]


def asked(store: DraftStore) -> list[dict[str, Any]]:
    return [event.fields for event in store.lifecycle.events.tail(99) if event.kind == "asked"]


# -- looking


def test_the_overview_says_what_is_known_of_each_version(
    desk: DraftOperator, store: DraftStore, pointer: DraftPointer
) -> None:
    add(store, *TO_GOOD)
    add(store, *TO_SCORED, VersionState.LIVE, parent=1, info={"gate": {"outcome": "promote", "gain": 0.2}})
    add(store)
    pointer.publish(2)
    pointer.pin(1)
    for engine, version in (("b", 2), ("a", 2), ("c", 1)):
        pointer.report_engine(engine, {"version": version})
    overview = desk.overview()
    first, second, third = overview.drafts
    assert (overview.last_good, overview.published, overview.pinned, overview.no_redis) == (1, 2, 1, "")
    assert (first.state, first.is_last_good, first.is_pinned, first.is_published) == (
        VersionState.PROMOTED,
        True,
        True,
        False,
    )
    assert (second.parent, second.gate, second.engines) == (1, {"outcome": "promote", "gain": 0.2}, ["a", "b"])
    assert (second.is_published, second.is_pinned, second.is_last_good) == (True, False, False)
    assert (third.state, third.gate, third.engines) == (VersionState.WRITTEN, None, [])
    assert (third.created_ms or 0) > 1_700_000_000_000
    assert json.loads(msgspec.json.encode(overview))["drafts"][1]["state"] == "live"


def test_the_overview_says_what_engines_say_of_themselves(
    desk: DraftOperator, store: DraftStore, pointer: DraftPointer
) -> None:
    add(store, *TO_GOOD)
    said = {"version": 2, "role": "canary", "draft_accept_length": 1.75, "target_version": 3, "last_verdict": "kept"}
    pointer.report_engine("b", said)
    pointer.report_engine("a", {"version": "two", "draft_accept_length": "long"})
    a, b = desk.overview().engines
    assert (a.engine_id, a.version, a.role, a.accept_length, a.target_version) == ("a", None, "", None, None)
    assert (b.version, b.role, b.accept_length, b.target_version, b.last_verdict) == (2, "canary", 1.75, 3, "kept")


def test_the_overview_survives_damage_and_the_loss_of_redis(store: DraftStore) -> None:
    add(store, *TO_GOOD)
    add(store, *TO_SCORED)
    damage(store, 2, "manifest.json")

    def away() -> DraftPointer:
        raise StreamError("Redis cannot be reached")

    overview = DraftOperator(store, away).overview()
    assert overview.no_redis == "Redis cannot be reached"
    assert "manifest is damaged" in overview.drafts[1].damage
    assert (overview.last_good, overview.published, overview.drafts[0].engines) == (1, None, [])


def test_an_empty_store_has_an_empty_overview(desk: DraftOperator) -> None:
    assert desk.overview().drafts == []


def test_one_version_is_shown_with_its_history(desk: DraftOperator, store: DraftStore) -> None:
    add(store, *TO_SCORED, info={"num_traces": 7})
    store.lifecycle.bar(1, actor="engine:a", reason="worse", numbers={"p_value": 0.01})
    details = desk.show(1)
    assert details.manifest == store.manifest(1)
    assert details.draft.state is VersionState.QUARANTINED
    assert [each.state for each in details.history] == [*TO_SCORED, VersionState.QUARANTINED]
    assert (details.history[-1].reason, details.history[-1].numbers) == ("worse", {"p_value": 0.01})
    with pytest.raises(UnknownDraftError, match="version 2 is not in"):
        desk.show(2)


def test_the_difference_is_that_of_the_tensors(desk: DraftOperator, store: DraftStore) -> None:
    add(store, info={"trained_tokens": 10, "gate": {"gain": 0.1}})
    weights = draft_state(make_draft())
    norm = weights["norm.weight"].clone()
    weights["norm.weight"] = 2 * norm
    # An orthogonal vector of the same length: cosine 0, and a difference of √2 lengths.
    fc = weights["fc.weight"].flatten()
    weights["fc.weight"] = torch.stack([-fc[1::2], fc[::2]], 1).reshape(weights["fc.weight"].shape)
    weights["d2t"] = weights["d2t"].clone()
    weights["d2t"][0] += 1
    config = draft_config_json(CONFIG) | {"rope_theta": 5.0, "extra": 1}
    store.write(
        weights, config, parent=1, target_fingerprint=TARGET, info={"trained_tokens": 30, "gate": {"gain": 0.1}}
    )
    difference = desk.diff(1, 2)
    changes = {change.name: change for change in difference.tensors}
    assert changes.keys() == weights.keys()
    assert changes["norm.weight"].relative_l2 == pytest.approx(1.0)
    assert changes["norm.weight"].cosine == pytest.approx(1.0)
    assert changes["norm.weight"].num_changed == len(norm)
    assert changes["fc.weight"].cosine == pytest.approx(0.0, abs=1e-6)
    assert changes["fc.weight"].relative_l2 == pytest.approx(2**0.5)
    assert (changes["d2t"].num_changed, changes["d2t"].relative_l2, changes["d2t"].cosine) == (1, None, None)
    unchanged = changes["lm_head.weight"]
    assert (unchanged.num_changed, unchanged.relative_l2) == (0, 0.0)
    assert difference.config == {"extra": [None, 1], "rope_theta": [100_000.0, 5.0]}
    assert difference.manifest["info.trained_tokens"] == [10, 30]
    assert difference.manifest["parent"] == [None, 1]
    assert "info.gate.gain" not in difference.manifest


def test_other_shapes_and_zero_vectors_have_no_ratio(desk: DraftOperator, store: DraftStore) -> None:
    weights = draft_state(make_draft())
    store.write(
        {**weights, "norm.weight": 0 * weights["norm.weight"]},
        {},
        parent=None,
        target_fingerprint=TARGET,
        info={},
    )
    store.write(
        {**weights, "fc.weight": weights["fc.weight"][1:].clone()},
        {},
        parent=None,
        target_fingerprint=TARGET,
        info={},
    )
    changes = {change.name: change for change in desk.diff(1, 2).tensors}
    assert changes["fc.weight"].shapes == [[8, 24], [7, 24]]
    assert (changes["fc.weight"].num_changed, changes["fc.weight"].cosine) == (None, None)
    assert (changes["norm.weight"].relative_l2, changes["norm.weight"].cosine) == (None, None)


# -- changing


def test_promoting_a_scored_version_makes_it_desired(
    desk: DraftOperator, store: DraftStore, pointer: DraftPointer
) -> None:
    add(store, *TO_GOOD)
    add(store, *TO_SCORED)
    change = desk.promote(2, actor="operator:me")
    assert (change.version, change.state, change.desired) == (2, VersionState.SCORED, 2)
    # The engines' watch still decides whether it is good.
    assert (pointer.published(), store.lifecycle.last_good()) == (2, 1)
    assert events(store)[-1] == ("promote", "operator:me", 2)


def test_promoting_a_promoted_version_makes_it_the_last_good(desk: DraftOperator, store: DraftStore) -> None:
    add(store, *TO_GOOD)
    add(store, *TO_GOOD)
    assert store.lifecycle.last_good() == 2
    desk.promote(1, actor="operator:me")
    assert store.lifecycle.last_good() == 1


@pytest.mark.parametrize(
    "barred", [[VersionState.ROLLED_BACK], [VersionState.ROLLED_BACK, VersionState.QUARANTINED]], ids=len
)
def test_promoting_releases_what_is_barred(desk: DraftOperator, store: DraftStore, barred: list[VersionState]) -> None:
    add(store, *TO_GOOD, *barred)
    assert desk.promote(1, actor="operator:me").state is VersionState.SCORED
    last = store.lifecycle.history(1)[-1]
    assert (last.actor, last.reason) == ("operator:me", "released by operator")


def test_promoting_admits_what_a_crash_left_unfinished(desk: DraftOperator, store: DraftStore) -> None:
    add(store)
    (store.root / "states" / "000001.json").unlink()
    assert desk.promote(1, actor="operator:me").state is VersionState.SCORED
    assert [each.state for each in store.lifecycle.history(1)] == list(TO_SCORED)


def test_what_no_engine_can_load_is_neither_promoted_nor_pinned_nor_exported(
    desk: DraftOperator, store: DraftStore, pointer: DraftPointer, tmp_path: Path
) -> None:
    add(store, *TO_GOOD, VersionState.QUARANTINED)
    damage(store, 1)
    add(store, *TO_SCORED, target_fingerprint="b" * 64)
    calls: list[Callable[[int], object]] = [
        lambda version: desk.promote(version, actor="operator:me"),
        lambda version: desk.pin(version, actor="operator:me"),
        lambda version: desk.export(version, tmp_path / "out", actor="operator:me"),
    ]
    refusals: dict[int, type[SlipstreamError]] = {1: DraftFileError, 2: DraftMismatchError, 3: UnknownDraftError}
    before = len(events(store))
    for call in calls:
        for version, error in refusals.items():
            with pytest.raises(error):
                call(version)
    assert (pointer.desired(), len(events(store))) == (None, before)
    assert store.lifecycle.states() == {1: VersionState.QUARANTINED, 2: VersionState.SCORED}
    assert not (tmp_path / "out").exists()


def test_a_rollback_takes_back_no_version_that_is_published_meanwhile(
    store: DraftStore, pointer: DraftPointer, redis_client: redis.Redis
) -> None:
    class Overtaken(DraftPointer):
        def published(self) -> int | None:
            found = super().published()
            pointer.publish(3)
            return found

    for states in (TO_GOOD, TO_GOOD, TO_SCORED):
        add(store, *states)
    pointer.publish(2)
    desk = DraftOperator(store, lambda: Overtaken(redis_client, "toy"), target_fingerprint=TARGET)
    change = desk.rollback(actor="operator:ann", reason="worse")
    assert (change.version, change.desired, pointer.published()) == (2, 3, 3)


def test_rolling_back_serves_the_last_good_version(
    desk: DraftOperator, store: DraftStore, pointer: DraftPointer
) -> None:
    add(store, *TO_GOOD)
    add(store, *TO_SCORED, VersionState.LIVE)
    pointer.publish(2)
    change = desk.rollback(actor="operator:me", reason="answers are slow")
    assert (change.version, change.state, change.desired) == (2, VersionState.QUARANTINED, 1)
    assert [each.state for each in store.lifecycle.history(2)][-2:] == [
        VersionState.ROLLED_BACK,
        VersionState.QUARANTINED,
    ]
    assert store.lifecycle.history(2)[-1].reason == "answers are slow"
    assert [kind for kind, _, _ in events(store)][-3:] == ["rolled_back", "quarantined", "rollback"]
    assert store.lifecycle.events.tail(1)[0].fields == {"version": 2, "desired": 1, "reason": "answers are slow"}
    # Of operators, not of engines: the trainer does not pause.
    assert store.lifecycle.rollbacks_in_a_row() == []


def test_an_event_log_that_cannot_be_written_keeps_no_bad_draft_in_service(
    desk: DraftOperator, store: DraftStore, pointer: DraftPointer
) -> None:
    add(store, *TO_GOOD)
    add(store, *TO_SCORED, VersionState.LIVE)
    pointer.publish(2)
    log, aside = store.root / "events.jsonl", store.root / "aside"
    log.rename(aside)
    log.mkdir()
    change = desk.rollback(actor="operator:me", reason="r")
    assert (change.state, change.desired, change.num_unrecorded) == (VersionState.QUARANTINED, 1, 2)
    with pytest.raises(StoreError, match="free space"):
        desk.pin(1, actor="operator:me")
    assert pointer.desired() == 1
    log.rmdir()
    aside.rename(log)
    assert [kind for kind, _, _ in events(store)][-1] == "live"
    # What the states know is told when there is room; the operator's own two events are lost.
    assert desk.pin(1, actor="operator:me").num_unrecorded == 0
    store.lifecycle.move(1, VersionState.PROMOTED, actor="test")
    assert [kind for kind, _, _ in events(store)][-5:] == ["asked", "pin", "rolled_back", "quarantined", "promoted"]


def test_without_a_published_version_the_last_good_one_is_rolled_back(
    desk: DraftOperator, store: DraftStore, pointer: DraftPointer
) -> None:
    add(store, *TO_GOOD)
    add(store, *TO_GOOD)
    assert desk.rollback(actor="operator:me", reason="r").version == 2
    assert (pointer.published(), store.lifecycle.last_good()) == (1, 1)


def test_a_rollback_that_was_cut_short_is_finished_by_the_next(
    desk: DraftOperator, store: DraftStore, pointer: DraftPointer
) -> None:
    add(store, *TO_GOOD)
    add(store, *TO_SCORED, VersionState.LIVE, VersionState.ROLLED_BACK)
    pointer.publish(2)
    desk.rollback(actor="operator:me", reason="r")
    assert (store.lifecycle.state(2), pointer.published()) == (VersionState.QUARANTINED, 1)


def test_a_rollback_that_is_asked_for_twice_is_made_once(
    desk: DraftOperator, store: DraftStore, pointer: DraftPointer
) -> None:
    """The answer to the first was lost on its way, say."""
    for _ in range(3):
        add(store, *TO_GOOD)
    pointer.publish(3)
    first = desk.rollback(actor="operator:me", reason="r")
    with pytest.raises(LifecycleError, match=r"3 was rolled back already, and engines should run 2: .* version 2"):
        desk.rollback(actor="operator:me", reason="r")
    assert desk.rollback(actor="operator:me", reason="r", version=3) == first
    assert (pointer.published(), store.lifecycle.state(2)) == (2, VersionState.PROMOTED)
    # What came into service after it is meant by whoever asks now.
    add(store, *TO_SCORED, VersionState.LIVE)
    pointer.publish(4)
    assert desk.rollback(actor="operator:me", reason="r").version == 4
    assert desk.rollback(actor="operator:me", reason="r", version=2).desired == 1
    # What was barred before any engine had it was rolled back, too.
    for states in (TO_GOOD, TO_SCORED):
        add(store, *states)
    pointer.publish(6)
    assert desk.rollback(actor="operator:me", reason="r").version == 6
    with pytest.raises(LifecycleError, match="6 was rolled back already"):
        desk.rollback(actor="operator:me", reason="r")


@pytest.mark.parametrize("action", ["promote", "rollback", "pin", "unpin"])
def test_an_operators_change_is_on_record_before_it_is_begun(
    store: DraftStore, pointer: DraftPointer, redis_client: redis.Redis, action: str
) -> None:
    for _ in range(2):
        add(store, *TO_GOOD)
    pointer.publish(2)
    pointer.pin(2)
    changes: dict[str, Callable[[DraftOperator], object]] = {
        "promote": lambda desk: desk.promote(2, actor="operator:me"),
        "rollback": lambda desk: desk.rollback(actor="operator:me", reason="slow", version=2),
        "pin": lambda desk: desk.pin(2, actor="operator:me"),
        "unpin": lambda desk: desk.unpin(actor="operator:me"),
    }

    def die(*_: object, **__: object) -> Any:
        raise Crash

    class DyingPointer(DraftPointer):
        publish = pin = unpin = die

    class DyingLifecycle(Lifecycle):
        move = bar = die

    dying = DraftStore(store.root)
    dying.lifecycle = DyingLifecycle(store.root)
    with pytest.raises(Crash):
        changes[action](DraftOperator(dying, lambda: DyingPointer(redis_client, "toy")))
    [last] = store.lifecycle.events.tail(1)
    reason = {"reason": "slow"} if action == "rollback" else {}
    assert (last.kind, last.actor) == ("asked", "operator:me")
    assert last.fields == {"action": action, "version": 2, **reason}
    changes[action](DraftOperator(store, lambda: pointer))
    assert [event.kind for event in store.lifecycle.events.tail(1)] == [action]
    assert len(asked(store)) == 2


def test_a_rollback_of_another_version_leaves_the_published_one(
    desk: DraftOperator, store: DraftStore, pointer: DraftPointer
) -> None:
    for _ in range(3):
        add(store, *TO_GOOD)
    pointer.publish(3)
    change = desk.rollback(actor="operator:me", reason="r", version=2)
    assert (change.desired, pointer.published(), store.lifecycle.last_good()) == (3, 3, 3)


def test_a_rollback_ends_the_pin_of_that_version_alone(
    desk: DraftOperator, store: DraftStore, pointer: DraftPointer
) -> None:
    for _ in range(3):
        add(store, *TO_GOOD)
    pointer.publish(3)
    pointer.pin(2)
    assert desk.rollback(actor="operator:me", reason="r", version=3).desired == 2
    assert pointer.published() == 2
    assert desk.rollback(actor="operator:me", reason="r", version=2).desired == 1
    assert (pointer.pinned(), pointer.published()) == (None, 1)


def test_a_rollback_needs_another_good_version(desk: DraftOperator, store: DraftStore, pointer: DraftPointer) -> None:
    with pytest.raises(LifecycleError, match="no draft version in service"):
        desk.rollback(actor="operator:me", reason="r")
    add(store, *TO_GOOD)
    add(store, *TO_SCORED)
    with pytest.raises(LifecycleError, match="no other draft version than 1 was ever good"):
        desk.rollback(actor="operator:me", reason="r")
    damage(store, 1)
    with pytest.raises(DraftFileError):
        desk.rollback(actor="operator:me", reason="r", version=2)
    assert store.lifecycle.states() == {1: VersionState.PROMOTED, 2: VersionState.SCORED}
    assert pointer.published() is None


def test_a_version_that_does_not_exist_is_not_rolled_back(desk: DraftOperator, store: DraftStore) -> None:
    add(store, *TO_GOOD)
    with pytest.raises(UnknownDraftError):
        desk.rollback(actor="operator:me", reason="r", version=9)
    assert store.lifecycle.states() == {1: VersionState.PROMOTED}


def test_a_pin_holds_until_it_is_taken_away(desk: DraftOperator, store: DraftStore, pointer: DraftPointer) -> None:
    add(store, *TO_GOOD)
    add(store, *TO_SCORED)
    pointer.publish(2)
    assert desk.pin(1, actor="operator:me").desired == 1
    with pytest.raises(LifecycleError, match="version 1 is pinned: unpin it first"):
        desk.promote(2, actor="operator:me")
    desk.promote(1, actor="operator:me")
    pointer.publish(2)
    change = desk.unpin(actor="operator:me")
    assert (change.version, change.desired) == (1, 2)
    with pytest.raises(LifecycleError, match="no draft version is pinned"):
        desk.unpin(actor="operator:me")
    assert [kind for kind, _, _ in events(store) if "p" in kind and "in" in kind] == ["pin", "unpin"]


def test_what_may_not_be_served_is_not_pinned(desk: DraftOperator, store: DraftStore, pointer: DraftPointer) -> None:
    add(store, *TO_SCORED, VersionState.QUARANTINED)
    add(store)
    for version, state in ((1, "quarantined"), (2, "written")):
        with pytest.raises(LifecycleError, match=f"version {version} is {state}: promote it first"):
            desk.pin(version, actor="operator:me")
    assert pointer.pinned() is None


def test_an_exported_version_is_a_checkpoint_as_sglang_loads_it(
    desk: DraftOperator, store: DraftStore, tmp_path: Path
) -> None:
    add(store, *TO_SCORED, seed=3)
    folder = desk.export(1, tmp_path / "new" / "draft", actor="operator:me")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    stored = store.root / "versions" / "000001"
    assert (folder / "model.safetensors").read_bytes() == (stored / "model.safetensors").read_bytes()
    loaded, expected = load_file(folder / "model.safetensors"), draft_state(make_draft(3))
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config_from_json(config)) == (["LlamaForCausalLMEagle3"], CONFIG)
    assert events(store)[-1] == ("export", "operator:me", 1)


def test_an_export_overwrites_nothing(desk: DraftOperator, store: DraftStore, tmp_path: Path) -> None:
    add(store, *TO_SCORED)
    desk.export(1, tmp_path / "out", actor="operator:me")
    (tmp_path / "file").touch()
    for taken in ("out", "file", "file/below"):
        with pytest.raises(ConfigError, match="--out"):
            desk.export(1, tmp_path / taken, actor="operator:me")
    (tmp_path / "empty").mkdir()
    assert len(list(desk.export(1, tmp_path / "empty", actor="operator:me").iterdir())) == 2


def test_pruning_spares_the_pinned_version(desk: DraftOperator, store: DraftStore) -> None:
    for _ in range(4):
        add(store, *TO_SCORED)
    assert store.prune(1, pinned=2) == [1, 3]


def test_a_number_is_not_given_twice(store: DraftStore) -> None:
    """Somebody removed the newest version's files by hand; an engine may still have it in service."""
    add(store, *TO_SCORED)
    add(store, *TO_SCORED, VersionState.LIVE)
    store.lifecycle.move(2, VersionState.QUARANTINED, actor="test")
    (store.root / "versions" / "000002").rename(store.root / "elsewhere")
    assert add(store) == 3


def test_equal_tensors_are_equal_however_large() -> None:
    large = torch.randn(4_000_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    change = tensor_change("large", large, large.clone())
    assert (change.num_changed, change.relative_l2) == (0, 0.0)
    assert change.cosine == pytest.approx(1.0, abs=1e-9)
