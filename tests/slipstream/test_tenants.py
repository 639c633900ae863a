"""`slipstream tenants erase` with everything running: afterwards the tenant's tokens are nowhere, and others' are."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from serving.capture.recorder import ErasureWatch
from serving.group_cache.texts import GroupKey, GroupTexts
from slipstream import tenants
from slipstream.cli.main import app
from slipstream.start.gateway import erase_on_order
from speculator.draft.checkpoint import model_key, target_fingerprint
from speculator.errors import ConfigError, StoreError
from speculator.host import now_ms
from speculator.recording import RecordingHeader, RecordingReader, RecordingWriter
from speculator.redis.client import RedisKeys, connect
from speculator.redis.control_plane import DraftPointer
from speculator.redis.embedded import EmbeddedRedis
from speculator.redis.trace_deletion import ErasureOrders, TraceRemover
from speculator.redis.trace_stream import GroupRewards, RewardStream, TraceStream
from speculator.trace import Trace, encode_trace, read_header
from speculator.versions.lifecycle import EventLog
from speculator.versions.lineage import counts_of
from speculator.versions.store import DraftStore
from tests.fixtures.traces import with_header
from tests.fixtures.waiting import wait_until
from tests.trainer.answers import answer_traces
from tests.trainer.examples import config_for, promote
from trainer.loop import Trainer, train_until
from trainer.replay.trace_source import trace_folder

ANNA, BO = "anna", "bo"


@pytest.fixture(scope="module")
def traces(toy_model: Path) -> list[Trace]:
    """Of two tenants in turn."""
    return [
        with_header(trace, tenant=(ANNA, BO)[index % 2], created_ms=now_ms())
        for index, trace in enumerate(answer_traces(toy_model, num_traces=12))
    ]


def of(traces: list[Trace], tenant: str) -> list[Trace]:
    return [trace for trace in traces if trace.header.tenant == tenant]


@dataclasses.dataclass
class Deployment:
    """Redis with a file of its own, a stream, and the folders of a trainer and a store."""

    folder: Path
    model: Path
    server: EmbeddedRedis
    client: redis.Redis

    @property
    def key(self) -> str:
        return model_key(self.model, target_fingerprint(self.model))

    @property
    def stream(self) -> TraceStream:
        return TraceStream(self.client, self.key, max_bytes=10**8)

    def trainer(self, **changes: Any) -> Trainer:
        config = config_for(
            self.model,
            self.folder,
            redis_url=self.server.url,
            model_key=self.key,
            checkpoint_interval_s=0.1,
            publish_interval_s=0,
            publish_min_tokens=1,
            **changes,
        )
        return Trainer(config, CollectorRegistry(), decide=promote)

    def words(self, tenant: str, *more: object) -> list[str]:
        words = ["tenants", "erase", tenant, "--model", self.model, "--redis-url", self.server.url, "--store"]
        return [str(word) for word in (*words, self.folder / "store", "--state", self.folder / "state", *more)]

    def erase(self, tenant: str, *more: object) -> tuple[int, dict[str, Any]]:
        result = CliRunner().invoke(app, self.words(tenant, "--json", *more), catch_exceptions=False)
        # The trainer of this process logs to the same place.
        document, _ = json.JSONDecoder().raw_decode(result.stdout[result.stdout.index("{\n") :])
        return result.exit_code, document

    def has(self, trace: Trace) -> bool:
        """The trace's tokens are in a file, or in a value of Redis."""
        needle = trace.token_ids.tobytes()
        values = [self.client.dump(key) or b"" for key in self.client.scan_iter()]
        return any(needle in data for data in [*values, *self._files()])  # type: ignore[operator]

    def _files(self) -> Iterator[bytes]:
        """The trainer writes meanwhile: what is gone before it is read is not there."""
        for folder, _, names in os.walk(self.folder):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    if stat.S_ISREG(os.stat(Path(folder, name)).st_mode):
                        yield Path(folder, name).read_bytes()


@pytest.fixture
def deployment(tmp_path: Path, toy_model: Path) -> Iterator[Deployment]:
    with EmbeddedRedis(tmp_path / "redis") as server, connect(server.url) as client:
        # Or a token that is still there could hide.
        client.config_set("rdbcompression", "no")
        yield Deployment(tmp_path, toy_model, server, client)


@pytest.fixture
def running() -> Iterator[Callable[[Trainer], None]]:
    stop, threads = threading.Event(), []

    def run(trainer: Trainer) -> None:
        threads.append(threading.Thread(target=train_until, args=(stop, trainer)))
        threads[-1].start()

    yield run
    stop.set()
    for thread in threads:
        thread.join(60)


def record(path: Path, traces: list[Trace]) -> None:
    header = RecordingHeader(
        target_fingerprint=traces[0].header.target_fingerprint, model="toy", created_ms=now_ms(), note="kept"
    )
    with RecordingWriter(path, header) as writer:
        for trace in traces:
            writer.append(encode_trace(trace), trace_id=trace.header.trace_id)


def test_nothing_is_left_of_an_erased_tenant(
    deployment: Deployment,
    running: Callable[[Trainer], None],
    traces: list[Trace],
) -> None:
    for trace in traces:
        deployment.stream.append(encode_trace(trace), trace_id=trace.header.trace_id)
    # Cut off: the trainer sets it aside, and its header still says whose it is.
    cut = with_header(traces[0], trace_id="cut")
    deployment.stream.append(encode_trace(cut)[:-100], trace_id="cut")
    recording = deployment.folder / "kept.rec"
    record(recording, traces)
    running(deployment.trainer(golden_traces=2, holdout_share=0.3, holdout_traces=24))
    store = DraftStore(deployment.folder / "store")
    wait_until(lambda: ANNA in counts_of(store.manifest(store.latest() or 1).info).tokens)
    wait_until(lambda: deployment.stream.lag().dead_lettered == 1)
    rewards = RewardStream(deployment.client, deployment.key)
    rewards.append([GroupRewards(tenant=tenant, group_id="g", rewards={0: 1.0}) for tenant in (ANNA, BO)])
    texts = GroupTexts(deployment.client, deployment.key)
    texts.append({GroupKey(one, "g"): of(traces, one)[0].token_ids.tobytes() for one in (ANNA, BO)})

    code, planned = deployment.erase(ANNA, "--recording", recording)
    assert (code, planned["dry_run"]) == (0, True)
    assert planned["redis"] == {"stream": 7, "dead_letters": 1, "unreadable": 0}
    assert planned["rewards"] == 1
    assert (planned["group_texts"], texts.erase(ANNA, dry_run=True)) == (1, 1)
    assert (planned["trainer_files"], planned["recordings"][str(recording)]["removed"]) == (6, 6)
    assert all(map(deployment.has, traces))

    with _engine(deployment), _gateway(deployment):
        code, done = deployment.erase(ANNA, "--recording", recording, "--yes")
    assert (code, done["left"]) == (0, [])
    assert done["trainers"] == {"trainer-0": True}
    assert done["engines"] == {"engine e": True}
    assert done["gateways"] == {"gateway g": True}
    assert done["redis"] == {"stream": 7, "dead_letters": 1, "unreadable": 0}
    assert [group.tenant for group in rewards.read("0", 10)[0]] == [BO]
    assert (done["group_texts"], texts.erase(BO, dry_run=True)) == (1, 1)
    assert [deployment.has(trace) for trace in traces] == [trace.header.tenant == BO for trace in traces]
    with RecordingReader(recording) as reader:
        assert reader.header.note == "kept"
        assert [trace.header.trace_id for trace in reader.traces()] == [
            trace.header.trace_id for trace in of(traces, BO)
        ]

    learnt = {draft["version"]: draft["tokens"] for draft in done["drafts"]}
    assert 1 not in learnt
    assert learnt
    assert all(tokens > 0 for tokens in learnt.values())
    event = [event for event in store.lifecycle.events.tail(100) if event.kind == "erase"][-1]
    assert event.actor.startswith("operator:")
    assert event.fields["tenant"] == ANNA
    assert (event.fields["stream"], event.fields["rewards"]) == (7, 1)
    assert set(learnt) == set(event.fields["drafts"])

    # Both have gone; their reports would stay for half a minute.
    keys = RedisKeys(model_key=deployment.key)
    deployment.client.delete(keys.engine("e"), keys.gateways)
    code, again = deployment.erase(ANNA, "--recording", recording, "--yes")
    assert (code, again["left"]) == (0, [])
    assert again["redis"] == {"stream": 0, "dead_letters": 0, "unreadable": 0}
    assert (again["trainer_files"], again["recordings"][str(recording)]["removed"]) == (0, 0)
    lag = deployment.stream.lag()
    assert (lag.lost, lag.pending + lag.undelivered + lag.acked + lag.erased) == (0, lag.appended)


@contextlib.contextmanager
def _engine(deployment: Deployment) -> Iterator[None]:
    """What an engine process does with its reports."""
    pointer = DraftPointer(deployment.client, deployment.key)
    watch = ErasureWatch(ErasureOrders(deployment.client, deployment.key).orders, [])
    with _again_and_again(lambda: pointer.report_engine("e", {"version": 1, **watch.poll()})):
        yield


@contextlib.contextmanager
def _gateway(deployment: Deployment) -> Iterator[None]:
    """What a gateway in front of SGLang does with every poll."""
    with _again_and_again(erase_on_order(ErasureOrders(deployment.client, deployment.key), lambda _: None, "g")):
        yield


@contextlib.contextmanager
def _again_and_again(report: Callable[[], None]) -> Iterator[None]:
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(0.05):
            report()

    reporter = threading.Thread(target=run)
    reporter.start()
    yield
    stop.set()
    reporter.join()


def test_a_gateway_that_cannot_erase_goes_on_reporting(deployment: Deployment) -> None:
    orders = ErasureOrders(deployment.client, deployment.key)

    def fail(_: Collection[str]) -> None:
        raise RuntimeError("a bug")

    orders.order(ANNA)
    with pytest.raises(RuntimeError, match="a bug"):
        erase_on_order(orders, fail, "g")()
    assert orders.gateways() == {"g": 0}


def test_without_a_trainer_its_files_go_and_a_later_one_learns_nothing_of_theirs(
    deployment: Deployment, traces: list[Trace]
) -> None:
    trainer = deployment.trainer()
    for trace in traces[:8]:
        deployment.stream.append(encode_trace(trace), trace_id=trace.header.trace_id)
    trainer.read(block_ms=0)
    trainer.step()
    trainer.checkpoint()
    trainer.close()
    theirs = encode_trace(of(traces, ANNA)[0])
    (trace_folder(deployment.folder / "state") / "x.123.tmp").write_bytes(theirs)  # it was killed before, too
    code, done = deployment.erase(ANNA, "--yes")
    assert (code, done["trainers"], done["trainer_files"]) == (0, {}, 5)
    assert not any(map(deployment.has, of(traces[:8], ANNA)))
    # A backup of the folder, and a producer that was cut off for a while, bring some back.
    shelf = trace_folder(deployment.folder / "state")
    (shelf / "restored.trace").write_bytes(theirs)
    deployment.stream.append(theirs, trace_id=of(traces, ANNA)[0].header.trace_id)
    deployment.stream.append(encode_trace(of(traces, ANNA)[5]), trace_id="late")
    fresh = with_header(of(traces, ANNA)[4], created_ms=now_ms() + 1, trace_id="after the order")
    deployment.stream.append(encode_trace(fresh), trace_id="after the order")
    trainer = deployment.trainer()
    for _ in range(2):  # first what was pending
        trainer.read(block_ms=0)
    kept = sorted(read_header(path.read_bytes()).trace_id for path in shelf.glob("*.trace"))
    assert kept == sorted([*(trace.header.trace_id for trace in of(traces[:8], BO)), "after the order"])
    trainer.close()


def test_what_a_trainer_is_writing_is_not_taken_from_it(tmp_path: Path, traces: list[Trace]) -> None:
    folder = trace_folder(tmp_path)
    folder.mkdir()
    being_written, left_by_a_kill = folder / "1.7.tmp", folder / "2.6.tmp"
    for path in (being_written, left_by_a_kill):
        path.write_bytes(b"")

    def write_on() -> None:
        being_written.write_bytes(encode_trace(of(traces, BO)[0]))

    writer = threading.Timer(0.5, write_on)
    writer.start()
    assert tenants.remove_files(tmp_path, lambda header: header.tenant == ANNA, dry_run=False, written_s=2.0) == 1
    writer.join()
    assert list(folder.iterdir()) == [being_written]


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    assert tenants.remove_files(tmp_path, lambda _: True, dry_run=True) == 0
    # As a stand-in for a folder without the right to read it, which root always has.
    trace_folder(tmp_path).touch()
    with pytest.raises(ConfigError, match="run this as the trainer's user"):
        tenants.remove_files(tmp_path, lambda _: True, dry_run=True)


def test_traces_that_are_left_in_redis_own_file_are_said(
    deployment: Deployment, traces: list[Trace], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deployment.trainer().close()
    deployment.stream.append(encode_trace(traces[0]), trace_id="a")
    (tmp_path / "state").mkdir(exist_ok=True)
    monkeypatch.setattr(TraceRemover, "compact", lambda _: False)
    code, done = deployment.erase(ANNA, "--yes", "--timeout-s", 0)
    assert (code, len(done["left"])) == (1, 1)
    assert "append-only file" in done["left"][0]


def test_a_model_that_redis_knows_by_another_name_is_refused(
    deployment: Deployment, traces: list[Trace], refused: Callable[..., str]
) -> None:
    """Its keys would have no traces, and no service would hear of the order."""
    trainer = deployment.trainer()
    deployment.stream.append(encode_trace(traces[0]), trace_id="a")
    trainer.read(block_ms=0)
    trainer.checkpoint()
    trainer.close()
    shelf = trace_folder(deployment.folder / "state")
    kept = sorted(shelf.iterdir())
    link = deployment.folder / "link"
    link.symlink_to(deployment.model)
    before = set(deployment.client.scan_iter())
    for more in ((), ("--yes",)):
        line = refused(*deployment.words(ANNA, "--model", link, *more))
        assert line.endswith(f"set --model to the one of {deployment.key}")
    assert set(deployment.client.scan_iter()) == before

    # This user may not list keys, so no name can be given.
    url = _limited(deployment)
    code, planned = deployment.erase(ANNA, "--model", link, "--redis-url", url)
    assert (code, planned["trainer_files"]) == (1, 0)
    code, done = deployment.erase(ANNA, "--model", link, "--redis-url", url, "--yes", "--timeout-s", 0)
    [left] = done["left"]
    assert (code, "check --model" in left) == (1, True)
    assert planned["left"] == done["left"]
    assert sorted(shelf.iterdir()) == kept != []
    code, done = deployment.erase(ANNA, "--redis-url", url, "--yes", "--timeout-s", 0)
    assert (code, done["left"], done["redis"]["stream"]) == (0, [], 1)
    assert list(shelf.iterdir()) == []


def _limited(deployment: Deployment) -> str:
    """A URL of Redis with a user who lacks SCAN, as those of deploy/redis/users.acl.in."""
    deployment.client.execute_command("ACL", "SETUSER", "limited", "on", "nopass", "~*", "+@all", "-scan")
    return f"{deployment.server.url}&username=limited&password=any"


def test_what_is_not_done_is_said(deployment: Deployment, traces: list[Trace], tmp_path: Path) -> None:
    deployment.trainer().close()
    ErasureOrders(deployment.client, deployment.key)
    (tmp_path / "state" / "replay").mkdir(parents=True, exist_ok=True)
    DraftPointer(deployment.client, deployment.key).report_engine("gone", {"version": 1})
    code, done = deployment.erase(ANNA, "--yes", "--timeout-s", 0.1)
    assert (code, done["left"]) == (1, ["engine gone has not confirmed it"])
    ErasureOrders(deployment.client, deployment.key).report_gateway("cut off", done["ordered_ms"])
    code, done = deployment.erase(ANNA, "--yes", "--timeout-s", 0)
    assert (code, done["gateways"]) == (1, {"gateway cut off": False})
    assert "gateway cut off has not confirmed it" in done["left"]
    (forks := tmp_path / "store" / "lineages").mkdir()
    code, done = deployment.erase(ANNA, "--yes", "--timeout-s", 0)
    assert code == 1
    assert done["left"][-1].startswith(f"{forks} has forks")
    forks.rmdir()
    code, done = deployment.erase(ANNA, "--yes", "--timeout-s", 0, "--state", tmp_path / "elsewhere")
    assert code == 1
    assert "pass --state" in done["left"][-1]
    assert RedisKeys(model_key=deployment.key).erasures.encode() in set(deployment.client.scan_iter())


def test_a_bad_recording_is_refused_before_the_order(
    deployment: Deployment, traces: list[Trace], refused: Callable[..., str]
) -> None:
    deployment.trainer().close()
    deployment.stream.append(encode_trace(traces[0]), trace_id="a")
    record(good := deployment.folder / "good.rec", traces)
    (other := deployment.folder / "other").write_text("no recording")
    for bad in (deployment.folder / "none.rec", deployment.folder, other):
        assert str(bad) in refused(*deployment.words(ANNA, "--yes", "--recording", good, "--recording", bad))
    assert ErasureOrders(deployment.client, deployment.key).orders() == {}
    with RecordingReader(good) as reader:
        assert len(list(reader.payloads())) == len(traces)


def test_redis_may_restart_once_the_order_is_given(deployment: Deployment, traces: list[Trace]) -> None:
    deployment.trainer().close()
    deployment.stream.append(encode_trace(traces[0]), trace_id="a")
    (deployment.folder / "state").mkdir(exist_ok=True)
    ErasureOrders(deployment.client, deployment.key).report_gateway("g", 0)

    def restart() -> None:
        wait_until(lambda: ErasureOrders(deployment.client, deployment.key).orders())
        deployment.server.stop()
        deployment.server = EmbeddedRedis(deployment.folder / "redis")
        with connect(deployment.server.url) as client:
            orders = ErasureOrders(client, deployment.key)
            orders.report_gateway("g", orders.orders()[ANNA])

    other = threading.Thread(target=restart)
    other.start()
    try:
        code, done = deployment.erase(ANNA, "--yes", "--timeout-s", 60)
    finally:
        other.join()
        deployment.server.stop()
    assert (code, done["gateways"], done["redis"]["stream"]) == (0, {"gateway g": True}, 1)


def test_an_order_whose_redis_stays_away_is_said_to_stand(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, invoke: Callable[..., tuple[int, str, str]]
) -> None:
    deployment.trainer().close()
    DraftPointer(deployment.client, deployment.key).report_engine("e", {"version": 1})
    order = ErasureOrders.order

    def order_and_end(self: ErasureOrders, tenant: str) -> int:
        at_ms = order(self, tenant)
        deployment.server.stop()
        return at_ms

    monkeypatch.setattr(ErasureOrders, "order", order_and_end)
    code, _, err = invoke(*deployment.words(ANNA, "--yes", "--timeout-s", 0.1))
    assert code == 1
    assert f"the order to erase '{ANNA}' stands" in err
    assert "repeat this command" in err


def test_what_is_left_is_said_although_the_store_cannot_be_written(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment.trainer().close()
    DraftPointer(deployment.client, deployment.key).report_engine("gone", {"version": 1})

    def refuse(*_: object, **__: object) -> None:
        raise StoreError("events.jsonl: Read-only file system")

    monkeypatch.setattr(EventLog, "append", refuse)
    code, done = deployment.erase(ANNA, "--yes", "--timeout-s", 0)
    assert (code, done["left"][0]) == (1, "engine gone has not confirmed it")
    assert done["left"][-1].endswith("Read-only file system")
