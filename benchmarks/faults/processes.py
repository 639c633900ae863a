"""Faults of our own processes: killed, asked to end under load, and a disk that takes no drafts."""

from __future__ import annotations

import os
import signal
import time

from benchmarks.faults.fault import Observed, fault
from benchmarks.faults.load import BROKEN, CHANGED, CUT, OK
from benchmarks.faults.loop import Loop
from speculator.errors import SlipstreamError
from tests.fixtures.faults import filled

GRACE_S = 30.0


@fault(
    "trainer killed (SIGKILL), started again",
    "serving does not notice; no trace is lost; it goes on from its checkpoint",
)
def trainer_killed(loop: Loop) -> Observed:
    before, started_s = loop.lag(), time.monotonic()
    loop.kill(loop.train)
    during = loop.wait_for_answers(40)
    loop.start_train()
    loop.away = None
    resumed_s = loop.wait_until_settled()
    after = loop.lag()
    return Observed(
        told=f"{during}; trained on {resumed_s:.1f} s after its start; {after.lost - before.lost} traces lost",
        checks={
            "no request failed": during.num_failed == 0,
            "no trace lost": after.lost == before.lost,
            "nothing set aside": after.dead_lettered == before.dead_lettered,
        },
        figures={"resumed_s": resumed_s, "away_s": time.monotonic() - started_s},
    )


@fault(
    "trainer ended (SIGTERM) in the middle of its work",
    "it finishes the step, saves, acknowledges; exit code 0 within 30 s",
    is_slow=True,
)
def trainer_ended(loop: Loop) -> Observed:
    code, took_s = _terminate(loop, "train")
    loop.start_train()
    loop.away = None
    loop.wait_until_settled()
    return Observed(
        told=f"exit code {code} after {took_s:.1f} s",
        checks={"exit code 0": code == 0, "in time": took_s < GRACE_S},
        figures={"took_s": took_s},
    )


@fault(
    "gateway with engine killed (SIGKILL), started again",
    "no client takes a cut answer for a whole one; it comes back with a good draft and the same texts",
)
def engine_killed(loop: Loop) -> Observed:
    started_s = time.monotonic()
    loop.kill(loop.serve)
    loop.start_serve()
    loop.away = None
    ready_s = time.monotonic()
    during = loop.load.since(started_s, ready_s)
    after = loop.wait_for_answers(40)
    version = loop.version()
    state = loop.store.lifecycle.state(version)
    return Observed(
        told=f"{during.outcomes[BROKEN]} requests raised in the client, {during.outcomes[CUT]} looked whole and were "
        f"not; ready after {ready_s - started_s:.1f} s with version {version}, then {after}",
        checks={
            "no cut answer": during.outcomes[CUT] == 0 and during.outcomes[CHANGED] == 0,
            "served again": after.num_failed == 0,
            "a known version": state is not None,
        },
        figures={"raised": during.outcomes[BROKEN], "ready_s": ready_s - started_s},
    )


@fault(
    "gateway ended (SIGTERM) under load",
    "running answers finish; exit code 0 within 30 s; no cut answer",
    is_slow=True,
)
def engine_ended(loop: Loop) -> Observed:
    started_s = time.monotonic()
    code, took_s = _terminate(loop, "serve")
    draining = loop.load.since(started_s, started_s + took_s)
    loop.start_serve()
    loop.away = None
    after = loop.wait_for_answers()
    return Observed(
        told=f"exit code {code} after {took_s:.1f} s; while it ended {draining.outcomes[OK]} answers were finished, "
        f"{draining.outcomes[CUT]} cut; after the restart {after}",
        checks={
            "exit code 0": code == 0,
            "in time": took_s < GRACE_S,
            "no cut answer": draining.outcomes[CUT] == 0 and draining.outcomes[CHANGED] == 0,
            "served again": after.num_failed == 0,
        },
        figures={"took_s": took_s, "finished": draining.outcomes[OK]},
    )


@fault(
    "the store's disk full",
    "no draft is harmed; what cannot be published is counted; publishing goes on by itself",
    needs_small_disks=True,
)
def store_full(loop: Loop) -> Observed:
    errors = _publish_errors(loop)
    started_s = time.monotonic()
    with filled(loop.store_dir):
        refused_s = loop.wait(lambda: _publish_errors(loop) > errors, "a version that cannot be written", 60)
        versions = loop.store.versions()
    damaged = [version for version in versions if not _loads(loop, version)]
    newest = loop.store.latest() or 0
    again_s = loop.wait(lambda: (loop.store.latest() or 0) > newest, "the next version", 60)
    during = loop.load.since(started_s)
    return Observed(
        told=f"counted after {refused_s:.1f} s; {len(versions)} versions whole, {len(damaged)} damaged; next version "
        f"{again_s:.1f} s after there was room; {during}",
        checks={"no version damaged": not damaged, "no request failed": during.num_failed == 0},
        figures={"versions": len(versions), "damaged": len(damaged), "again_s": again_s},
    )


def _terminate(loop: Loop, name: str) -> tuple[int, float]:
    """(exit code, seconds)"""
    child = loop.away = getattr(loop, name)
    started_s = time.monotonic()
    os.kill(child.pid, signal.SIGTERM)
    child.stop(timeout_s=GRACE_S)
    return child.returncode, time.monotonic() - started_s


def _publish_errors(loop: Loop) -> float:
    return loop.trainer_metrics().total("slipstream_trainer_publish_errors_total")


def _loads(loop: Loop, version: int) -> bool:
    try:
        loop.store.load(version, expected_fingerprint=loop.fingerprint)
    except SlipstreamError:
        return False
    return True
