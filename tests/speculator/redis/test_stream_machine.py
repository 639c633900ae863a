"""Whatever producers, consumers and operators do to the stream, in any order, its books agree with the server."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from speculator.redis.client import RedisKeys
from speculator.redis.trace_deletion import TraceRemover
from speculator.redis.trace_stream import StreamEntry, TraceStream
from tests.fixtures.traces import make_header

CAP = 40_000
TRACES = RedisKeys(model_key="machine").traces
CONSUMERS = st.sampled_from(["one", "two"])
GROUP = "trainer"


def payload_of(trace_id: str, num_bytes: int) -> bytes:
    """The header of a trace, and nothing else that could be read."""
    header = msgspec.json.encode(make_header(trace_id=trace_id)).decode()
    metadata = msgspec.json.encode({"__metadata__": {"header": header}})
    return (len(metadata).to_bytes(8, "little") + metadata).ljust(num_bytes, b"\0")


class StreamMachine(RuleBasedStateMachine):
    """The model knows each entry's size, what each consumer has in hand, and what was acked while pending."""

    client: redis.Redis

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.sizes: dict[str, int] = {}
        self.in_hand: dict[str, dict[str, StreamEntry]] = {"one": {}, "two": {}}
        self.acked: set[str] = set()
        self.erased: set[str] = set()
        self.num_dead = 0
        self.streams = {name: self.open(name) for name in ("one", "two")}

    def open(self, consumer: str) -> TraceStream:
        return TraceStream(self.client, "machine", max_bytes=CAP, consumer=consumer)

    def alive(self) -> list[str]:
        rows: Any = self.client.xrange(TRACES)
        return [entry_id.decode() for entry_id, _ in rows]

    def still_pending(self, ids: list[str]) -> list[str]:
        rows: Any = self.client.xpending_range(TRACES, GROUP, "-", "+", 10_000)
        pending = {row["message_id"].decode() for row in rows}
        return [entry_id for entry_id in ids if entry_id in pending]

    @rule(size=st.sampled_from([600, 900, 5000, 9000]), count=st.integers(1, 6), consumer=CONSUMERS)
    def append(self, size: int, count: int, consumer: str) -> None:
        for _ in range(count):
            trace_id = str(len(self.sizes))
            entry_id = self.streams[consumer].append(payload_of(trace_id, size), trace_id=trace_id)
            self.sizes[entry_id] = size
        assert sum(self.sizes.get(entry_id, 0) for entry_id in self.alive()) <= CAP

    @rule(count=st.integers(1, 5), consumer=CONSUMERS)
    def read(self, count: int, consumer: str) -> None:
        self._deliver(consumer, self.streams[consumer].read(count, 0))

    @rule(count=st.integers(1, 5), consumer=CONSUMERS)
    def reclaim(self, count: int, consumer: str) -> None:
        self._deliver(consumer, self.streams[consumer].reclaim(0, count))

    def _deliver(self, consumer: str, entries: list[StreamEntry]) -> None:
        for entry in entries:
            assert len(entry.payload) == self.sizes[entry.id]
            assert entry.id not in self.acked
            self.in_hand[consumer][entry.id] = entry

    @rule(consumer=CONSUMERS)
    def restart(self, consumer: str) -> None:
        self.streams[consumer], self.in_hand[consumer] = self.open(consumer), {}

    @rule(data=st.data(), consumer=CONSUMERS)
    def ack(self, data: st.DataObject, consumer: str) -> None:
        if in_hand := self.in_hand[consumer]:
            ids = data.draw(st.lists(st.sampled_from(sorted(in_hand)), unique=True, max_size=6))
            self.acked |= set(self.still_pending(ids))
            self.streams[consumer].ack(ids)

    @rule(data=st.data(), consumer=CONSUMERS)
    def dead_letter(self, data: st.DataObject, consumer: str) -> None:
        if in_hand := self.in_hand[consumer]:
            entry_id = data.draw(st.sampled_from(sorted(in_hand)))
            self.acked |= set(self.still_pending([entry_id]))
            self.num_dead += entry_id in self.still_pending([entry_id])
            self.streams[consumer].dead_letter(in_hand[entry_id], "reason")

    @rule(count=st.integers(1, 4))
    def operator_trims(self, count: int) -> None:
        length: Any = self.client.xlen(TRACES)
        self.client.xtrim(TRACES, maxlen=max(length - count, 0), approximate=False)

    @rule(data=st.data())
    def erase(self, data: st.DataObject) -> None:
        alive = self.alive()
        ours = [entry_id for entry_id in alive if entry_id in self.sizes]
        if not ours:
            return
        chosen = set(data.draw(st.lists(st.sampled_from(ours), unique=True, max_size=4)))
        self.erased |= chosen - self.acked
        rows: Any = self.client.xrange(TRACES)
        names = {fields[b"trace_id"].decode() for entry_id, fields in rows if entry_id.decode() in chosen}
        TraceRemover(self.client, "machine").remove(lambda header: header.trace_id in names, unreadable=False)
        assert set(self.alive()) == set(alive) - chosen

    @rule(consumer=CONSUMERS)
    def look(self, consumer: str) -> None:
        """Not after every step: what is settled late must be counted as well."""
        lag, alive = self.streams[consumer].lag(), self.alive()
        unacked = [entry_id for entry_id in alive if entry_id not in self.acked]
        # The server's pending list knows entries whose delivery the model has not seen, and no others.
        assert lag.pending == len(self.still_pending(unacked))
        assert lag.undelivered == len(unacked) - lag.pending
        assert lag.acked == len(self.acked)
        assert lag.appended == len(self.sizes)
        assert lag.erased == len(self.erased)
        assert lag.lost == lag.appended - lag.acked - lag.pending - lag.undelivered - lag.erased
        assert lag.skipped == lag.redelivered == lag.foreign == 0
        assert lag.length == len(alive)
        assert lag.bytes == sum(self.sizes[entry_id] for entry_id in alive)
        assert lag.dead_lettered == self.num_dead
        recent = [entry.id for entry in self.streams[consumer].recent(CAP)]
        assert recent == [entry_id for entry_id in alive if entry_id in self.acked]

    def teardown(self) -> None:
        self.look("one")


class OperatedMachine(StreamMachine):
    """Other clients change the group and the stream, too. The model knows what was acked while it was in the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.acked_when_gone: set[str] = set()

    def _deliver(self, consumer: str, entries: list[StreamEntry]) -> None:
        for entry in entries:
            assert len(entry.payload) == self.sizes.get(entry.id, 0)
            self.in_hand[consumer][entry.id] = entry

    @rule(data=st.data(), consumer=CONSUMERS)
    def ack(self, data: st.DataObject, consumer: str) -> None:
        if in_hand := self.in_hand[consumer]:
            ids = data.draw(st.lists(st.sampled_from(sorted(in_hand)), unique=True, max_size=6))
            self._note_acked(ids)
            self.streams[consumer].ack(ids)

    @rule(data=st.data(), consumer=CONSUMERS)
    def dead_letter(self, data: st.DataObject, consumer: str) -> None:
        if in_hand := self.in_hand[consumer]:
            entry_id = data.draw(st.sampled_from(sorted(in_hand)))
            self._note_acked([entry_id])
            self.streams[consumer].dead_letter(in_hand[entry_id], "reason")

    def _note_acked(self, ids: list[str]) -> None:
        ours, alive = set(ids) & set(self.sizes), set(self.alive())
        self.acked |= ours & alive
        self.acked_when_gone |= ours - alive

    @rule(data=st.data())
    def operator_moves_the_group(self, data: st.DataObject) -> None:
        self.streams["one"].lag()  # makes the group
        self.client.xgroup_setid(TRACES, GROUP, data.draw(st.sampled_from(["0", "$", *self.alive()])))

    @rule(start=st.sampled_from(["", "0", "$"]))
    def operator_makes_the_group_anew(self, start: str) -> None:
        self.streams["one"].lag()
        self.client.xgroup_destroy(TRACES, GROUP)
        if start:
            self.client.xgroup_create(TRACES, GROUP, start)

    @rule(consumer=CONSUMERS)
    def operator_deletes_a_consumer(self, consumer: str) -> None:
        self.streams["one"].lag()
        self.client.xgroup_delconsumer(TRACES, GROUP, consumer)

    @rule(data=st.data())
    def operator_deletes_or_acks_entries(self, data: st.DataObject) -> None:
        if alive := self.alive():
            ids = data.draw(st.lists(st.sampled_from(alive), unique=True, min_size=1, max_size=4))
            remove = data.draw(st.booleans())
            self.client.xdel(TRACES, *ids) if remove else self.client.xack(TRACES, GROUP, *ids)

    @rule(index=st.sampled_from([None, "0", "7", "soon"]))
    def operator_appends(self, index: str | None) -> None:
        self.client.xadd(TRACES, {"payload": b""} | ({"index": index} if index else {}))

    @rule()
    def operator_deletes_the_stream(self) -> None:
        self.client.delete(TRACES)
        # A new stream begins with ids of this millisecond, and the model tells entries by their ids.
        begin = self._now_ms()
        while self._now_ms() == begin:
            pass

    def _now_ms(self) -> int:
        seconds, microseconds = self.client.time()
        return 1000 * seconds + microseconds // 1000

    @rule(consumer=CONSUMERS)
    def look(self, consumer: str) -> None:
        lag = self.streams[consumer].lag()
        counts = {name: getattr(lag, name) for name in lag.__dataclass_fields__}
        assert all(count >= 0 for count in counts.values()), counts
        parts = ("acked", "pending", "undelivered", "skipped", "lost", "erased")
        assert lag.appended == len(self.sizes) == sum(counts[part] for part in parts), counts
        assert len(self.acked) <= lag.acked <= len(self.acked | self.acked_when_gone)
        assert lag.dead_lettered <= lag.acked
        assert lag.erased == len(self.erased)
        assert lag.length == len(self.alive())

    def teardown(self) -> None:
        """Whatever was done, what is left can be learnt, and then nothing waits."""
        for consumer, stream in self.streams.items():
            while entries := stream.reclaim(0) + stream.read(10, 0):
                self._deliver(consumer, entries)
                self._note_acked([entry.id for entry in entries])
                stream.ack([entry.id for entry in entries])
        self.look("one")
        lag = self.streams["one"].lag()
        assert lag.pending == lag.undelivered == 0
        assert lag.skipped + lag.lost == len(self.sizes) - lag.acked - lag.erased


@pytest.mark.parametrize(("kind", "num_histories"), [(StreamMachine, 60), (OperatedMachine, 30)])
def test_the_books_agree_with_the_server(
    redis_client: redis.Redis, kind: type[StreamMachine], num_histories: int
) -> None:
    class Machine(kind):  # type: ignore[valid-type,misc]
        client = redis_client

    run_state_machine_as_test(
        Machine, settings=settings(max_examples=num_histories, stateful_step_count=30, deadline=None, derandomize=True)
    )
