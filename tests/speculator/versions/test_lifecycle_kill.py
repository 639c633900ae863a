"""Kill -9 of a process that writes, promotes, rolls back and prunes: the store it leaves behind is a good one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from speculator.draft.checkpoint import draft_config_json, draft_state
from speculator.versions.lifecycle import BARRED, SERVABLE, State
from speculator.versions.lineage import admit
from speculator.versions.store import DraftStore
from tests.fixtures.drafts import CONFIG, make_draft

TARGET = "a" * 64
# One process that has everything imported forks those that are killed; each says a byte after each of its calls.
VICTIMS = """
import itertools, os, sys
from speculator.versions.lifecycle import State
from speculator.versions.lineage import admit
from speculator.versions.store import DraftStore

def live(root):
    os.write(1, b"%d\\n" % os.getpid())
    store = DraftStore(root)
    for turn in itertools.count():
        weights, config = store.load(1), store.config(1)
        version = store.write(weights, config, parent=1, target_fingerprint="a" * 64, info={}).version
        calls = [lambda: admit(store, version, target_fingerprint="a" * 64, actor="trainer", reason="finite")]
        calls += [lambda: store.lifecycle.move(version, State.LIVE, actor="engine:a")]
        if turn % 2:
            calls += [lambda: store.lifecycle.move(version, State.PROMOTED, actor="engine:a")]
            calls += [lambda: store.prune(3, pinned=1)]
        else:
            calls += [lambda: store.lifecycle.bar(version, actor="engine:a", reason="worse")]
        for call in calls:
            call()
            os.write(1, b".")

for _ in sys.stdin:
    if not (pid := os.fork()):
        live(sys.argv[1])
    os.waitpid(pid, 0)
    print("dead", flush=True)
"""


def written_and_admitted(store: DraftStore) -> int:
    written = store.write(
        draft_state(make_draft()), draft_config_json(CONFIG), parent=None, target_fingerprint=TARGET, info={}
    )
    admit(store, written.version, target_fingerprint=TARGET, actor="trainer", reason="finite")
    return written.version


@pytest.mark.timeout(60)
def test_a_store_is_good_whenever_its_user_is_killed(tmp_path: Path) -> None:
    store = DraftStore(tmp_path / "drafts")
    written_and_admitted(store)
    for state in (State.LIVE, State.PROMOTED):
        store.lifecycle.move(1, state, actor="test")
    chance = random.Random(0)
    with subprocess.Popen(
        [sys.executable, "-c", VICTIMS, store.root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as nursery:
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        for _ in range(8):
            nursery.stdin.write(b"\n")
            victim = int(nursery.stdout.readline())
            for _ in range(chance.randrange(1, 12)):
                assert nursery.stdout.read(1) == b"."
            # Anywhere in its next call: one takes some milliseconds.
            threading.Event().wait(chance.uniform(0, 0.01))
            os.kill(victim, signal.SIGKILL)
            assert nursery.stdout.readline().endswith(b"dead\n")
            check(DraftStore(store.root))
        nursery.stdin.close()
    assert nursery.returncode == 0
    assert store.versions()[-1] > 8
    # Whatever was cut short can be brought to its end.
    for version in store.versions():
        if store.lifecycle.state(version) not in SERVABLE | BARRED:
            admit(store, version, target_fingerprint=TARGET, actor="trainer", reason="finite")
    check(store)
    assert {*SERVABLE, *BARRED} >= set(store.lifecycle.states().values())
    assert store.lifecycle.states().keys() == set(store.versions())


def check(store: DraftStore) -> None:
    states, files = store.lifecycle.states(), store.versions()
    assert states.keys() <= set(files)
    good = store.lifecycle.last_good()
    assert good is not None
    assert states[good] is State.PROMOTED
    for version in files:
        assert store.load(version, expected_fingerprint=TARGET).keys() == draft_state(make_draft()).keys()
    assert states[store.lifecycle.newest_servable() or 0] in SERVABLE
    assert all(event.kind in {state.value for state in State} for event in store.lifecycle.events.tail(9999))
