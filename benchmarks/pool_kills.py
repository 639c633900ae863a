"""The kills of benchmarks/sglang_pool.py: what each does to requests and traces, and how long it lasts."""

from __future__ import annotations

import signal
import time
from typing import Any

from benchmarks.pool_scene import CLIENTS, Scene
from benchmarks.pool_traffic import CUT, OK, REFUSED
from tests.sglang.pooled import ENGINES

Figures = dict[str, Any]


def kill_trainer(scene: Scene) -> Figures:
    scene.pool.wait_for(lambda: _acked(scene) > 0, "the trainer to learn")
    in_flight, killed_s = scene.load.num_under_way, time.monotonic()
    scene.trainer.end(signal.SIGKILL)
    scene.trainer.start()
    learns_again_s = _learns_again(scene, killed_s)
    return {**_since(scene, killed_s, in_flight), "learns_again_s": learns_again_s}


def _learns_again(scene: Scene, killed_s: float) -> float:
    """Seconds from the kill until the trainer has acknowledged more than it has now."""
    acked = _acked(scene)
    scene.pool.wait_for(lambda: _acked(scene) > acked, "the trainer to go on")
    return time.monotonic() - killed_s


def _acked(scene: Scene) -> int:
    lag = scene.lag()
    return 0 if lag is None else lag.acked


def kill_redis(scene: Scene) -> Figures:
    in_flight, killed_s = scene.load.num_under_way, time.monotonic()
    steps = {name: report["steps"] for name, report in scene.reports().items()}
    scene.kill_redis()
    scene.answered(6, "answers without Redis")
    away_s = time.monotonic() - killed_s
    answered = {each.request_id for each in list(scene.load.asked) if each.outcome == OK}
    scene.start_redis()

    def all_report() -> bool:
        reports = scene.reports()
        return len(reports) == len(ENGINES) and all(steps[name] != each["steps"] for name, each in reports.items())

    scene.pool.wait_for(all_report, "the engines to report again")
    report_s = time.monotonic() - killed_s
    scene.pool.wait_for(lambda: answered <= scene.witness.engine_of.keys(), "the traces that waited in the engines")
    traced_s = time.monotonic() - killed_s
    learns_again_s = _learns_again(scene, killed_s)
    return {
        **_since(scene, killed_s, in_flight),
        "away_s": away_s,
        "report_again_s": report_s,
        "traced_s": traced_s,
        "learns_again_s": learns_again_s,
    }


def kill_front(scene: Scene, name: str) -> Figures:
    """A gateway, or the router that every gateway asks first; the other ones answer until it is back."""
    pool, load = scene.pool, scene.load
    pool.wait_for(lambda: load.num_under_way == CLIENTS, "requests under way")
    with load.held():
        in_flight = load.num_under_way if name in pool.routers else load.num_at(pool.url_of(name))
        killed_s = time.monotonic()
        pool.kill(name)
    pool.start(name)
    scene.answered(1, f"an answer without {name}")
    pool.wait_for(lambda: pool.serves(name), f"{name} to be back")
    back_s = time.monotonic() - killed_s
    scene.answered(4, "more of them")
    later = [each for each in list(load.asked) if each.started_s > killed_s]
    return {
        **_since(scene, killed_s, in_flight),
        "asked_elsewhere": sum(each.asked_elsewhere for each in later),
        "answered_again_s": min(each.ended_s for each in later if each.outcome == OK) - killed_s,
        "back_s": back_s,
    }


def kill_engine(scene: Scene) -> Figures:
    name, running = ENGINES[0], dict.fromkeys(ENGINES, 0)
    before, wanted = scene.reports()[name]["process"], scene.pointer.desired()
    scene.pool.wait_for(lambda: scene.pool.num_running(name) >= 2, "requests on the engine")

    def all_have_arrived() -> bool:
        running.update({engine: scene.pool.num_running(engine) for engine in ENGINES})
        return sum(running.values()) == scene.load.num_under_way

    with scene.load.held():
        scene.pool.wait_for(all_have_arrived, "every request to be on an engine")
        killed_s = time.monotonic()
        scene.pool.kill(name)
    scene.answered(6, "answers of the other engine")
    scene.pool.start_engine(name)
    serves_s = time.monotonic() - killed_s

    def is_back() -> bool:
        report = scene.reports().get(name, {})
        return report.get("process", before) != before and int(report["version"]) == wanted

    scene.pool.wait_for(is_back, "the engine to converge")
    converged_s = time.monotonic() - killed_s
    scene.pool.wait_for(lambda: all(map(scene.pool.serves, scene.pool.routers)), "the routers to see it")
    traced = scene.witness.num_of(name)
    scene.pool.wait_for(lambda: scene.witness.num_of(name) > traced, "its traces again")
    since = _since(scene, killed_s, running[name])
    return {**since, "serves_s": serves_s, "converged_s": converged_s, "killed_s": killed_s}


def _since(scene: Scene, killed_s: float, in_flight: int) -> Figures:
    """What had begun before the kill and failed was cut, even where no answer to it had begun."""
    ended = [each for each in list(scene.load.asked) if each.ended_s >= killed_s]
    failed = [each for each in ended if each.outcome != OK]
    late = [each.outcome for each in failed if each.started_s >= killed_s]
    return {
        "in_flight": in_flight,
        "answered": len(ended) - len(failed),
        "cut": len(failed) - late.count(REFUSED),
        "refused": late.count(REFUSED),
        "cut_that_began_after": late.count(CUT),
    }
