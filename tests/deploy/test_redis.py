"""Redis as the compose file starts it: every user can do their whole part, and nothing else."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError
from redis.retry import Retry

from serving.group_cache.texts import GroupKey, GroupTexts, ReadPosition
from slipstream.doctor import deployment
from slipstream.doctor.finding import Finding, Level
from slipstream.traces import StreamCopy
from speculator.draft.checkpoint import model_key, target_fingerprint
from speculator.errors import ConfigError, StreamError
from speculator.redis.client import PASSWORD_FILE_VARIABLE, RedisKeys, connect
from speculator.redis.control_plane import CanaryHolder, CanarySlot, DraftPointer, EndedGroups
from speculator.redis.model_names import check_name, check_stream, is_known
from speculator.redis.trace_deletion import ErasureOrders, TraceRemover, TrainerReport
from speculator.redis.trace_stream import START, GroupRewards, RewardStream, TraceStream
from speculator.versions.lineage import ensure_lineage
from speculator.versions.operator import overview
from speculator.versions.store import DraftStore
from tests.deploy.compose import GPU
from tests.deploy.machine import Machine
from tests.fixtures.toy import make_toy_model

MODEL = "toy-0123456789ab"
KEYS = RedisKeys(model_key=MODEL)
ENTRY = b"x" * 5000
CAP = 10 * len(ENTRY)
USERS = ("engine", "gateway", "trainer")
EACH_USER = pytest.mark.parametrize("user", USERS)

As = Callable[[str], redis.Redis]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    machine = Machine(GPU, tmp_path_factory.mktemp("redis"), {"SLIPSTREAM_MODEL": "/models/toy"})
    machine.up("redis")
    yield machine
    assert machine.stop("redis") == 0


@pytest.fixture(scope="module", params=["6.2", "7 or newer"])
def redis_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """The wheel's, and the machine's: Debian's redis-tools has the server, which starts nothing, under another name."""
    if request.param == "6.2":
        return None
    found = shutil.which("redis-server") or shutil.which("redis-check-rdb")
    if found is None:
        pytest.skip("there is no Redis 7 here: make system-packages installs it")
    (link := tmp_path_factory.mktemp("bin") / "redis-server").symlink_to(found)
    return link


@pytest.fixture
def login(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[As]:
    """Connects as the services do: the user in the URL, the password in a file."""
    clients: list[redis.Redis] = []

    def connected(user: str) -> redis.Redis:
        monkeypatch.setenv(PASSWORD_FILE_VARIABLE, machine.here(f"/run/secrets/redis_{user}"))
        clients.append(connect(f"redis://{user}@127.0.0.1:{machine.here('6379')}/0"))
        return clients[-1]

    yield connected
    for client in clients:
        client.close()


def test_the_whole_way_of_a_trace(login: As) -> None:
    """Past the cap, so that the engine trims, with everything that a trainer does on the other side."""
    engine = TraceStream(login("engine"), MODEL, max_bytes=CAP)
    trainer = TraceStream(login("trainer"), MODEL, max_bytes=CAP)
    assert trainer.read(4, 0) == []
    for number in range(25):
        engine.append(ENTRY, trace_id=f"t{number}")
        for entry in trainer.read(4, 0) if number % 3 == 0 else []:
            if entry.trace_id == "t3":
                trainer.dead_letter(entry, "for a test")
            elif entry.trace_id != "t6":
                trainer.ack([entry.id])
    assert trainer.recent(CAP)
    assert {entry.trace_id for entry in trainer.reclaim(0)} <= {f"t{number}" for number in range(25)}
    lag = trainer.lag()
    assert (lag.appended, lag.dead_lettered) == (25, 1)
    assert lag.lost > 0, "the cap was never met"
    assert engine.lag() == lag
    assert set(StreamCopy(login("trainer"), MODEL).read(0)) == {ENTRY}


def test_a_restart_keeps_what_was_written(redis_server: Path | None, tmp_path: Path) -> None:
    """All of it was written in transactions. Redis 7 replays them as the user `default`."""
    machine = Machine(GPU, tmp_path, {"SLIPSTREAM_MODEL": "/models/toy"}, redis_server=redis_server)
    connected = functools.partial(redis.Redis, port=int(machine.here("6379")), protocol=2)

    def up() -> tuple[redis.Redis, redis.Redis]:
        machine.up("redis")
        engine, trainer = (connected(username=user, password=machine.secret(f"redis_{user}")) for user in USERS[::2])
        return engine, trainer

    try:
        engine, trainer = up()
        with engine, trainer:
            version = int(engine.info("server")["redis_version"].partition(".")[0])
            assert (version >= 7) is (redis_server is not None)
            for number in range(20):
                TraceStream(engine, MODEL, max_bytes=CAP * 10).append(ENTRY, trace_id=f"t{number}")
            stream = TraceStream(trainer, MODEL, max_bytes=CAP * 10)
            stream.ack([entry.id for entry in stream.read(5, 0)])
            before = stream.lag()
            assert (before.appended, before.length, before.acked) == (20, 20, 5)
        assert machine.stop("redis") == 0
        engine, trainer = up()
        with engine, trainer:
            assert TraceStream(trainer, MODEL, max_bytes=CAP * 10).lag() == before
        assert machine.stop("redis") == 0
        assert "NOPERM" not in machine.log("redis").read_text()
    finally:
        machine.close()


def test_the_trainers_user_erases_a_tenant_and_engines_and_gateways_hear_of_it(login: As) -> None:
    engine, trainer = login("engine"), login("trainer")
    stream = TraceStream(trainer, MODEL, max_bytes=CAP, ttl_s=3600)
    TraceStream(engine, MODEL, max_bytes=CAP, ttl_s=3600).append(ENTRY, trace_id="a")
    lag = stream.lag()
    removed = TraceRemover(trainer, MODEL).remove(lambda header: False)
    assert removed.stream == lag.length > 0, "none of these is readable"
    assert stream.lag().length == 0
    assert TraceRemover(trainer, MODEL).compact()
    orders = ErasureOrders(trainer, MODEL)
    at_ms = orders.order("anna")
    for client in (engine, login("gateway")):
        assert ErasureOrders(client, MODEL).orders() == {"anna": at_ms}
    orders.report("trainer-0", TrainerReport(at_ms=at_ms, erased_ms=at_ms))
    assert set(orders.trainers()) <= {"trainer-0"}
    orders.remove_report("trainer-0")
    ErasureOrders(login("gateway"), MODEL).report_gateway("gateway-0", at_ms)
    assert orders.gateways() == {"gateway-0": at_ms}


def test_commands_learn_whether_redis_knows_a_model_and_go_on_where_they_may_not_list_names(login: As) -> None:
    for user in ("engine", "trainer"):
        client = login(user)
        assert not is_known(client, "other-0123456789ab")
        with pytest.raises(ConfigError, match="check --redis-url"):
            check_stream(client, "other-0123456789ab")
    TraceStream(login("engine"), MODEL, max_bytes=CAP).append(ENTRY, trace_id="known")
    for user in ("engine", "trainer"):
        assert is_known(login(user), MODEL)
        check_stream(login(user), MODEL)
    for user in USERS:
        check_name(login(user), "other-0123456789ab")


def test_engines_share_the_text_of_groups_and_the_trainers_user_erases_it(login: As) -> None:
    anna, bo = GroupKey("anna", "g"), GroupKey("bo", "g")
    engine = GroupTexts(login("engine"), MODEL, group_bytes=100)
    assert engine.append({anna: b"some", bo: b"other"}) == 0
    assert engine.fetch({anna: ReadPosition()})[anna][1] == b"some"
    assert GroupTexts(login("trainer"), MODEL).erase("anna") == 1
    engine.drop([bo])
    assert engine.append({bo: b"x" * 100}) == 1
    with pytest.raises(StreamError, match=r"(?i)no permissions"):
        GroupTexts(login("gateway"), MODEL).fetch({anna: ReadPosition()})


@EACH_USER
def test_everyone_moves_the_pointer(login: As, user: str) -> None:
    pointer = DraftPointer(login(user), MODEL)
    pointer.publish(3)
    assert pointer.replace(3, 4)
    assert pointer.published() == 4
    pointer.pin(2)
    assert (pointer.pinned(), pointer.desired()) == (2, 2)
    pointer.unpin()
    assert pointer.desired() == 4


@EACH_USER
def test_everyone_sees_drafts_and_whether_the_trainer_rests(login: As, user: str, tmp_path: Path) -> None:
    DraftPointer(login("trainer"), MODEL).set_trainer_resting(True)
    pointer = DraftPointer(login(user), MODEL)
    seen = overview(DraftStore(tmp_path), lambda: pointer)
    assert (seen.no_redis, seen.trainer_rests) == ("", True)
    DraftPointer(login("trainer"), MODEL).set_trainer_resting(False)
    assert not pointer.is_trainer_resting()


def test_everyone_reads_what_the_engine_reports(login: As) -> None:
    engine, gateway = (DraftPointer(login(user), MODEL) for user in ("engine", "gateway"))
    engine.report_engine("sglang", {"version": 4})
    for user in USERS:
        assert DraftPointer(login(user), MODEL).engines() == {"sglang": {"version": "4"}}
    assert [gateway.hold_pool_metrics(name) for name in "aba"] == [True, False, True]


def test_the_engine_hears_from_the_gateway_which_groups_have_ended(login: As) -> None:
    engine = EndedGroups(login("engine"), MODEL)
    assert engine.read() == []
    EndedGroups(login("gateway"), MODEL).add("anna", "g")
    assert engine.read() == [("anna", "g")]


def test_engines_agree_on_a_canary(login: As) -> None:
    engine, first = DraftPointer(login("engine"), MODEL), CanaryHolder(engine_id="a", process="p", version=2)
    second = CanaryHolder(engine_id="b", process="p", version=2)
    assert engine.hold_canary(first, ttl_s=30, on_probation=True) == CanarySlot(True, False, 0)
    assert not engine.hold_canary(second, ttl_s=30, on_probation=True).is_held
    assert engine.hold_canary(first, ttl_s=30, on_probation=False) == CanarySlot(True, True, 0)
    engine.release_canary(first, forget_crashes=True)
    assert engine.hold_canary(second, ttl_s=30, on_probation=True).is_held


@pytest.mark.parametrize("user", ["engine", "gateway"])
def test_what_serves_hands_on_rewards_and_the_trainers_user_reads_and_removes_them(login: As, user: str) -> None:
    RewardStream(login(user), MODEL).append([GroupRewards(tenant="anna", group_id="g", rewards={0: 1.0})])
    trainer = RewardStream(login("trainer"), MODEL)
    assert [group.group_id for group in trainer.read(START, 10)[0]] == ["g"]
    assert trainer.remove("anna") == 1
    with pytest.raises(StreamError, match=r"(?i)no permissions"):
        RewardStream(login("gateway"), MODEL).read(START, 10)


def test_the_gateway_does_not_see_traces(login: As) -> None:
    with pytest.raises(StreamError, match=r"(?i)no permissions"):
        TraceStream(login("gateway"), MODEL, max_bytes=CAP).append(ENTRY, trace_id="a")
    client = login("gateway")
    for key in (KEYS.traces, KEYS.dead_letters, KEYS.accounts):
        with pytest.raises(NoPermissionError):
            client.get(key)
    with pytest.raises(NoPermissionError):
        client.execute_command("XRANGE", KEYS.traces, "-", "+")


@EACH_USER
def test_nobody_governs(login: As, user: str) -> None:
    client = login(user)
    refused = ["FLUSHALL", "CONFIG GET dir", "EVAL return(1) 0", "KEYS *", "ACL LIST", "SHUTDOWN", "GET other"]
    refused += ["CLIENT LIST", "CLIENT KILL TYPE normal", "CLIENT PAUSE 1"]
    for words in refused:
        with pytest.raises(NoPermissionError):
            client.execute_command(*words.split())


def test_doctor_finds_nothing_broken_as_any_user(
    login: As, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, store = make_toy_model(tmp_path / "toy"), DraftStore(tmp_path / "drafts")
    fingerprint = target_fingerprint(model)
    ensure_lineage(store, model, fingerprint, draft_vocab_size=16)

    def doctor(user: str) -> dict[str, Finding]:
        monkeypatch.setenv(PASSWORD_FILE_VARIABLE, machine.here(f"/run/secrets/redis_{user}"))
        url = f"redis://{user}@127.0.0.1:{machine.here('6379')}/0"
        found = [*deployment.check_redis(url, str(model)), *deployment.check_stream(url, str(model), store.root)]
        return {finding.name: finding for finding in found}

    def levels() -> dict[str, tuple[Level, Level]]:
        found = {user: doctor(user) for user in USERS}
        return {user: (each["redis rights"].level, each["stream"].level) for user, each in found.items()}

    healthy = {user: (Level.WARNING, Level.SKIPPED if user == "gateway" else Level.OK) for user in USERS}
    assert "no trace yet" in doctor("trainer")["stream"].detail
    assert levels() == healthy
    TraceStream(login("engine"), model_key(model, fingerprint), max_bytes=CAP).append(ENTRY, trace_id="a")
    assert levels() == healthy
    assert "1 traces, 0 settled, 1 waiting" in doctor("engine")["stream"].detail
    for user, right in zip(USERS, ("append traces", "publish drafts", "read and settle them"), strict=True):
        assert right in doctor(user)["redis rights"].detail.partition("; not")[0]


def test_nobody_without_a_password(machine: Machine) -> None:
    once = Retry(NoBackoff(), 0)
    connect_as = functools.partial(redis.Redis, port=int(machine.here("6379")), protocol=2, retry=once)
    for user, password in ((None, None), ("default", ""), ("engine", ""), ("engine", "wrong"), ("nobody", "wrong")):
        with connect_as(username=user, password=password) as client, pytest.raises(redis.AuthenticationError):
            client.ping()
    with connect_as(username="health", password="health") as client:
        assert client.ping()
        with pytest.raises(NoPermissionError):
            client.get("slipstream:anything")
