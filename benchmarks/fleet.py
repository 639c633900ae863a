"""Four engines and a trainer on one Redis and one store: how drafts spread over them, and what a kill leaves.

    python -m benchmarks.fleet [--engines 4] [--quick] [--json FILE] [--prompts FILE.jsonl] [--model DIR_OR_ID]
                               [--patience-s 600]

Every engine is a `slipstream serve` of its own with clients that never stop asking, and with a draft that knows their
answers. In this order:

* a good draft is published, and once its canary runs it a copy of it, which waits: seconds until every engine has the
  first and it is promoted;
* while the copy is on its canary these are killed with SIGKILL, and started again as a supervisor would: the canary,
  another engine, the trainer, Redis;
* the operator rolls the copy back: seconds until no engine runs it;
* a bad one, random weights, is published: how many engines ever ran it, and seconds until none does;
* a good one once more, as before: the engines that came back take part.

A good draft has learnt longer than the one before it, whose equal would need thousands of verifications for a verdict;
with --quick it is its equal.

Which versions an engine had in service is read from its own log. In the end each trace that Redis has acknowledged must
be in one account, as in benchmarks/kills.py. With --quick the target is the toy in float64, asked one question, whose
answer consists mostly of one token: the good draft always proposes it. With several questions, asked again and again,
the watch would take the few different answers of a short trial for a difference of the drafts (a real model is asked
hundreds for that reason); and the toy's engines draft in every round, since a planner would learn anew after each swap
what so sure and so poor a draft is worth.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common import Target, fill_in, finish, parser, pick_prompts
from benchmarks.engines import answers_of, engine_with
from benchmarks.faults.accounts import Accounts
from benchmarks.faults.load import CHANGED, CUT, OK
from benchmarks.fleet_processes import KNOWN_VERIFICATIONS, Fleet, dtype_of
from benchmarks.live import trained
from benchmarks.rollback import noisy
from benchmarks.services import TRAINER_ENVIRONMENT, wait
from benchmarks.versions import add_first
from slipstream.models import resolve_model
from speculator.checkpoint import draft_state
from speculator.drafts import DraftDesk
from speculator.fresh import fresh_draft
from speculator.lifecycle import State
from speculator.model import Eagle3Draft
from speculator.trace import Trace
from tests.toy import make_toy_model, random_draft

MAX_TOKENS = 32
LEARNT_FROM = 96
"""Questions whose answers the good draft has learnt."""
TOY_QUESTIONS = ["a"]
TOY_FAVOURITE = 29
"""The token that most of its answer consists of."""
SAY_EVERY_S = 60.0


@dataclasses.dataclass(kw_only=True)
class Figures:
    """Seconds, and counts; what was not reached stays as it is."""

    good_s: float = float("inf")
    """From publishing it until every engine has had it and it is promoted, with the next one waiting."""
    bad_ran: int = 99
    bad_s: float = float("inf")
    """From publishing until it is barred and nobody runs it."""
    bad_by: str = ""
    canary_passed_s: float = float("inf")
    """From the kill of the canary until another engine is it."""
    rolled_back_s: float = float("inf")
    """From the operator's word until nobody runs the version."""
    again_s: float = float("inf")
    """As `good_s`, after the kills."""
    failed_elsewhere: int = 0
    """Requests to engines that nobody has killed, and that were not answered."""
    outcomes: dict[str, int] = dataclasses.field(default_factory=dict)
    """Of all requests."""
    unknown_versions: int = 0
    """Engines that reported another version than they should have, after a kill."""


class Drafts(NamedTuple):
    """In the order in which they are published."""

    first: Eagle3Draft
    good: Eagle3Draft
    bad: dict[str, Tensor]
    better: Eagle3Draft


def run(fleet: Fleet, drafts: Drafts, timeout_s: float) -> tuple[Figures, Accounts]:
    """Raises TimeoutError where something does not happen."""
    figures, started_s = Figures(), time.monotonic()
    first = add_first(fleet.store, drafts.first, fleet.fingerprint)
    fleet.publish(first)
    with fleet.running():
        wait(lambda: fleet.all_run(first), "all engines to report", 60)
        wait_until_known(fleet, timeout_s)
        figures.good_s, settled, waiting = spread(fleet, drafts.good, timeout_s)
        _say(f"good in {figures.good_s:.1f} s")
        kills(fleet, waiting, settled, figures, timeout_s)
        figures.rolled_back_s = roll_back(fleet, waiting, settled)
        _say(f"rolled back in {figures.rolled_back_s:.1f} s")
        bad = fleet.add(drafts.bad, drafts.good)
        fleet.publish(bad)
        figures.bad_s = wait(lambda: fleet.state(bad) is State.QUARANTINED, "the bad draft to be barred", timeout_s)
        figures.bad_s += wait(lambda: fleet.all_run(settled), "everybody to be back", 30)
        figures.bad_by = fleet.store.lifecycle.history(bad)[-1].actor.partition(":")[0]
        _say(f"bad barred in {figures.bad_s:.1f} s by {figures.bad_by}")
        wait_until_known(fleet, timeout_s)
        figures.again_s = spread(fleet, drafts.better, timeout_s)[0]
        _say(f"good again in {figures.again_s:.1f} s")
        figures.bad_ran = fleet.ran(bad)
        figures.outcomes = dict(fleet.outcomes(started_s))
        for load in fleet.loads:
            load.stop()
        wait(fleet.is_settled, "everything to be settled", 180)
        fleet.trainer.end(signal.SIGTERM)
        return figures, fleet.accounts()


def wait_until_known(fleet: Fleet, timeout_s: float) -> None:
    """Until each engine has verified enough of what its draft proposes; says once a minute how far each has come."""
    said_s = time.monotonic()

    def is_known() -> bool:
        nonlocal said_s
        if time.monotonic() - said_s >= SAY_EVERY_S:
            said_s = time.monotonic()
            _say(f"verifications of the draft in service, by engine: {fleet.verifications()}")
        return fleet.know_their_draft()

    wait(is_known, f"{KNOWN_VERIFICATIONS} verifications of each engine", timeout_s)


def spread(fleet: Fleet, draft: Eagle3Draft, timeout_s: float) -> tuple[float, int, int]:
    """Seconds from publishing it until every engine has kept it, its version, and that of the copy that waits."""
    version, waiting = (fleet.add(draft_state(draft), draft) for _ in range(2))
    started_s = time.monotonic()
    fleet.publish(version)
    wait(lambda: fleet.canary(version) is not None, "a canary", timeout_s)
    fleet.publish(waiting)
    wait(lambda: fleet.state(version) is State.PROMOTED, f"version {version} to be promoted", timeout_s)
    wait(lambda: fleet.ran(version) == len(fleet.engines), f"version {version} on all engines", 30)
    return time.monotonic() - started_s, version, waiting


def roll_back(fleet: Fleet, version: int, settled: int) -> float:
    """By the operator; seconds until everybody runs the settled version."""
    started_s = time.monotonic()
    with fleet.pointer() as pointer:
        desk = DraftDesk(fleet.store, lambda: pointer)
        desk.rollback(actor="operator:benchmark", reason="benchmark", version=version)
    wait(lambda: fleet.all_run(settled), "everybody to be back", 60)
    return time.monotonic() - started_s


def kills(fleet: Fleet, version: int, settled: int, figures: Figures, timeout_s: float) -> None:
    """Everything in turn while the version is on its canary."""
    wait(lambda: fleet.canary(version) is not None, "a canary", timeout_s)
    canary = fleet.canary(version)
    other = next(number for number in range(len(fleet.engines)) if number != canary)
    for victim in ("canary", "other", "trainer", "redis"):
        killed = {"other": other, "canary": canary}.get(victim)
        started_s = time.monotonic()
        if victim == "redis":
            fleet.kill_redis()
        else:
            (fleet.trainer if killed is None else fleet.engines[killed]).end(signal.SIGKILL)
        fleet.revive()
        wait(fleet.is_ready, f"answers after the kill: {victim}", 120)
        wait(lambda: len(fleet.reports()) == len(fleet.engines), "all to report again", 60)
        if victim == "canary":
            wait(lambda: fleet.canary(version) is not None, "another canary", timeout_s)
            figures.canary_passed_s = time.monotonic() - started_s
        versions = {int(report["version"]) for report in fleet.reports().values()}
        figures.unknown_versions += len(versions - {version, settled})
        failed = fleet.outcomes(started_s, but=killed)
        figures.failed_elsewhere += failed.total() - failed[OK] - failed[CHANGED]
        _say(f"{victim} killed: {dict(fleet.outcomes(started_s))}, elsewhere {dict(failed)}, versions {versions}")


def favourite(model_dir: Path, *, scale: float) -> Eagle3Draft:
    """For the toy: random weights; with scale 0 it proposes the first token of its vocabulary, the favourite."""
    draft = random_draft(model_dir, seed=9, draft_vocab_size=16, scale=scale)
    draft.d2t.copy_(torch.full_like(draft.d2t, TOY_FAVOURITE))
    return draft


def learnt(model_dir: Path, questions: Sequence[str], num_steps: Sequence[int]) -> list[Eagle3Draft]:
    """Drafts that have learnt their target's own answers for so many steps."""
    traces: list[Trace] = []
    settings = {"dtype": dtype_of(is_toy=False), "depth": 0, "suffix_depth": 0, "context_length": 512}
    with engine_with(model_dir, fresh_draft(model_dir, seed=0), 1, settings=settings, on_trace=traces.append) as engine:
        prompts = [engine.tokenizer.encode(question) for question in questions]
        asyncio.run(answers_of(engine, prompts, MAX_TOKENS))
    return [trained(model_dir, traces, steps)[0] for steps in num_steps]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    options = parser("How drafts spread over several engines, and what kills leave")
    options.add_argument("--engines", type=int, default=4)
    options.add_argument("--questions", type=int, default=400, help="different ones; default 400")
    options.add_argument(
        "--train-steps", type=int, default=100, help="of the good draft; the one before it has a fifth; default 100"
    )
    options.add_argument(
        "--patience-s",
        type=float,
        help="give up after waiting so long for engines to verify enough, for a canary, or for a verdict; "
        "default 600, quick 120",
    )
    arguments = options.parse_args()
    fill_in(arguments, {"patience_s": (120.0, 600.0)})
    is_toy = arguments.quick
    torch.set_num_threads(1)
    os.environ.update(TRAINER_ENVIRONMENT)
    # The trainer learns and reviews; the versions that are tried here are this program's own.
    os.environ["SLIPSTREAM_TRAINER_PUBLISH_INTERVAL_S"] = "100000"
    del os.environ["SLIPSTREAM_TRAINER_DRAFT_VOCAB_SIZE"]
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="slipstream-") as name:
        folder = Path(name)
        if is_toy:
            model_dir, questions = make_toy_model(folder / "toy"), TOY_QUESTIONS
            good = favourite(model_dir, scale=0.0)
            drafts = Drafts(good, good, draft_state(favourite(model_dir, scale=1.0)), good)
        else:
            model_dir = resolve_model(arguments.model)
            questions = [prompt.text[:200] for prompt in pick_prompts(arguments.prompts, arguments.questions)]
            steps = [arguments.train_steps // 5, arguments.train_steps, 3 * arguments.train_steps]
            first, good, better = learnt(model_dir, questions[:LEARNT_FROM], steps)
            drafts = Drafts(first, good, noisy(good, float("inf")), better)
        fleet = Fleet(folder, model_dir, questions, arguments.engines, is_toy=is_toy)
        figures, accounts = run(fleet, drafts, arguments.patience_s)
    _finish(figures, accounts, time.monotonic() - started_s, arguments)


def _finish(figures: Figures, accounts: Accounts, seconds: float, arguments: Any) -> None:
    finish(
        [
            ("engines, seconds in all", f"{arguments.engines}, {seconds:.0f}"),
            ("good draft: seconds until all have had it and it is promoted", f"{figures.good_s:.1f}"),
            ("bad draft: engines that ever ran it", figures.bad_ran),
            ("bad draft: seconds until it is barred and gone, by", f"{figures.bad_s:.1f}, {figures.bad_by}"),
            ("canary killed: seconds until another is", f"{figures.canary_passed_s:.1f}"),
            ("operator's rollback: seconds until nobody runs it", f"{figures.rolled_back_s:.1f}"),
            ("another good draft, after the kills: seconds", f"{figures.again_s:.1f}"),
            ("requests", figures.outcomes),
            ("failed requests to engines that were not killed", figures.failed_elsewhere),
            ("traces", accounts),
        ],
        [
            Target("engines_that_ran_the_bad_draft", figures.bad_ran, 1, at_least=False),
            Target("failed_elsewhere", figures.failed_elsewhere, 0, at_least=False),
            Target("cut", figures.outcomes.get(CUT, 0), 0, at_least=False),
            # In bfloat16 a text may depend on what was computed beside it.
            *([Target("changed", figures.outcomes.get(CHANGED, 0), 0, at_least=False)] if arguments.quick else []),
            Target("unknown_versions", figures.unknown_versions, 0, at_least=False),
            Target("lost_silently", accounts.silently_lost, 0, at_least=False),
            Target("used_twice", accounts.used_twice, 0, at_least=False),
        ],
        {**dataclasses.asdict(figures), "traces": dataclasses.asdict(accounts), "seconds": round(seconds)},
        arguments.json,
    )


if __name__ == "__main__":
    main()
