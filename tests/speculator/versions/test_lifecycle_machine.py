"""Whatever trainer, engines and operators do to a store, and wherever one of them dies: what is served is good."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from speculator.draft.checkpoint import draft_config_json, draft_state, expected_shapes
from speculator.errors import LifecycleError
from speculator.versions.lifecycle import ALLOWED, BARRED, SERVABLE, VersionState
from speculator.versions.lineage import admit
from speculator.versions.store import DraftStore
from tests.fixtures.drafts import CONFIG, make_draft
from tests.fixtures.faults import Crash, dying_before

TARGET = "a" * 64
WEIGHTS, DRAFT_JSON, SHAPES = draft_state(make_draft()), draft_config_json(CONFIG), expected_shapes(CONFIG)
TO_SCORED = [VersionState.WRITTEN, VersionState.VALIDATED, VersionState.SCORED]
ACTORS = st.sampled_from(["trainer", "engine:a", "operator:me"])
STEPS = st.none() | st.integers(0, 15)
"""Where a call's process dies; None and what is past its last step let it live."""


class LifecycleMachine(RuleBasedStateMachine):
    """The model knows the states that each version went through, the order of promotions, and whose files exist."""

    died: ClassVar[set[str]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.scratch = tempfile.TemporaryDirectory()
        self.stores: dict[str, DraftStore] = {}
        self.known: dict[int, list[VersionState]] = {}
        self.promotions: list[int] = []
        self.files: set[int] = set()
        self.events: list[tuple[str, int]] = []

    def store(self, actor: str) -> DraftStore:
        return self.stores.setdefault(actor, DraftStore(Path(self.scratch.name) / "drafts"))

    def run(self, actor: str, call: Callable[[DraftStore], object], step: int | None) -> bool:
        """Whether the call was survived; who did not survive it is another process the next time."""
        try:
            if step is None:
                call(self.store(actor))
            else:
                with dying_before(step):
                    call(self.store(actor))
        except Crash as crash:
            self.died.add(str(crash))
            del self.stores[actor]
            return False
        return True

    def settle(self, version: int, planned: Sequence[VersionState], *, survived: bool) -> None:
        """A call would lead a version through the planned states: it did, or came as far as it lived."""
        before = self.known.get(version, [])
        found = [transition.state for transition in self.store("reader").lifecycle.history(version)]
        made = list(planned[: len(found) - len(before)])
        assert found == before + made
        assert not survived or len(made) == len(planned)
        if found:
            self.known[version] = found
        self.promotions += [version] * made.count(VersionState.PROMOTED)
        # Who dies right after a transition has not written its event.
        self.events += [(state.value, version) for state in (made if survived else made[:-1])]

    def state(self, version: int) -> VersionState | None:
        return self.known[version][-1] if version in self.known else None

    def draw_version(self, data: st.DataObject, *states: VersionState | None) -> int:
        return data.draw(st.sampled_from([each for each in sorted(self.files) if self.state(each) in states]))

    def holds(self, *states: VersionState | None) -> bool:
        return any(self.state(version) in states for version in self.files)

    @rule(actor=ACTORS, step=STEPS)
    def write(self, actor: str, step: int | None) -> None:
        survived = self.run(
            actor,
            lambda store: store.write(
                WEIGHTS, DRAFT_JSON, parent=None, target_fingerprint=TARGET, info={}, actor=actor
            ),
            step,
        )
        new = set(self.store("reader").versions()) - self.files
        assert new or not survived
        for version in new:
            assert version > max([*self.files, *self.known], default=0)
            self.files.add(version)
            self.settle(version, [VersionState.WRITTEN], survived=survived)

    @precondition(lambda self: self.holds(None, VersionState.WRITTEN, VersionState.VALIDATED))
    @rule(data=st.data(), actor=ACTORS, step=STEPS)
    def admit(self, data: st.DataObject, actor: str, step: int | None) -> None:
        version = self.draw_version(data, None, VersionState.WRITTEN, VersionState.VALIDATED)
        planned = TO_SCORED[len(self.known.get(version, [])) :]
        self.settle(version, planned, survived=self.run(actor, lambda store: self.admit_in(store, version), step))

    def admit_in(self, store: DraftStore, version: int) -> None:
        admit(store, version, target_fingerprint=TARGET, actor="trainer", reason="finite")

    @precondition(lambda self: self.holds(*VersionState))
    @rule(data=st.data(), actor=ACTORS, step=STEPS)
    def move(self, data: st.DataObject, actor: str, step: int | None) -> None:
        version = self.draw_version(data, *VersionState)
        state = data.draw(st.sampled_from(sorted(ALLOWED[self.state(version)], key=lambda state: state.value)))
        survived = self.run(actor, lambda store: store.lifecycle.move(version, state, actor=actor), step)
        self.settle(version, [state], survived=survived)

    @precondition(lambda self: self.files)
    @rule(data=st.data(), actor=ACTORS, state=st.sampled_from(VersionState))
    def ask_again_or_for_too_much(self, data: st.DataObject, actor: str, state: VersionState) -> None:
        version = self.draw_version(data, None, *VersionState)
        if state is self.state(version) and state not in ALLOWED[state]:
            assert not self.store(actor).lifecycle.move(version, state, actor=actor)
        elif state not in ALLOWED[self.state(version)]:
            with pytest.raises(LifecycleError):
                self.store(actor).lifecycle.move(version, state, actor=actor)

    @rule(data=st.data(), actor=ACTORS, keep=st.integers(1, 4), step=STEPS)
    def prune(self, data: st.DataObject, actor: str, keep: int, step: int | None) -> None:
        pinned = data.draw(st.none() | st.sampled_from(sorted(self.files))) if self.files else None
        good = self.expected_last_good()
        stay = {*sorted(self.files)[-keep:], pinned, good}
        live = [version for version in self.files if self.state(version) is VersionState.LIVE]
        stay |= {version for version in live if self.came_last(version) > self.came_last(good)}
        survived = self.run(actor, lambda store: store.prune(keep, pinned=pinned), step)
        reader = self.store("reader")
        files = set(reader.versions())
        assert stay - {None} <= files <= self.files
        assert not survived or files == stay - {None}
        self.files = files
        for version in self.known.keys() - reader.lifecycle.states().keys():
            assert version not in stay
            del self.known[version]

    def came_last(self, version: int | None) -> int:
        """The number of its last transition."""
        return self.store("reader").lifecycle.history(version)[-1].sequence if version else 0

    def expected_last_good(self) -> int | None:
        return next((each for each in reversed(self.promotions) if self.state(each) is VersionState.PROMOTED), None)

    @invariant()
    def what_is_served_is_good(self) -> None:
        store = self.store("reader")
        states = store.lifecycle.states()
        assert states == {version: history[-1] for version, history in self.known.items()}
        assert states.keys() <= self.files == set(store.versions())
        assert store.lifecycle.last_good() == self.expected_last_good()
        newest = store.lifecycle.newest_servable()
        servable = [version for version, state in states.items() if state in SERVABLE]
        assert newest == max(servable, default=None)
        assert newest is None or states[newest] not in BARRED
        for version in servable:
            assert store.manifest(version).target_fingerprint == TARGET
        sequences = [each.sequence for history in store.lifecycle.histories().values() for each in history]
        assert len(sequences) == len(set(sequences))

    def teardown(self) -> None:
        """Whatever was cut short can be brought to its end, and no transition went without its event."""
        for version in sorted(self.files):
            if self.state(version) in (None, VersionState.WRITTEN, VersionState.VALIDATED):
                self.admit_in(self.store("reader"), version)
                assert self.store("reader").lifecycle.state(version) is VersionState.SCORED
            self.store("reader").load(version, expected_fingerprint=TARGET, expected_shapes=SHAPES)
        told = iter(
            [(event.kind, event.fields["version"]) for event in self.store("reader").lifecycle.events.tail(999)]
        )
        assert all(event in told for event in self.events)
        self.scratch.cleanup()


def test_what_is_served_is_good_wherever_somebody_dies() -> None:
    class Machine(LifecycleMachine):
        died: ClassVar[set[str]] = set()

    run_state_machine_as_test(
        Machine, settings=settings(max_examples=60, stateful_step_count=25, deadline=None, derandomize=True)
    )
    assert {"fsync", "rename", "unlink"} <= Machine.died


def write_and_admit(store: DraftStore) -> None:
    written = store.write(WEIGHTS, DRAFT_JSON, parent=3, target_fingerprint=TARGET, info={})
    admit(store, written.version, target_fingerprint=TARGET, actor="trainer", reason="finite")


CALLS: dict[str, tuple[Callable[[DraftStore], object], int]] = {
    "write and admit": (write_and_admit, 15),
    "promote": (lambda store: store.lifecycle.move(3, VersionState.PROMOTED, actor="engine:a"), 3),
    "roll back": (lambda store: store.lifecycle.bar(3, actor="engine:a", reason="worse"), 6),
    "prune": (lambda store: store.prune(1), 5),
}
"""And the fewest steps that each may have: fewer would mean that a step goes unseen here."""


@pytest.mark.parametrize("name", CALLS)
def test_every_step_of_every_call_may_be_the_last(tmp_path: Path, name: str) -> None:
    """Version 1 is good, 2 may be served, 3 is live; every process that dies is followed by one that is whole."""
    template = DraftStore(tmp_path / "template")
    for _ in range(3):
        write_and_admit(template)
    for number, state in ((1, VersionState.LIVE), (1, VersionState.PROMOTED), (3, VersionState.LIVE)):
        template.lifecycle.move(number, state, actor="test")
    call, fewest = CALLS[name]
    for step in itertools.count():
        root = Path(shutil.copytree(template.root, tmp_path / str(step)))
        try:
            with dying_before(step):
                call(DraftStore(root))
        except Crash:
            store = DraftStore(root)
            assert store.lifecycle.last_good() in (1, 3)
            for version, state in store.lifecycle.states().items():
                assert state not in SERVABLE or store.load(version, expected_fingerprint=TARGET)
            unfinished = [each for each in store.versions() if store.lifecycle.state(each) is None]
            call(store)
            assert store.lifecycle.last_good() == (3 if name == "promote" else 1)
            assert not unfinished or name != "prune" or not set(unfinished) & set(store.versions())
        else:
            break
    assert step >= fewest
