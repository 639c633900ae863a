"""The life of a version: which ways there are, which version is the last good one, and what many writers do to it."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from speculator.errors import LifecycleError, StoreError
from speculator.versions.lifecycle import (
    ALLOWED,
    BARRED,
    SERVABLE,
    Event,
    EventLog,
    Lifecycle,
    Transition,
    VersionState,
)
from tests.fixtures.faults import Crash

WRITTEN, VALIDATED, SCORED, LIVE = VersionState.WRITTEN, VersionState.VALIDATED, VersionState.SCORED, VersionState.LIVE
PROMOTED, ROLLED_BACK, QUARANTINED = VersionState.PROMOTED, VersionState.ROLLED_BACK, VersionState.QUARANTINED
TO_SCORED = (WRITTEN, VALIDATED, SCORED)
TO_GOOD = (*TO_SCORED, LIVE, PROMOTED)
ROLLBACK = (ROLLED_BACK, QUARANTINED)
WAYS: dict[VersionState | None, Sequence[VersionState]] = {
    None: (),
    WRITTEN: (WRITTEN,),
    VALIDATED: (WRITTEN, VALIDATED),
    SCORED: TO_SCORED,
    LIVE: (*TO_SCORED, LIVE),
    PROMOTED: TO_GOOD,
    ROLLED_BACK: (*TO_GOOD, ROLLED_BACK),
    QUARANTINED: (WRITTEN, QUARANTINED),
}
"""How to get a version into each state."""


@pytest.fixture
def life(tmp_path: Path) -> Lifecycle:
    return Lifecycle(tmp_path)


def go(life: Lifecycle, version: int, *states: VersionState, actor: str = "test") -> None:
    for state in states:
        life.move(version, state, actor=actor)


def test_nothing_is_known_of_an_empty_store(life: Lifecycle) -> None:
    assert (life.state(1), life.states(), life.history(1), life.last_good(), life.newest_servable()) == (
        *(None, {}, [], None),
        None,
    )
    assert (life.rollbacks_in_a_row(), life.events.tail(9)) == ([], [])
    assert list(life.root.iterdir()) == []


@pytest.mark.parametrize("before", WAYS, ids=str)
@pytest.mark.parametrize("after", VersionState, ids=str)
def test_only_the_ways_of_the_table_are_taken(
    life: Lifecycle, before: VersionState | None, after: VersionState
) -> None:
    go(life, 3, *WAYS[before])
    assert life.state(3) is before
    if after in ALLOWED[before]:
        assert life.move(3, after, actor="test")
        assert life.state(3) is after
    elif after is before:
        assert not life.move(3, after, actor="test")
    else:
        known = before.value if before else "unknown"
        with pytest.raises(LifecycleError, match=f"draft version 3 is {known} and cannot become {after.value}"):
            life.move(3, after, actor="test")
        assert life.state(3) is before


def test_the_table_is_the_drawing() -> None:
    """Written out, so that a change of the table is a change of this test."""
    drawn = {
        (None, WRITTEN),
        *itertools.pairwise(TO_GOOD),
        (PROMOTED, PROMOTED),
        (LIVE, ROLLED_BACK),
        (PROMOTED, ROLLED_BACK),
        (ROLLED_BACK, QUARANTINED),
        (QUARANTINED, SCORED),
        *((state, QUARANTINED) for state in TO_GOOD),
    }
    assert {(before, after) for before, ways in ALLOWED.items() for after in ways} == drawn
    assert SERVABLE.isdisjoint(BARRED)


def test_a_transition_is_kept_with_its_reason_and_numbers(life: Lifecycle) -> None:
    go(life, 1, WRITTEN)
    numbers = {"p_value": 0.01, "rounds": 50, "test": "paired", "confirmed": True, "bound": None}
    life.move(1, QUARANTINED, actor="engine:a", reason="not finite", numbers=numbers)
    go(life, 2, WRITTEN)
    # What another process reads.
    first, second = Lifecycle(life.root).history(1)
    assert (first.state, first.sequence, first.reason, first.numbers) == (WRITTEN, 1, "", {})
    assert (second.state, second.actor, second.reason, second.numbers) == (
        *(QUARANTINED, "engine:a", "not finite"),
        numbers,
    )
    assert (second.sequence, life.history(2)[0].sequence) == (2, 3)
    assert second.at_ms >= first.at_ms > 1_700_000_000_000


def test_each_transition_is_an_event(life: Lifecycle) -> None:
    # Numbers may have the names of an event's own fields.
    life.move(1, WRITTEN, actor="trainer", reason="new", numbers={"kind": 1, "actor": 2, "version": 3})
    life.move(1, VALIDATED, actor="trainer")
    life.move(1, VALIDATED, actor="trainer")
    written, validated = life.events.tail(9)
    assert (written.kind, written.actor) == ("written", "trainer")
    assert written.fields == {"version": 1, "reason": "new", "numbers": {"kind": 1, "actor": 2, "version": 3}}
    assert (validated.kind, validated.fields) == ("validated", {"version": 1, "reason": "", "numbers": {}})


def test_a_transition_is_made_even_where_its_event_cannot_be_written(life: Lifecycle) -> None:
    (life.root / "events.jsonl").mkdir()
    with pytest.raises(StoreError, match=r"events\.jsonl"):
        life.move(1, WRITTEN, actor="test")
    assert life.state(1) is WRITTEN
    assert not life.move(1, WRITTEN, actor="test")
    (life.root / "events.jsonl").rmdir()
    go(life, 1, VALIDATED)
    assert [(event.kind, event.sequence) for event in life.events.tail(9)] == [("written", 1), ("validated", 2)]


def cut_short(life: Lifecycle, version: int, state: VersionState) -> None:
    """A process is killed after the transition and before its event."""

    class DyingLog(EventLog):
        def add(self, event: Event) -> None:
            raise Crash

    dying = Lifecycle(life.root)
    dying.events = DyingLog(life.root)
    with pytest.raises(Crash):
        dying.move(version, state, actor="engine:killed", reason="worse", numbers={"p_value": 0.01})


def test_an_event_that_a_crash_kept_from_being_written_is_told_all_the_same(life: Lifecycle) -> None:
    go(life, 1, *TO_SCORED, LIVE)
    life.events.append("gate", actor="trainer")
    cut_short(life, 1, ROLLED_BACK)
    assert [event.kind for event in life.events.tail(2)] == ["live", "gate"]
    # At once, from the states, and for good with the next transition, of whichever version.
    promised = life.recent_events(1)
    go(Lifecycle(life.root), 2, WRITTEN)
    *_, told, last = life.events.tail(9)
    assert [told] == promised
    made = life.history(1)[-1]
    assert (told.kind, told.actor, told.at_ms, told.sequence) == ("rolled_back", "engine:killed", made.at_ms, 5)
    assert told.fields == {"version": 1, "reason": "worse", "numbers": {"p_value": 0.01}}
    assert (last.kind, last.sequence) == ("written", 6)
    assert life.recent_events(99) == life.events.tail(99)
    assert len(life.recent_events(3)) == 3
    assert life.recent_events(0) == []


def test_what_is_forgotten_was_told_and_its_numbers_are_not_given_again(life: Lifecycle) -> None:
    go(life, 1, *TO_SCORED)
    cut_short(life, 1, QUARANTINED)
    assert life.forget(1)
    go(life, 2, WRITTEN)
    told = [(event.kind, event.fields["version"], event.sequence) for event in life.events.tail(2)]
    assert told == [("quarantined", 1, 4), ("written", 2, 5)]


# -- the last good version


def test_the_last_good_version_is_the_one_promoted_last(life: Lifecycle) -> None:
    go(life, 1, *TO_GOOD)
    go(life, 2, *TO_GOOD)
    assert life.last_good() == 2
    go(life, 1, PROMOTED)
    assert (life.last_good(), life.last_good(other_than=1)) == (1, 2)
    go(life, 1, *ROLLBACK)
    assert (life.last_good(), life.last_good(other_than=2)) == (2, None)
    go(life, 2, QUARANTINED)
    assert life.last_good() is None
    # Released, but not promoted again.
    go(life, 1, SCORED)
    assert life.last_good() is None


def test_the_newest_servable_version_is_not_barred(life: Lifecycle) -> None:
    go(life, 1, *TO_GOOD)
    go(life, 2, *TO_SCORED)
    go(life, 3, *TO_SCORED, LIVE, ROLLED_BACK)
    go(life, 4, *TO_SCORED, QUARANTINED)
    go(life, 5, WRITTEN, VALIDATED)
    assert life.newest_servable() == 2
    go(life, 3, QUARANTINED, SCORED)
    assert life.newest_servable() == 3


def test_rollbacks_in_a_row_are_those_of_engines_since_a_promotion(life: Lifecycle) -> None:
    for version in (1, 2, 3, 4, 5):
        go(life, version, *TO_SCORED, LIVE)
    go(life, 1, ROLLED_BACK, QUARANTINED, actor="engine:a")
    go(life, 2, PROMOTED)
    go(life, 4, ROLLED_BACK, actor="engine:b")
    go(life, 3, ROLLED_BACK, QUARANTINED, actor="engine:a")
    go(life, 5, ROLLED_BACK, actor="operator:me")
    row = life.rollbacks_in_a_row()
    assert [rollback.actor for rollback in row] == ["engine:b", "engine:a"]
    assert row[0].sequence < row[1].sequence
    go(life, 3, SCORED)
    assert [rollback.actor for rollback in life.rollbacks_in_a_row()] == ["engine:b"]
    # What an operator confirms ends the row as well.
    go(life, 2, PROMOTED, actor="operator:me")
    assert life.rollbacks_in_a_row() == []


@pytest.mark.parametrize("before", [state for state in WAYS if state], ids=str)
def test_barring_ends_in_quarantine_from_everywhere(life: Lifecycle, before: VersionState) -> None:
    go(life, 1, *WAYS[before])
    for _ in range(2):
        life.bar(1, actor="engine:a", reason="worse", numbers={"p_value": 0.01})
    states = [transition.state for transition in life.history(1)]
    passed = [ROLLED_BACK] if before in (LIVE, PROMOTED) else []
    assert states == [*WAYS[before], *passed, *([] if before is QUARANTINED else [QUARANTINED])]
    if before is LIVE:
        assert [each.numbers for each in life.history(1)[-2:]] == [{"p_value": 0.01}] * 2
        assert [rollback.reason for rollback in life.rollbacks_in_a_row()] == ["worse"]


def test_the_unknown_is_not_barred(life: Lifecycle) -> None:
    with pytest.raises(LifecycleError, match="version 1 is unknown"):
        life.bar(1, actor="test", reason="")


def test_what_is_live_or_the_last_good_is_not_forgotten(life: Lifecycle) -> None:
    go(life, 1, *TO_GOOD)
    go(life, 2, *TO_GOOD)
    go(life, 3, *TO_SCORED, LIVE)
    go(life, 4, *TO_SCORED, QUARANTINED)
    assert [life.forget(version) for version in (1, 2, 3, 4, 5)] == [True, False, False, True, True]
    assert life.states() == {2: PROMOTED, 3: LIVE}


# -- many writers


def test_threads_make_each_transition_once(life: Lifecycle) -> None:
    together = threading.Barrier(4)

    def contend(_: int) -> int:
        own, made = Lifecycle(life.root), 0
        together.wait()
        for version, state in itertools.product((1, 2, 3), TO_SCORED):
            # Another thread may be ahead of this one.
            with contextlib.suppress(LifecycleError):
                made += own.move(version, state, actor="test")
        return made

    with ThreadPoolExecutor(4) as pool:
        made = sum(pool.map(contend, range(4)))
    assert made == 9
    assert life.states() == {1: SCORED, 2: SCORED, 3: SCORED}
    sequences = [transition.sequence for history in life.histories().values() for transition in history]
    assert sorted(sequences) == list(range(1, 10))
    assert len(life.events.tail(100)) == 9


PROMOTE_OFTEN = """
import sys
from speculator.versions.lifecycle import Lifecycle, VersionState, Transition
life = Lifecycle(sys.argv[1])
for _ in range(25):
    life.move(1, VersionState.PROMOTED, actor=sys.argv[2])
"""


def test_processes_lose_no_transition_and_readers_see_whole_ones(life: Lifecycle) -> None:
    go(life, 1, *TO_GOOD)
    writers = [subprocess.Popen([sys.executable, "-c", PROMOTE_OFTEN, life.root, f"engine:{name}"]) for name in "abc"]
    while any(writer.poll() is None for writer in writers):
        assert life.last_good() == 1
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert [transition.sequence for transition in life.history(1)] == list(range(1, 81))
    events = life.events.tail(1000)
    assert [event.kind for event in events[5:]] == ["promoted"] * 75
    assert [event.actor for event in events] == [transition.actor for transition in life.history(1)]


def test_readers_see_all_states_at_one_moment(life: Lifecycle) -> None:
    """While one reads, version 1 takes the place of version 2: there is a good one before, after and in between."""
    go(life, 1, *TO_SCORED, LIVE)
    go(life, 2, *TO_GOOD)
    writer = threading.Thread(
        target=lambda: (go(Lifecycle(life.root), 1, PROMOTED), go(Lifecycle(life.root), 2, *ROLLBACK))
    )

    class Slow(Lifecycle):
        def history(self, version: int) -> list[Transition]:
            found = super().history(version)
            if version == 1:
                writer.start()
                # Far longer than it needs where nothing holds it up.
                writer.join(0.3)
            return found

    assert Slow(life.root).last_good() == 2
    writer.join()
    assert Lifecycle(life.root).last_good() == 1


# -- damage


@pytest.mark.parametrize("damage", [b"", b"[{", b'[{"state": "better"}]', b"\xff\xfe", b"[" * 100_000], ids=len)
def test_a_damaged_state_is_an_error_that_names_the_file(life: Lifecycle, damage: bytes) -> None:
    go(life, 1, *TO_GOOD)
    go(life, 7, WRITTEN)
    path = life.root / "states" / "000007.json"
    path.write_bytes(damage)
    for read in (life.states, life.last_good, lambda: life.state(7), lambda: life.move(7, VALIDATED, actor="test")):
        with pytest.raises(StoreError, match=r"000007\.json is damaged .*: remove it") as caught:
            read()
        assert len(str(caught.value)) < 400
    assert life.state(1) is PROMOTED
    path.unlink()
    assert life.states() == {1: PROMOTED}


def test_an_unwritable_store_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="check its permissions and free space"):
        Lifecycle(tmp_path / "file" / "drafts").move(1, WRITTEN, actor="test")


def test_what_a_crash_left_beside_the_states_is_not_one(life: Lifecycle) -> None:
    go(life, 1, WRITTEN)
    (life.root / "states" / "000001.tmp").write_bytes(b"[{")
    (life.root / "states" / "000002.tmp").write_bytes(b"[{")
    (life.root / "states" / "notes.json").write_bytes(b"[{")
    assert life.states() == {1: WRITTEN}
    go(life, 1, VALIDATED)
    go(life, 2, WRITTEN)
    assert life.states() == {1: VALIDATED, 2: WRITTEN}


# -- events


def test_a_torn_line_is_passed_over_and_takes_no_other_with_it(life: Lifecycle) -> None:
    life.events.append("one", actor="test")
    whole = (life.root / "events.jsonl").read_bytes()
    for length in range(len(whole)):
        (life.root / "events.jsonl").write_bytes(whole + whole[:length])
        life.events.append("two", actor="test", size=length)
        events = life.events.tail(9)
        # All but the newline had been written: that is a whole event.
        torn = ["one"] if length == len(whole) - 1 else []
        assert [event.kind for event in events] == ["one", *torn, "two"]
        assert events[-1].fields == {"size": length}
    lines = (life.root / "events.jsonl").read_text().splitlines()
    assert all(lines), "every line is an event, as other tools expect"


def test_the_tail_is_the_last_events_oldest_first(life: Lifecycle) -> None:
    life.events = EventLog(life.root, max_bytes=400)
    assert life.events.tail(3) == []
    for number in range(20):
        life.events.append("count", actor="test", number=number)
    sizes = [os.path.getsize(life.root / name) for name in ("events.jsonl", "events.1.jsonl")]
    assert max(sizes) < 600
    kept = [event.fields["number"] for event in life.events.tail(100)]
    assert 5 <= len(kept) < 20
    assert kept == list(range(20))[-len(kept) :]
    for count in range(len(kept) + 1):
        assert [event.fields["number"] for event in life.events.tail(count)] == list(range(20 - count, 20))


def test_writers_that_rotate_together_lose_only_the_oldest(life: Lifecycle) -> None:
    def write(writer: int) -> None:
        for number in range(40):
            EventLog(life.root, max_bytes=2000).append("count", actor=str(writer), number=number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    events = life.events.tail(1000)
    # Two files of 2000 bytes, less the younger's free room.
    assert sum(len(msgspec.json.encode(event)) for event in events) > 1900
    for writer in "0123":
        numbers = [event.fields["number"] for event in events if event.actor == writer]
        assert numbers == list(range(40 - len(numbers), 40))


def test_a_log_that_other_events_have_filled_is_not_told_again(life: Lifecycle) -> None:
    life.events = EventLog(life.root, max_bytes=400)
    go(life, 1, *TO_GOOD)
    time.sleep(0.005)
    for _ in range(20):
        life.events.append("gate", actor="trainer")
    go(life, 2, WRITTEN)
    told = [(event.fields["version"], event.kind) for event in life.recent_events(99) if event.sequence]
    assert told == [(2, "written")]


def test_a_log_that_cannot_be_written_keeps_no_version_from_being_forgotten(life: Lifecycle) -> None:
    go(life, 1, WRITTEN)
    (life.root / "events.jsonl").unlink()
    (life.root / "events.jsonl").mkdir()
    with pytest.raises(StoreError, match="free space"):
        life.move(2, WRITTEN, actor="test")
    assert life.forget(1)
    assert life.states() == {2: WRITTEN}
