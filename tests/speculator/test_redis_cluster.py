"""A real Redis Cluster: every command of ours on one slot, a slot that moves, a node that dies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from speculator.erasures import Erasures
from speculator.errors import StreamError
from speculator.group_store import GroupKey, GroupTexts, Place
from speculator.keys import RedisKeys
from speculator.pointer import DraftPointer
from speculator.ports import free_port
from speculator.redis_client import connect
from speculator.removal import Remover
from speculator.rewards import GroupRewards, RewardStream
from speculator.stream import TraceStream
from tests.redis_servers import Server, Servers, servers
from tests.waiting import wait_until

NUM_SLOTS = 16384
MASTERS = 3
TRACES = RedisKeys(model_key="m").ledger.traces


class Cluster:
    """Three masters, and a replica of whichever has the slot of the keys."""

    def __init__(self, started: Servers) -> None:
        self.nodes = [
            started.start(
                *(port, "--cluster-enabled", "yes", "--cluster-node-timeout", "500", "--appendonly", "no"),
                *("--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0"),
            )
            for port in (free_port() for _ in range(MASTERS + 1))
        ]
        self.clients = [node.client() for node in self.nodes]
        for number, client in enumerate(self.clients[:MASTERS]):
            slots = range(number * NUM_SLOTS // MASTERS, (number + 1) * NUM_SLOTS // MASTERS)
            client.execute_command("CLUSTER", "ADDSLOTS", *slots)
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for client in self.clients[1:]:
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
        wait_until(lambda: all(_info(client)["cluster_known_nodes"] == "4" for client in self.clients))
        self.slot = self.clients[0].execute_command("CLUSTER", "KEYSLOT", TRACES)
        self.owner = self.slot * MASTERS // NUM_SLOTS
        self.clients[-1].execute_command("CLUSTER", "REPLICATE", self.id(self.owner))
        wait_until(lambda: all(_info(client)["cluster_state"] == "ok" for client in self.clients))
        wait_until(lambda: self.clients[-1].info("replication").get("master_link_status") == "up")

    def id(self, number: int) -> str:
        return str(self.clients[number].execute_command("CLUSTER", "MYID"))

    def url(self, *numbers: int) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{self.nodes[number].port}" for number in numbers)

    def empty(self) -> None:
        for node in (client for client in self.clients if _answers(client)):
            if node.info("replication")["role"] == "master" and (keys := node.keys("slipstream:{m}:*")):
                node.delete(*keys)

    def move_slot(self, to: int) -> None:
        """As `redis-cli --cluster reshard` does it, for one slot."""
        source, target = self.clients[self.owner], self.clients[to]
        target.execute_command("CLUSTER", "SETSLOT", self.slot, "IMPORTING", self.id(self.owner))
        source.execute_command("CLUSTER", "SETSLOT", self.slot, "MIGRATING", self.id(to))
        keys = source.execute_command("CLUSTER", "GETKEYSINSLOT", self.slot, 100)
        source.execute_command("MIGRATE", "127.0.0.1", self.nodes[to].port, "", 0, 5000, "KEYS", *keys)
        for client in (target, source, *self.clients[:MASTERS]):
            client.execute_command("CLUSTER", "SETSLOT", self.slot, "NODE", self.id(to))
        self.owner = to


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with servers(tmp_path_factory.mktemp("cluster")) as started:
        yield Cluster(started)


@pytest.fixture
def client(cluster: Cluster) -> Iterator[redis.Redis]:
    """Its first node is not the one that has the keys."""
    with connect(cluster.url((cluster.owner + 1) % MASTERS, (cluster.owner + 2) % MASTERS)) as connected:
        yield connected
        cluster.empty()


def test_all_keys_of_a_model_share_one_slot(cluster: Cluster) -> None:
    keys = RedisKeys(model_key="m")
    names = [
        *(getattr(keys.ledger, name) for name in ("traces", "sizes", "num_appended", "accounts", "open")),
        *(keys.dead_letters, keys.desired_draft, keys.pinned_draft, keys.erasures, keys.rewards, keys.trainers),
        *(keys.engines, keys.engine("e"), keys.depth("e"), keys.target_version("h:1")),
        *(keys.canary, keys.canary_awaited, keys.canary_trials(2)),
        *(keys.group_texts, keys.group_text(GroupKey("t", "g}{x").member)),
    ]
    slots = {cluster.clients[0].execute_command("CLUSTER", "KEYSLOT", name) for name in names}
    assert slots == {cluster.slot}


def test_stream_pointer_groups_rewards_and_orders_work(client: redis.Redis) -> None:
    stream, pointer = TraceStream(client, "m", max_bytes=1000), DraftPointer(client, "m")
    for number in range(15):
        stream.append(b"x" * 100, trace_id=f"t{number}")
    entries = stream.read(4, 100)
    stream.dead_letter(entries[0], "a test")
    stream.ack([entry.id for entry in entries[1:]])
    assert stream.reclaim(0) == []
    assert [entry.trace_id for entry in stream.recent(1000)] == [entry.trace_id for entry in entries]
    lag = stream.lag()
    assert (lag.appended, lag.acked, lag.lost, lag.dead_lettered) == (15, 4, 5, 1)
    assert lag.appended == lag.acked + lag.pending + lag.undelivered + lag.lost
    assert stream.memory_share() is None
    pointer.publish(3)
    assert pointer.replace(3, 4)
    assert not pointer.replace(3, 5)
    pointer.pin(2)
    assert pointer.desired() == 2
    pointer.report_engine("e", {"version": 4})
    assert pointer.engines() == {"e": {"version": "4"}}
    rewards = RewardStream(client, "m")
    rewards.append([GroupRewards(tenant="t", group_id="g", rewards={0: 1.0})])
    assert len(rewards.read("0", 10)[0]) == 1
    group, texts = GroupKey("t", "g"), GroupTexts(client, "m")
    texts.append({group: b"text"})
    assert texts.fetch({group: Place()})[group][1] == b"text"
    orders = Erasures(client, "m")
    orders.order("t")
    assert list(orders.orders()) == ["t"]
    remover = Remover(client, "m")
    assert remover.remove(lambda header: False, unreadable=True).stream == lag.length
    assert remover.compact()


def test_a_slot_that_moves_is_followed(cluster: Cluster, client: redis.Redis) -> None:
    stream, pointer = TraceStream(client, "m", max_bytes=1 << 20), DraftPointer(client, "m")
    stream.append(b"x", trace_id="before")
    pointer.publish(1)
    [first] = stream.read(1, 0)
    cluster.move_slot((cluster.owner + 1) % MASTERS)
    # WATCH, a transaction, a blocking read and plain commands, each as the first to notice on a new client, too.
    stream.append(b"x", trace_id="after")
    assert [entry.trace_id for entry in stream.read(10, 100)] == ["after"]
    cluster.move_slot((cluster.owner + 1) % MASTERS)
    assert pointer.replace(1, 2)
    cluster.move_slot((cluster.owner + 1) % MASTERS)
    stream.ack([first.id])
    assert (stream.lag().acked, stream.lag().pending) == (1, 1)


def test_a_slot_that_is_on_its_way_is_an_error_and_no_loss(cluster: Cluster, client: redis.Redis) -> None:
    stream = TraceStream(client, "m", max_bytes=1 << 20)
    stream.append(b"x", trace_id="t0")
    source, to = cluster.clients[cluster.owner], (cluster.owner + 1) % MASTERS
    cluster.clients[to].execute_command("CLUSTER", "SETSLOT", cluster.slot, "IMPORTING", cluster.id(cluster.owner))
    source.execute_command("CLUSTER", "SETSLOT", cluster.slot, "MIGRATING", cluster.id(to))
    source.execute_command("MIGRATE", "127.0.0.1", cluster.nodes[to].port, TRACES, 0, 5000)
    with pytest.raises(StreamError):
        stream.append(b"x", trace_id="t1")
    cluster.move_slot(to)
    stream.append(b"x", trace_id="t1")
    assert [entry.trace_id for entry in stream.read(10, 0)] == ["t0", "t1"]


def test_a_node_that_dies_is_replaced_by_its_replica(cluster: Cluster, client: redis.Redis) -> None:
    replica: Server = cluster.nodes[-1]
    owner = cluster.owner
    cluster.clients[-1].execute_command("CLUSTER", "REPLICATE", cluster.id(owner))
    wait_until(lambda: cluster.clients[-1].info("replication").get("master_port") == cluster.nodes[owner].port)
    wait_until(lambda: cluster.clients[-1].info("replication")["master_link_status"] == "up")
    stream = TraceStream(client, "m", max_bytes=1 << 20)
    stream.append(b"x", trace_id="before")
    assert client.execute_command("WAIT", 1, 5000) == 1
    cluster.nodes[owner].kill()
    with pytest.raises(StreamError):
        stream.append(b"x", trace_id="after")
    wait_until(lambda: _is_appended(stream, "after"), timeout_s=30)
    assert [entry.trace_id for entry in stream.read(10, 0)] == ["before", "after"]
    with replica.client() as asked:
        assert asked.info("replication")["role"] == "master"


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def _info(client: redis.Redis) -> dict[str, str]:
    reply = client.execute_command("CLUSTER", "INFO")
    return reply if isinstance(reply, dict) else dict(line.split(":") for line in str(reply).split())


def _is_appended(stream: TraceStream, trace_id: str) -> bool:
    try:
        stream.append(b"x", trace_id=trace_id)
    except StreamError:
        return False
    return True
