"""Two real SGLang servers behind real sglang-routers: how drafts reach both, and what becomes of requests in a kill.

.venv-sglang/bin/python -m benchmarks.sglang_pool [--quick] [--json FILE] [--prompts FILE.jsonl]

Redis, two SGLang servers with the plugin and its watch, two sglang-routers, two `slipstream gateway --pool` that know
both and `slipstream train`, under clients that know both gateways and ask the same eight questions again and again: a
client that a gateway refuses the connection asks the other at once. Before they start, two drafts learn the
target's answers to these: one a little, which is in service at first, and one well. Then, in this order:

* the trainer is killed with SIGKILL and started again, and so is Redis, which stays away for some answers;
* random weights are published: how many engines ever run them, seconds until they are barred and gone;
* the draft that has learnt well is published: seconds until a canary has it, both do, and it is promoted;
* versions that were promoted before are published in turn: seconds until both engines run them;
* each router, each gateway and an engine are killed and started again, the router that is asked first at first.

With --quick only routers and gateways are killed, and engines know less of what they run: on two cores the two
servers take two minutes to start, and one that starts again beside the other takes as long. The other kills are in
tests/sglang/test_pool.py and benchmarks/kills.py.

A witness reads the stream beside the trainer: each answer that came to its end must have a trace, or be counted, and
each trace must be in one of the trainer's accounts, as in benchmarks/kills.py. SGLang drafts at a fixed depth of 2, so
there are no control steps to wait for, and runs on the project's CPU operators: the figures are about the pool, not
about speed.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Target, finish, parser, pick_prompts
from benchmarks.faults.accounts import Accounts
from benchmarks.pool_kills import Figures, kill_engine, kill_front, kill_redis, kill_trainer
from benchmarks.pool_scene import CLIENTS, MAX_TOKENS, TRAINER_ENVIRONMENT, Scene, learnt
from benchmarks.pool_traffic import OK
from benchmarks.rollback import noisy
from slipstream.models import resolve_model
from speculator.checkpoint import draft_state
from speculator.lifecycle import State
from speculator.model import Eagle3Draft

QUESTIONS = 8
QUESTION_CHARACTERS = 300
TRAIN_STEPS = (15, 60)
KNOWN_VERIFICATIONS = 1200
"""Of the version in service: from then on another one is tried as soon as it comes (serving/watch.py)."""
QUICK_KNOWN_VERIFICATIONS = 300
"""Then it is tried when it has waited for half a minute."""
QUEUE_S = 2.0
"""What an engine answered so shortly before it was killed may still have waited in its memory to be written."""


def main() -> None:
    arguments = parser("Two SGLang servers behind sglang-router").parse_args()
    os.environ.update(TRAINER_ENVIRONMENT)
    model_dir = resolve_model(arguments.model)
    prompts = [
        dataclasses.replace(prompt, text=prompt.text[:QUESTION_CHARACTERS])
        for prompt in pick_prompts(arguments.prompts, QUESTIONS)
    ]
    first, better = learnt(model_dir, prompts, TRAIN_STEPS)
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        scene, figures = Scene(Path(folder), model_dir, prompts, first), Figures()
        with scene.running():
            scene.answered(8, "the first answers")
            started_s = time.monotonic()
            if not arguments.quick:
                _say(figures, "trainer", kill_trainer(scene))
                _say(figures, "redis", kill_redis(scene))
            enough = QUICK_KNOWN_VERIFICATIONS if arguments.quick else KNOWN_VERIFICATIONS
            scene.pool.wait_for(lambda: scene.know_their_draft(enough), "the engines to know what they run", 240)
            bad = [_try_bad(scene, better, seed) for seed in range(1 if arguments.quick else 3)]
            _say(figures, "bad", bad)
            _say(figures, "good", _try_good(scene, better))
            _say(figures, "switched", _switch(scene, (scene.first, figures["good"]["version"]), arguments.quick))
            for name in scene.pool.routers + scene.pool.gateways:
                _say(figures, name, kill_front(scene, name))
            killed_s = None
            if not arguments.quick:
                engine = kill_engine(scene)
                killed_s = engine.pop("killed_s")
                _say(figures, "engine", engine)
            scene.answered(8, "answers after the last kill")
            scene.load.stop()
            _say(figures, "books", _settle(scene, engine_killed_s=killed_s))
            for each in bad:
                each["engines_that_ran_it"] = scene.ran(each["version"])
            figures["requests"], figures["seconds"] = dict(scene.load.since(0)), time.monotonic() - started_s
            whole = [each for each in scene.load.asked if each.outcome == OK]
            figures["answer_s"] = statistics.median(each.ended_s - each.started_s for each in whole)
            scene.trainer.end(signal.SIGTERM)
            accounts = scene.accounts()
    _finish(figures, accounts, scene.pool.routers + scene.pool.gateways, arguments.json)


def _say(figures: Figures, name: str, what: Any) -> None:
    figures[name] = what
    print(f"{name}: {what}", flush=True)


# -- drafts


def _try_bad(scene: Scene, like: Eagle3Draft, seed: int) -> Figures:
    """Random weights past the gate."""
    version = scene.add(noisy(like, float("inf"), seed), like)
    scene.pointer.publish(version)
    started_s = time.monotonic()
    scene.pool.wait_for(lambda: scene.state(version) is not State.SCORED, "a canary", 240)
    canary_s = time.monotonic() - started_s
    scene.pool.wait_for(lambda: scene.state(version) is State.QUARANTINED, "the bad draft to be barred", 240)
    barred_s = time.monotonic() - started_s
    scene.pool.wait_for(lambda: scene.all_run(scene.first), "both engines to run the first one", 60)
    gone_s = time.monotonic() - started_s
    last = scene.store.lifecycle.history(version)[-1]
    return {
        "version": version,
        "canary_s": canary_s,
        "barred_s": barred_s,
        "gone_s": gone_s,
        "by": last.actor,
        "reason": last.reason,
        "trial": last.numbers,
        "requests": dict(scene.load.since(started_s)),
    }


def _try_good(scene: Scene, draft: Eagle3Draft) -> Figures:
    version = scene.add(draft_state(draft), draft)
    before = _accept_lengths(scene)
    scene.pointer.publish(version)
    started_s = time.monotonic()
    scene.pool.wait_for(lambda: version in scene.versions().values(), "a canary", 240)
    canary_s = time.monotonic() - started_s
    scene.pool.wait_for(lambda: scene.all_run(version), "both engines to run the good draft", 240)
    both_s = time.monotonic() - started_s
    scene.pool.wait_for(lambda: scene.state(version) is State.PROMOTED, "the good draft to be promoted", 240)
    return {
        "version": version,
        "canary_s": canary_s,
        "both_s": both_s,
        "promoted_s": time.monotonic() - started_s,
        "accept_length_before": before,
        "accept_length": _accept_lengths(scene),
        "trial": scene.store.lifecycle.history(version)[-1].numbers,
        "requests": dict(scene.load.since(started_s)),
    }


def _accept_lengths(scene: Scene) -> dict[str, float]:
    """Of the drafts in service, by engine."""
    lengths = {name: report.get("draft_accept_length") for name, report in scene.reports().items()}
    return {name: float(length) for name, length in lengths.items() if length is not None}


def _switch(scene: Scene, versions: tuple[int, int], is_quick: bool) -> Figures:
    """Seconds from the pointer's change until the first engine, and until both, report the version."""
    first_s, all_s, started_s = [], [], time.monotonic()
    for version in versions * (2 if is_quick else 4):
        scene.pointer.publish(version)
        published_s = time.monotonic()
        scene.pool.wait_for(lambda: version in scene.versions().values(), "the first engine")  # noqa: B023
        first_s.append(time.monotonic() - published_s)
        scene.pool.wait_for(lambda: scene.all_run(version), "both engines")  # noqa: B023
        all_s.append(time.monotonic() - published_s)
        scene.answered(4, "answers under the new version")
    return {"first_s": first_s, "all_s": all_s, "requests": dict(scene.load.since(started_s))}


# -- accounts


def _settle(scene: Scene, *, engine_killed_s: float | None) -> Figures:
    """What became of each answer's trace, once the trainer has nothing left to read."""
    answered = {each.request_id: each.ended_s for each in scene.load.asked if each.outcome == OK}

    def silent() -> set[str]:
        untraced = answered.keys() - scene.witness.engine_of.keys()
        return {each for each in untraced if engine_killed_s is None or abs(answered[each] - engine_killed_s) > QUEUE_S}

    def is_settled() -> bool:
        return scene.num_waiting() == 0 and not silent()

    try:
        scene.pool.wait_for(is_settled, "the trainer", 60)
    except AssertionError as error:
        print(str(error).partition(":")[0], flush=True)
    traced, reports = scene.witness.engine_of, scene.reports().values()
    dropped = sum((_counts(report.get("dropped_by_reason", "")) for report in reports), Counter[str]())
    # What a client left, or a router cut, is no answer.
    del dropped["aborted"]
    untraced = answered.keys() - traced.keys()
    return {
        "answered": len(answered),
        "traced": len(traced),
        "traced_by_engine": dict(Counter(traced.values())),
        "appended_twice": scene.witness.appended_twice,
        "answered_without_trace": len(untraced),
        "in_the_killed_engine": len(untraced - silent()),
        "dropped": dict(dropped),
    }


def _counts(text: str) -> Counter[str]:
    """Of a report's "reason=count,…"."""
    pairs = (each.partition("=") for each in text.split(",") if each)
    return Counter({reason: int(count) for reason, _, count in pairs})


# -- the end


def _finish(figures: Figures, accounts: Accounts, fronts: Sequence[str], path: Path | None) -> None:
    bad, good, switched, books = (figures[name] for name in ("bad", "good", "switched", "books"))
    kills = {name: figures[name] for name in ("trainer", "redis", *fronts, "engine") if name in figures}

    def slowest(name: str) -> float:
        return float(max(each[name] for each in bad))

    def seconds(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.2f} (≤ {max(values):.2f})"

    switched_s = switched["first_s"], switched["all_s"]
    rows: list[tuple[str, object]] = [
        ("seconds in all, once everything serves; requests", f"{figures['seconds']:.0f}; {figures['requests']}"),
        ("an answer (s, median)", _round(figures["answer_s"])),
        ("random weights: engines that ever ran them", [each["engines_that_ran_it"] for each in bad]),
        ("  published → canary, barred, gone (s)", [_of(each, "canary_s", "barred_s", "gone_s") for each in bad]),
        ("  by", [f"{each['by']}: {each['reason']}, {each['trial']}" for each in bad]),
        ("good draft: published → canary, both, promoted (s)", _of(good, "canary_s", "both_s", "promoted_s")),
        ("  accept length before, after", f"{good['accept_length_before']}, {good['accept_length']}"),
        ("promoted before: published → first engine, both (s)", ", ".join(map(seconds, switched_s))),
        *((f"kill -9 of {name}", {key: _round(value) for key, value in what.items()}) for name, what in kills.items()),
        ("answers", books),
        ("traces", accounts),
    ]  # fmt: skip
    calm = sum((Counter(each["requests"]) for each in (*bad, good, switched)), Counter[str]())
    unaccounted = books["answered_without_trace"] - books["in_the_killed_engine"] - sum(books["dropped"].values())
    at_most = {
        "engines_that_ran_random_weights": (slowest("engines_that_ran_it"), 1),
        "random_weights_gone_s": (slowest("gone_s"), 60),
        "good_draft_promoted_s": (good["promoted_s"], 120),
        "slowest_switch_to_both_s": (max(switched["all_s"]), 5),
        "failed_while_versions_came": (calm.total() - calm[OK], 0),
        "cut_beyond_in_flight_at_router_or_gateway": (
            max(kills[name]["cut"] - kills[name]["in_flight"] for name in fronts),
            0,
        ),
        "refused_at_router_or_gateway": (sum(kills[name]["refused"] for name in fronts), 0),
        "cut_that_began_after_a_kill": (sum(each["cut_that_began_after"] for each in kills.values()), 0),
        "answers_without_trace_or_count": (max(unaccounted, 0), 0),
        "traces_lost_silently": (accounts.silently_lost, 0),
        "traces_lost_or_unread": (accounts.lost + accounts.waiting, 0),
        "traces_used_twice": (accounts.used_twice, 0),
    }
    if (engine := kills.get("engine")) is not None:
        at_most |= {
            "failed_beyond_in_flight_on_the_engine": (_failed(engine) - engine["in_flight"], 0),
            "failed_without_trainer_or_redis": (_failed(kills["trainer"]) + _failed(kills["redis"]), 0),
        }
    targets = [Target(name, value, bound, at_least=False) for name, (value, bound) in at_most.items()]
    if engine is not None:
        targets.append(Target("in_flight_on_the_killed_engine", engine["in_flight"], 1))
    setting = {"clients": CLIENTS, "max_tokens": MAX_TOKENS, "questions": QUESTIONS, "train_steps": TRAIN_STEPS}
    finish(rows, targets, {**setting, **figures, "traces": dataclasses.asdict(accounts)}, path)


def _failed(what: Figures) -> int:
    return int(what["cut"] + what["refused"])


def _of(figures: Figures, *names: str) -> str:
    return ", ".join(f"{figures[name]:.1f}" for name in names)


def _round(value: object) -> object:
    return round(value, 2) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
