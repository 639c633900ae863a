"""Two real SGLang servers behind the real sglang-router: how drafts reach both, and what becomes of requests in a kill.

PATH=…:$PATH .venv-sglang/bin/python -m benchmarks.sglang_pool [--quick] [--json FILE] [--prompts FILE.jsonl]

Redis, two SGLang servers with the plugin, sglang-router, `slipstream gateway --pool` and `slipstream train` under
steady streams. Versions are published, and the seconds are taken until each engine runs them; then one engine, the
router and the trainer are killed with SIGKILL, one after another, and started again at once, as a supervisor would. A
witness reads the stream beside the trainer: each answer that came to its end must have a trace, or be counted. SGLang
runs on the project's CPU operators here: the figures are about the pool, not about speed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import Target, finish, parser, pick_prompts
from slipstream.models import resolve_model
from slipstream.topics import Prompt
from speculator.checkpoint import draft_config_json, draft_state, model_key, target_fingerprint
from speculator.codec import decode_trace
from speculator.embedded_redis import EmbeddedRedis
from speculator.fresh import fresh_draft
from speculator.keys import RedisKeys
from speculator.lineage import admit, ensure_lineage
from speculator.pointer import DraftPointer
from speculator.redis_client import connect
from speculator.store import DraftStore
from speculator.stream import TraceStream
from tests.sglang.pooled import ENGINES, MODEL, Pooled

CLIENTS = 4
MAX_TOKENS = 48
OK, CUT, REFUSED = "ok", "cut", "refused"
"""Cut: it had begun, or was under way, when what it hung on ended. Refused: there was nobody to begin it."""
TRAINER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "SLIPSTREAM_TRAINER_CHECKPOINT_INTERVAL_S": "2",
    "SLIPSTREAM_TRAINER_KEEP_VERSIONS": "1000",
    # Which versions come when is this benchmark's to say.
    "SLIPSTREAM_TRAINER_PUBLISH_INTERVAL_S": "100000",
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Times are of `time.monotonic`."""

    started_s: float
    ended_s: float
    outcome: str
    request_id: str


class Load:
    """Clients that stream one answer after another; a refused one waits a little before it asks again."""

    def __init__(self, url: str, prompts: Sequence[Prompt]) -> None:
        self._url, self._prompts = url, itertools.cycle(prompts)
        self._stopping, self._threads = threading.Event(), list[threading.Thread]()
        self.asked: list[Asked] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._threads = [threading.Thread(target=self._client) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """Answers under way come to their end."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def since(self, started_s: float) -> Counter[str]:
        """Outcomes of what ended since then."""
        return Counter(each.outcome for each in list(self.asked) if each.ended_s >= started_s)

    def _client(self) -> None:
        with httpx.Client(base_url=self._url, timeout=120, trust_env=False) as client:
            while not self._stopping.is_set():
                done = self._ask(client, next(self._prompts))
                self.asked.append(done)
                if done.outcome == REFUSED:
                    self._stopping.wait(0.25)

    def _ask(self, client: httpx.Client, prompt: Prompt) -> Asked:
        messages = [{"role": "user", "content": prompt.text[:2000]}]
        fields = {"max_tokens": MAX_TOKENS, "stream": True, "slipstream": {"domain": prompt.domain}}
        body = {"model": MODEL, "messages": messages, **fields}
        started_s, outcome, request_id = time.monotonic(), CUT, ""
        with (
            contextlib.suppress(httpx.TransportError),
            client.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            request_id = response.headers.get("x-request-id", "")
            lines = [line for line in response.iter_lines() if line]
            is_whole = lines[-1:] == ["data: [DONE]"] and not any(line.startswith('data: {"error"') for line in lines)
            outcome = OK if is_whole else CUT if response.status_code == 200 else REFUSED
        return Asked(started_s=started_s, ended_s=time.monotonic(), outcome=outcome, request_id=request_id)


class Witness:
    """Reads the stream from its beginning, beside the trainer: which engine made which request's trace."""

    def __init__(self, redis_url: str, key: str) -> None:
        self._redis, self._stream = connect(redis_url), RedisKeys(model_key=key).ledger.traces
        self._stopping = threading.Event()
        self.engine_of: dict[str, str] = {}
        self.repeated = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            thread.join()

    def _run(self) -> None:
        last = "0"
        while not self._stopping.is_set():
            for _, entries in self._redis.xread({self._stream: last}, count=100, block=200) or ():  # type: ignore[union-attr]
                for entry_id, fields in entries:
                    header = decode_trace(fields[b"payload"]).header
                    self.repeated += header.request_id in self.engine_of
                    self.engine_of[header.request_id] = header.engine_id
                    last = entry_id


class Trainer:
    def __init__(self, folder: Path, model_dir: Path, redis_url: str) -> None:
        places = ["--redis-url", redis_url, "--store", str(folder / "drafts"), "--state", str(folder / "state")]
        self._command = [sys.executable, "-m", "slipstream", "train", "--model", str(model_dir), *places]
        self._log = folder / "trainer.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            environment = {**os.environ, **TRAINER_ENVIRONMENT}
            self._process = subprocess.Popen(self._command, env=environment, stdout=log, stderr=log)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


@dataclass
class Bench:
    pool: Pooled
    load: Load
    witness: Witness
    trainer: Trainer
    pointer: DraftPointer
    stream: TraceStream
    model_dir: Path

    def versions(self) -> dict[str, int]:
        return {name: int(report["version"]) for name, report in self.pointer.engines().items()}

    def answered(self, count: int, what: str) -> None:
        """Wait until `count` more requests have come to their end."""
        before = self.load.since(0)[OK]
        self.pool.wait_for(lambda: self.load.since(0)[OK] >= before + count, what)


def main() -> None:
    arguments = parser("Two SGLang servers behind sglang-router").parse_args()
    with _bench(arguments.model, arguments.prompts) as bench:
        bench.answered(8, "the first answers")
        reached = _publish(bench, 3 if arguments.quick else 6)
        print("published:", reached, flush=True)
        kills = {}
        for name, kill in (("router", _kill_router), ("trainer", _kill_trainer), ("engine", _kill_engine)):
            kills[name] = kill(bench)
            print(f"kill -9 of the {name}:", kills[name], flush=True)
        bench.answered(8, "answers after the last kill")
        bench.load.stop()
        books = _settle(bench)
    _finish(reached, kills, books, bench.load, arguments.json)


@contextlib.contextmanager
def _bench(model: str, prompts: Path | None) -> Iterator[Bench]:
    model_dir = resolve_model(model)
    fingerprint = target_fingerprint(model_dir)
    key = model_key(model_dir, fingerprint)
    with (
        tempfile.TemporaryDirectory(prefix="slipstream-") as name,
        EmbeddedRedis(Path(name) / "redis") as redis,
        contextlib.ExitStack() as opened,
    ):
        folder = Path(name)
        ensure_lineage(DraftStore(folder / "drafts"), model_dir, fingerprint)
        # Versions of random weights would be taken back at once, and rightly so.
        pool = Pooled(folder, model_dir, folder / "drafts", redis.url, settings={"WATCH": "0", "POLL_S": "0.5"})
        bench = Bench(
            pool=pool,
            load=Load(pool.url, pick_prompts(prompts, 2000)),
            witness=Witness(redis.url, key),
            trainer=Trainer(folder, model_dir, redis.url),
            pointer=DraftPointer(connect(redis.url), key),
            stream=TraceStream(connect(redis.url), key, max_bytes=1 << 30, consumer="benchmark"),
            model_dir=model_dir,
        )
        opened.enter_context(pool.running())
        bench.trainer.start()
        opened.callback(bench.trainer.kill)
        opened.enter_context(bench.witness.running())
        opened.enter_context(bench.load.running())
        yield bench


def _publish(bench: Bench, count: int) -> dict[str, Any]:
    """Seconds from the pointer's change until the first engine, and until both, report the version."""
    first_s, all_s, started_s = [], [], time.monotonic()
    for seed in range(1, count + 1):
        version = _random_version(bench, seed)
        bench.pointer.publish(version)
        published_s = time.monotonic()
        bench.pool.wait_for(lambda: version in bench.versions().values(), "the first engine")  # noqa: B023
        first_s.append(time.monotonic() - published_s)
        bench.pool.wait_for(lambda: set(bench.versions().values()) == {version}, "both engines")  # noqa: B023
        all_s.append(time.monotonic() - published_s)
        bench.answered(4, "answers under the new version")
    return {"first_s": first_s, "all_s": all_s, "requests": dict(bench.load.since(started_s))}


def _random_version(bench: Bench, seed: int) -> int:
    store, draft = DraftStore(bench.pool.store), fresh_draft(bench.model_dir, seed=seed)
    first = store.load(1)
    fingerprint = store.manifest(1).target_fingerprint
    state = {**draft_state(draft), "d2t": first["d2t"], "t2d": first["t2d"]}
    version = store.write(state, draft_config_json(draft.config), parent=1, target_fingerprint=fingerprint, info={})
    admit(store, version.version, target_fingerprint=fingerprint, actor="benchmark", reason="random weights")
    return version.version


def _kill_engine(bench: Bench) -> dict[str, Any]:
    name = ENGINES[0]
    bench.pool.wait_for(lambda: bench.pool.num_running(name) >= 2, "requests on the engine")
    before, wanted = bench.pointer.engines()[name]["process"], bench.pointer.desired()
    # A request may begin between the count and the kill: at most one of each client is under way.
    in_flight, killed_s = bench.pool.num_running(name), time.monotonic()
    bench.pool.kill(name)
    bench.answered(6, "answers of the other engine")
    bench.pool.start_engine(name)
    serves_s = time.monotonic() - killed_s

    def is_back() -> bool:
        report = bench.pointer.engines().get(name, {})
        return report.get("process", before) != before and int(report["version"]) == wanted

    bench.pool.wait_for(is_back, "the engine to converge")
    converged_s = time.monotonic() - killed_s
    bench.pool.wait_for(lambda: bench.pool.healthy_workers() == len(ENGINES), "the router to see it")
    traced = sum(engine == name for engine in bench.witness.engine_of.values())
    bench.pool.wait_for(
        lambda: sum(engine == name for engine in bench.witness.engine_of.values()) > traced, "its traces again"
    )
    return {**_since(bench, killed_s, in_flight), "serves_s": serves_s, "converged_s": converged_s}


def _kill_router(bench: Bench) -> dict[str, Any]:
    in_flight, killed_s = _in_flight(bench, at_least=2), time.monotonic()
    bench.pool.kill("router")
    bench.pool.start("router")
    bench.answered(1, "an answer through the new router")
    served_s = min(each.ended_s for each in bench.load.asked if each.started_s > killed_s and each.outcome == OK)
    bench.answered(4, "more of them")
    return {**_since(bench, killed_s, in_flight), "answered_again_s": served_s - killed_s}


def _kill_trainer(bench: Bench) -> dict[str, Any]:
    in_flight, killed_s = _in_flight(bench, at_least=0), time.monotonic()
    acked = bench.stream.lag().acked
    bench.trainer.kill()
    bench.trainer.start()
    bench.pool.wait_for(lambda: bench.stream.lag().acked > acked, "the trainer to go on")
    return {**_since(bench, killed_s, in_flight), "learns_again_s": time.monotonic() - killed_s}


def _in_flight(bench: Bench, *, at_least: int) -> int:
    def count() -> int:
        return sum(bench.pool.num_running(engine) for engine in ENGINES)

    bench.pool.wait_for(lambda: count() >= at_least, "requests under way")
    return count()


def _since(bench: Bench, killed_s: float, in_flight: int) -> dict[str, Any]:
    outcomes = bench.load.since(killed_s)
    late = [each for each in list(bench.load.asked) if each.started_s >= killed_s]
    return {
        "in_flight": in_flight,
        "answered": outcomes[OK],
        "cut": outcomes[CUT],
        "refused": outcomes[REFUSED],
        "cut_that_began_after": sum(each.outcome == CUT for each in late),
    }


def _settle(bench: Bench) -> dict[str, Any]:
    """What became of each answer's trace, once the trainer has nothing left to read."""
    answered = {each.request_id for each in bench.load.asked if each.outcome == OK}

    def waiting() -> int:
        lag = bench.stream.lag()
        return lag.pending + lag.undelivered

    with contextlib.suppress(AssertionError):
        bench.pool.wait_for(lambda: waiting() == 0 and answered <= bench.witness.engine_of.keys(), "the trainer", 60)
    traced, lag = bench.witness.engine_of, bench.stream.lag()
    dropped = sum(int(report.get("dropped", 0)) for report in bench.pointer.engines().values())
    untraced = answered - traced.keys()
    return {
        "answered": len(answered),
        "traces": len(traced),
        "traces_by_engine": dict(Counter(traced.values())),
        "repeated": bench.witness.repeated,
        "answered_without_trace": len(untraced),
        "dropped_and_counted": dropped,
        "appended": lag.appended,
        "acked": lag.acked,
        "waiting": lag.pending + lag.undelivered,
        "lost": lag.lost,
    }


def _finish(
    reached: dict[str, Any], kills: dict[str, dict[str, Any]], books: dict[str, Any], load: Load, path: Path | None
) -> None:
    def seconds(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.2f} (≤ {max(values):.2f})"

    rows: list[tuple[str, object]] = [
        ("requests in all", dict(load.since(0))),
        ("published → first engine, both (s)", f"{seconds(reached['first_s'])}, {seconds(reached['all_s'])}"),
        ("requests while versions came", reached["requests"]),
        *(
            (f"kill -9 of the {name}", {key: _round(value) for key, value in what.items()})
            for name, what in kills.items()
        ),
        ("traces", books),
    ]
    engine, router, trainer = kills["engine"], kills["router"], kills["trainer"]
    failed: Callable[[dict[str, Any]], int] = lambda what: what["cut"] + what["refused"]  # noqa: E731
    targets = [
        Target(
            "failed_while_versions_came", sum(reached["requests"].values()) - reached["requests"].get(OK, 0), 0, False
        ),
        Target("slowest_to_both_s", max(reached["all_s"]), 5, False),
        Target("failed_beyond_in_flight_on_the_engine", failed(engine) - engine["in_flight"], 0, False),
        Target("cut_beyond_in_flight_at_the_router", router["cut"] - CLIENTS, 0, False),
        Target("cut_after_the_router_was_killed", router["cut_that_began_after"], 0, False),
        Target("failed_when_the_trainer_was_killed", failed(trainer), 0, False),
        Target("answered_without_trace", books["answered_without_trace"] - books["dropped_and_counted"], 0, False),
        Target("traces_lost_or_unread", books["lost"] + books["waiting"], 0, False),
        Target("read_twice", books["repeated"], 0, False),
    ]
    document = {"clients": CLIENTS, "max_tokens": MAX_TOKENS, "published": reached, "kills": kills, "traces": books}
    finish(rows, targets, document, path)


def _round(value: object) -> object:
    return round(value, 2) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
