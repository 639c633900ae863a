"""Four engines and a trainer on one Redis and one store: how drafts spread over them, and what a kill leaves.

    python -m benchmarks.fleet [--engines 4] [--quick] [--json FILE] [--prompts FILE.jsonl] [--model DIR_OR_ID]

Every engine is a `slipstream serve` of its own with clients that never stop asking, and with a draft that knows their
answers. In this order:

* a good draft, as good as the one in service, is published, and once its canary runs it a copy of it, which waits:
  seconds until every engine has the first and it is promoted;
* while the copy is on its canary these are killed with SIGKILL, and started again as a supervisor would: the canary,
  another engine, the trainer, Redis;
* the operator rolls the copy back: seconds until no engine runs it;
* a bad one, random weights, is published: how many engines ever ran it, and seconds until none does;
* a good one once more, as before: the engines that came back take part.

Which versions an engine had in service is read from its own log. In the end each trace that Redis has acknowledged must
be in one account, as in benchmarks/kills.py. With --quick the target is the toy in float64, asked one question, whose
answer consists mostly of one token: the good draft always proposes it. With several questions, asked again and again,
the watch would take the few different answers of a short trial for a difference of the drafts; and the toy's engines
draft in every round, since a planner would learn anew after each swap what so sure and so poor a draft is worth.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from benchmarks.common import Target, finish, parser, pick_prompts
from benchmarks.engines import answers_of, engine_with
from benchmarks.faults.accounts import Accounts, settle
from benchmarks.faults.load import CHANGED, CUT, OK, Load
from benchmarks.faults.witness import digest
from benchmarks.kills import TRAINER_ENVIRONMENT, Service
from benchmarks.live import trained
from benchmarks.panels import free_port
from benchmarks.rollback import noisy
from slipstream.models import resolve_model
from speculator.checkpoint import draft_config_json, draft_state, model_key, target_fingerprint
from speculator.drafts import DraftDesk
from speculator.embedded_redis import EmbeddedRedis
from speculator.errors import StreamError
from speculator.fresh import fresh_draft
from speculator.ledger import StreamLag
from speculator.lifecycle import State
from speculator.lineage import admit
from speculator.model import Eagle3Draft
from speculator.pointer import DraftPointer
from speculator.redis_client import connect
from speculator.store import DraftStore
from speculator.stream import TraceStream
from speculator.trace import Trace
from tests.toy import make_toy_model, random_draft
from trainer.checkpoint import load_checkpoint

MODEL = "fleet"
STREAM_MAX_BYTES = 256 << 20
MAX_TOKENS = 32
CLIENTS = 2
"""An engine."""
KNOWN_VERIFICATIONS = 1000
TOY_QUESTIONS = ["a"]
TOY_FAVOURITE = 29
"""The token that most of its answer consists of."""
_INSTALLED = re.compile(r"draft version (\d+) in service at step")


class Fleet:
    """The processes, and what is in the store. Use with `running`."""

    def __init__(
        self, folder: Path, model_dir: Path, questions: Sequence[str], num_engines: int, *, is_toy: bool
    ) -> None:
        self.folder, self.model_dir = folder, model_dir
        self.fingerprint = target_fingerprint(model_dir)
        self.key = model_key(model_dir, self.fingerprint)
        self.store = DraftStore(folder / "drafts")
        self.redis = EmbeddedRedis(folder / "redis")
        common = ["--model", str(model_dir), "--redis-url", self.redis.url, "--store", str(self.store.root)]
        ports = [free_port() for _ in range(num_engines)]
        self.engines = [
            Service(
                folder,
                f"engine-{number}",
                [
                    *(
                        "serve",
                        *common,
                        "--name",
                        MODEL,
                        "--port",
                        str(port),
                        "--capture",
                        "--dtype",
                        dtype_of(is_toy=is_toy),
                    ),
                    *("--context-length", "512", "--threads", "1", "--suffix-depth", "0"),
                    *("--stream-max-bytes", str(STREAM_MAX_BYTES)),
                ],
                always_drafts=is_toy,
            )
            for number, port in enumerate(ports)
        ]
        self.trainer = Service(folder, "trainer", ["train", *common, "--state", str(folder / "state")])
        self.loads = [
            Load(f"http://127.0.0.1:{port}", MODEL, num_clients=CLIENTS, pause_s=0.02, questions=questions)
            for port in ports
        ]

    @property
    def services(self) -> list[Service]:
        return [*self.engines, self.trainer]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        try:
            with contextlib.ExitStack() as loads:
                self.revive()
                wait(self.is_ready, "all engines to be ready", 180)
                for load in self.loads:
                    loads.enter_context(load.running())
                yield
        finally:
            for service in self.services:
                service.close()
            self.redis.stop()

    def revive(self) -> None:
        for service in self.services:
            if not service.is_alive:
                service.start()

    def is_ready(self) -> bool:
        try:
            return all(
                httpx.get(f"{load.url}/ready", timeout=5, trust_env=False).status_code == 200 for load in self.loads
            )
        except httpx.TransportError:
            return False

    def kill_redis(self) -> None:
        os.kill(self.redis.pid, signal.SIGKILL)
        self.redis.stop()
        self.redis = EmbeddedRedis(self.folder / "redis")

    # -- drafts

    def add(self, state: dict[str, Tensor], draft: Eagle3Draft) -> int:
        """A version that has passed the gate on paper."""
        parent = self.store.latest()
        config = draft_config_json(draft.config)
        version = self.store.write(
            state, config, parent=parent, target_fingerprint=self.fingerprint, info={"origin": "benchmark"}
        ).version
        admit(self.store, version, target_fingerprint=self.fingerprint, actor="benchmark", reason="benchmark")
        return version

    def publish(self, version: int) -> None:
        with self.pointer() as pointer:
            pointer.publish(version)

    @contextlib.contextmanager
    def pointer(self) -> Iterator[DraftPointer]:
        with connect(self.redis.url) as client:
            yield DraftPointer(client, self.key)

    def reports(self) -> dict[int, dict[str, str]]:
        """By engine, of those that live."""
        with contextlib.suppress(StreamError), self.pointer() as pointer:
            found = pointer.engines()
            by_pid = {engine_id.rpartition("-")[2]: report for engine_id, report in found.items()}
            return {
                number: by_pid[str(engine.pid)]
                for number, engine in enumerate(self.engines)
                if str(engine.pid) in by_pid and engine.is_alive
            }
        return {}

    def canary(self, version: int) -> int | None:
        """The engine that says that it is this version's canary."""
        said = {"version": str(version), "role": "canary"}
        return next((number for number, report in self.reports().items() if said.items() <= report.items()), None)

    def all_run(self, version: int) -> bool:
        reports = self.reports()
        return len(reports) == len(self.engines) and {one["version"] for one in reports.values()} == {str(version)}

    def know_their_draft(self) -> bool:
        """Whether each has something to compare the next one with; a planner that has just begun hardly drafts."""
        reports = self.reports()
        known = [int(report["baseline_verifications"]) >= KNOWN_VERIFICATIONS for report in reports.values()]
        return len(known) == len(self.engines) and all(known)

    def ran(self, version: int) -> int:
        """How many engines ever had it in service."""
        logs = (engine.log.read_text(errors="replace") for engine in self.engines)
        return sum(str(version) in _INSTALLED.findall(log) for log in logs)

    def state(self, version: int) -> State | None:
        return self.store.lifecycle.state(version)

    # -- traces

    def lag(self) -> StreamLag:
        with connect(self.redis.url) as client:
            return TraceStream(client, self.key, max_bytes=STREAM_MAX_BYTES, consumer="witness").lag()

    def is_settled(self) -> bool:
        self.revive()
        try:
            pages = [httpx.get(f"{load.url}/metrics", timeout=5, trust_env=False).text for load in self.loads]
            lag = self.lag()
        except (httpx.HTTPError, StreamError):
            return False
        return all("slipstream_traces_pending 0.0" in page for page in pages) and lag.pending + lag.undelivered == 0

    def accounts(self) -> Accounts:
        """Needs the trainer to have ended."""
        told = (note.partition(" ")[::2] for each in self.engines for note in each.notes.read_text().splitlines())
        saved = load_checkpoint(self.folder / "state")
        assert saved is not None, "the trainer has saved nothing"
        lag = self.lag()
        return settle(
            acknowledged={what for kind, what in told if kind == "acknowledged"},
            notes=self.trainer.notes.read_text().splitlines(),
            last_saved=digest(saved[1]),
            waiting=lag.pending + lag.undelivered,
            lost=lag.lost,
        )

    # -- answers

    def outcomes(self, since_s: float, *, but: int | None = None) -> Counter[str]:
        loads = (load for number, load in enumerate(self.loads) if number != but)
        return sum((load.since(since_s).outcomes for load in loads), Counter[str]())


def dtype_of(*, is_toy: bool) -> str:
    return "float64" if is_toy else "float32"


def wait(condition: Callable[[], object], what: str, timeout_s: float) -> float:
    """Seconds until it is true. Raises TimeoutError."""
    started_s = time.monotonic()
    while not condition():
        if time.monotonic() - started_s > timeout_s:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(0.1)
    return time.monotonic() - started_s


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
    """Requests to engines that nobody has killed, and that were not answered, or changed."""
    outcomes: dict[str, int] = dataclasses.field(default_factory=dict)
    """Of all requests."""
    unknown_versions: int = 0
    """Engines that reported another version than they should have, after a kill."""


def run(fleet: Fleet, good: Eagle3Draft, bad_state: dict[str, Tensor], timeout_s: float) -> tuple[Figures, Accounts]:
    """Raises TimeoutError where something does not happen."""
    figures, started_s = Figures(), time.monotonic()
    first = fleet.add(draft_state(good), good)
    for state in (State.LIVE, State.PROMOTED):
        fleet.store.lifecycle.move(first, state, actor="benchmark")
    fleet.publish(first)
    with fleet.running():
        wait(lambda: fleet.all_run(first), "all engines to report", 60)
        wait(fleet.know_their_draft, "all engines to know what they run", timeout_s)
        figures.good_s, settled, waiting = spread(fleet, good, timeout_s)
        _say(f"good in {figures.good_s:.1f} s")
        kills(fleet, waiting, settled, figures, timeout_s)
        figures.rolled_back_s = roll_back(fleet, waiting, settled)
        _say(f"rolled back in {figures.rolled_back_s:.1f} s")
        bad = fleet.add(bad_state, good)
        fleet.publish(bad)
        figures.bad_s = wait(lambda: fleet.state(bad) is State.QUARANTINED, "the bad draft to be barred", timeout_s)
        figures.bad_s += wait(lambda: fleet.all_run(settled), "everybody to be back", 30)
        figures.bad_by = fleet.store.lifecycle.history(bad)[-1].actor.partition(":")[0]
        _say(f"bad barred in {figures.bad_s:.1f} s by {figures.bad_by}")
        wait(fleet.know_their_draft, "all engines to know what they run", timeout_s)
        figures.again_s = spread(fleet, good, timeout_s)[0]
        _say(f"good again in {figures.again_s:.1f} s")
        figures.bad_ran = fleet.ran(bad)
        figures.outcomes = dict(fleet.outcomes(started_s))
        for load in fleet.loads:
            load.stop()
        wait(fleet.is_settled, "everything to be settled", 180)
        fleet.trainer.end(signal.SIGTERM)
        return figures, fleet.accounts()


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
        figures.failed_elsewhere += failed.total() - failed[OK]
        _say(f"{victim} killed: {dict(fleet.outcomes(started_s))}, elsewhere {dict(failed)}, versions {versions}")


def favourite(model_dir: Path, *, scale: float) -> Eagle3Draft:
    """For the toy: random weights; with scale 0 it proposes the first token of its vocabulary, the favourite."""
    draft = random_draft(model_dir, seed=9, draft_vocab_size=16, scale=scale)
    draft.d2t.copy_(torch.full_like(draft.d2t, TOY_FAVOURITE))
    return draft


def learnt(model_dir: Path, questions: Sequence[str], num_steps: int) -> Eagle3Draft:
    """A draft that has learnt its target's own answers."""
    traces: list[Trace] = []
    settings = {"dtype": dtype_of(is_toy=False), "depth": 0, "suffix_depth": 0, "context_length": 512}
    with engine_with(model_dir, fresh_draft(model_dir, seed=0), 1, settings=settings, on_trace=traces.append) as engine:
        prompts = [engine.tokenizer.encode(question) for question in questions]
        asyncio.run(answers_of(engine, prompts, MAX_TOKENS))
    return trained(model_dir, traces, num_steps)[0]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    options = parser("How drafts spread over several engines, and what kills leave")
    options.add_argument("--engines", type=int, default=4)
    options.add_argument("--questions", type=int, default=16, help="different ones; default 16")
    options.add_argument("--train-steps", type=int, default=100, help="of the good draft; default 100")
    arguments = options.parse_args()
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
            good, bad = favourite(model_dir, scale=0.0), draft_state(favourite(model_dir, scale=1.0))
        else:
            model_dir = resolve_model(arguments.model)
            questions = [prompt.text[:200] for prompt in pick_prompts(arguments.prompts, arguments.questions)]
            good = learnt(model_dir, questions, arguments.train_steps)
            bad = noisy(good, float("inf"))
        fleet = Fleet(folder, model_dir, questions, arguments.engines, is_toy=is_toy)
        figures, accounts = run(fleet, good, bad, 120 if arguments.quick else 600)
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
            Target(
                "cut_or_changed", figures.outcomes.get(CUT, 0) + figures.outcomes.get(CHANGED, 0), 0, at_least=False
            ),
            Target("unknown_versions", figures.unknown_versions, 0, at_least=False),
            Target("lost_silently", accounts.silently_lost, 0, at_least=False),
            Target("used_twice", accounts.used_twice, 0, at_least=False),
        ],
        {**dataclasses.asdict(figures), "traces": dataclasses.asdict(accounts), "seconds": round(seconds)},
        arguments.json,
    )


if __name__ == "__main__":
    main()
