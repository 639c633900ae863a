"""Traces taken out of the middle of a stream, and out of recordings; ages at which they go by themselves."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from speculator.errors import ConfigError, StreamError, TraceError
from speculator.host import now_ms
from speculator.recording import RecordingHeader, RecordingReader, RecordingWriter
from speculator.redis import client as redis_of_ours
from speculator.redis.client import RedisKeys, connect
from speculator.redis.embedded import EmbeddedRedis
from speculator.redis.stream_accounting import StreamLag
from speculator.redis.trace_deletion import ErasureOrders, Removed, TraceRemover, TrainerReport, remove_from_recording
from speculator.redis.trace_stream import StreamEntry, TraceStream
from speculator.trace import Trace, TraceHeader, encode_trace, read_header
from tests.fixtures.traces import make_trace
from tests.fixtures.waiting import wait_until

HEADER = RecordingHeader(target_fingerprint="f" * 64, model="m", created_ms=1, note="n")


def is_annas(header: TraceHeader) -> bool:
    return header.tenant == "anna"


def trace_of(number: int, tenant: str) -> Trace:
    return make_trace(number, trace_id=f"{tenant}-{number}", tenant=tenant, d=64)


def open_stream(client: redis.Redis, **changes: float) -> TraceStream:
    return TraceStream(client, "toy", max_bytes=10**8, **changes)  # type: ignore[arg-type]


def fill(stream: TraceStream, tenants: list[str]) -> list[Trace]:
    traces = [trace_of(number, tenant) for number, tenant in enumerate(tenants)]
    for trace in traces:
        stream.append(encode_trace(trace), trace_id=trace.header.trace_id)
    return traces


def balanced(lag: StreamLag) -> bool:
    return lag.appended == lag.acked + lag.pending + lag.undelivered + lag.lost + lag.erased


def test_a_header_is_read_without_the_rest() -> None:
    payload = encode_trace(trace_of(0, "anna"))
    assert read_header(payload) == read_header(payload[:-50]) == trace_of(0, "anna").header
    for broken in (b"", b"not a trace", payload[:100], bytes(8) + payload):
        with pytest.raises(TraceError):
            read_header(broken)


def test_acked_pending_and_undelivered_entries_go(redis_client: redis.Redis) -> None:
    stream, remover = open_stream(redis_client), TraceRemover(redis_client, "toy")
    fill(stream, ["anna", "bo", "anna", "bo", "anna", "bo", "anna", "anna", "bo"])
    first, second, third, fourth = stream.read(4, 0)
    stream.ack([first.id, second.id])
    stream.dead_letter(third, "for a test")
    stream.dead_letter(StreamEntry(id="0-1", trace_id="?", created_ms=0, payload=b"unreadable"), "for a test")
    expected = Removed(stream=5, dead_letters=2, unreadable=1)
    before = stream.lag()
    assert remover.remove(is_annas, dry_run=True) == expected
    assert stream.lag() == before
    assert remover.remove(is_annas) == expected
    lag = stream.lag()
    assert (lag.length, lag.acked, lag.pending, lag.undelivered, lag.lost, lag.erased) == (4, 3, 1, 2, 0, 3)
    assert balanced(lag)
    assert [entry.trace_id for entry in stream.read(10, 0)] == ["bo-5", "bo-8"]
    stream.ack([fourth.id])
    assert remover.remove(is_annas) == Removed()
    assert stream.lag().erased == 3
    assert redis_client.xlen(RedisKeys(model_key="toy").dead_letters) == 0


def test_an_entry_that_is_acked_just_before_its_removal_is_not_counted_twice(redis_client: redis.Redis) -> None:
    stream = open_stream(redis_client)
    fill(stream, ["anna", "anna"])
    first, _ = stream.read(2, 0)

    class Late(redis.Redis):
        def pipeline(self, transaction: Any = True, shard_hint: Any = None) -> Any:
            stream.ack([first.id])
            return super().pipeline(transaction, shard_hint)

    late = Late(connection_pool=redis_client.connection_pool)
    assert TraceRemover(late, "toy").remove(is_annas) == Removed(stream=2)
    lag = stream.lag()
    assert (lag.acked, lag.erased, balanced(lag)) == (1, 1, True)


def test_an_empty_stream_has_nothing(redis_client: redis.Redis) -> None:
    assert TraceRemover(redis_client, "toy").remove(is_annas) == Removed()


def test_killed_in_the_middle_and_repeated(redis_client: redis.Redis) -> None:
    stream, remover = open_stream(redis_client), TraceRemover(redis_client, "toy")
    fill(stream, ["anna", "bo"] * 12)
    stream.read(7, 0)

    def killed_at_ninth(header: TraceHeader) -> bool:
        if header.trace_id == "anna-8":
            raise KeyboardInterrupt
        return is_annas(header)

    with pytest.raises(KeyboardInterrupt):
        remover.remove(killed_at_ninth)
    lag = stream.lag()
    assert (lag.length, lag.erased, lag.lost) == (20, 4, 0)
    assert balanced(lag)
    remover.remove(is_annas)
    lag = stream.lag()
    assert (lag.length, lag.pending, lag.erased, lag.lost) == (12, 3, 12, 0)
    assert balanced(lag)


def test_no_byte_of_it_is_left_on_redis_disk(tmp_path: Path) -> None:
    """Small traces too, several of which would share a node of the stream by default."""
    with EmbeddedRedis(tmp_path) as server, connect(server.url) as client:
        client.config_set("rdbcompression", "no")
        stream = open_stream(client)
        traces = fill(stream, ["anna", "bo", "anna"])
        remover = TraceRemover(client, "toy")
        remover.remove(is_annas)

        def on_disk() -> list[bool]:
            data = [path.read_bytes() for path in tmp_path.iterdir() if path.suffix != ".sock"]
            return [any(trace.token_ids.tobytes() in part for part in data) for trace in traces]

        assert on_disk() == [True, True, True]
        assert remover.compact()
        assert on_disk() == [False, True, False]
        dumped = client.dump(RedisKeys(model_key="toy").traces) or b""
        assert [trace.token_ids.tobytes() in dumped for trace in traces] == [False, True, False]  # type: ignore[operator]


def test_a_user_who_may_not_ask_for_it_is_told_so_at_once(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server, connect(server.url) as client:
        client.execute_command("ACL", "SETUSER", "default", "-bgrewriteaof")
        assert not TraceRemover(client, "toy").compact()


def test_a_rewrite_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedRedis(tmp_path) as server, connect(server.url) as client:
        state = {**client.info("persistence"), "aof_last_bgrewrite_status": "err"}
        monkeypatch.setattr(client, "info", lambda _: state)
        with pytest.raises(StreamError, match="could not be rewritten"):
            TraceRemover(client, "toy").compact()


def test_commands_that_a_provider_leaves_out_are_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Managed servers have no BGREWRITEAOF, hardened ones no INFO."""
    monkeypatch.setattr("speculator.redis.embedded._SCRIPTING", ("BGREWRITEAOF",))
    with EmbeddedRedis(tmp_path / "managed") as server, connect(server.url) as client:
        assert not TraceRemover(client, "toy").compact()
    monkeypatch.setattr("speculator.redis.embedded._SCRIPTING", ("INFO",))
    with EmbeddedRedis(tmp_path / "hardened") as server, connect(server.url) as client:
        assert not TraceRemover(client, "toy").compact()
        assert open_stream(client).memory_share() is None


def test_a_redis_that_is_busy_once_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A moment without INFO must not leave ages to this machine's clock for good."""
    monkeypatch.setattr("speculator.redis.embedded._SCRIPTING", ())
    with EmbeddedRedis(tmp_path) as server, connect(server.url) as client, connect(server.url) as other:
        client.config_set("lua-time-limit", 1)
        client.config_set("maxmemory", 1 << 30)
        stream = open_stream(client)
        script = threading.Thread(target=_run_forever, args=(other,))
        script.start()
        wait_until(lambda: _is_busy(client))
        with pytest.raises(StreamError, match="BUSY"):
            stream.memory_share()
        client.script_kill()
        script.join()
        assert stream.memory_share() is not None


def _run_forever(client: redis.Redis) -> None:
    with contextlib.suppress(redis.ResponseError):
        client.eval("while true do end", 0)


def _is_busy(client: redis.Redis) -> bool:
    try:
        client.ping()
    except redis.ResponseError:
        return True
    return False


def test_an_entry_with_somebody_elses_idea_of_an_index_goes_like_any_other(redis_client: redis.Redis) -> None:
    stream, remover = open_stream(redis_client), TraceRemover(redis_client, "toy")
    fill(stream, ["anna"])
    payload = encode_trace(trace_of(9, "anna"))
    for index in (b"9" * 5000, b"9" * 30):
        redis_client.xadd(RedisKeys(model_key="toy").traces, {"payload": payload, "index": index})
    assert remover.remove(is_annas) == Removed(stream=3)
    assert stream.lag().length == 0


def test_old_entries_go_by_themselves(redis_client: redis.Redis) -> None:
    stream = open_stream(redis_client)
    fill(stream, ["bo"] * 4)
    first, second, third = stream.read(3, 0)
    stream.ack([first.id])
    stream.dead_letter(second, "for a test")
    time.sleep(0.06)
    young = open_stream(redis_client, ttl_s=0.05)
    young.append(encode_trace(trace_of(9, "bo")), trace_id="young")
    lag = young.lag()
    assert (lag.length, lag.expired, lag.lost, lag.acked) == (1, 4, 2, 2)
    assert balanced(lag)
    assert redis_client.xlen(RedisKeys(model_key="toy").dead_letters) == 0
    young.ack([third.id])
    assert young.lag().acked == 2, "what is lost is not acked as well"
    assert [entry.trace_id for entry in young.read(10, 0)] == ["young"]


def test_a_clock_that_is_ahead_ages_no_entries(redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(open_stream(redis_client, ttl_s=3600), ["bo"] * 2)
    monkeypatch.setattr(redis_of_ours, "now_ms", lambda: int(1000 * (time.time() + 2 * 3600)))
    ahead = open_stream(redis_client, ttl_s=3600)
    ahead.append(encode_trace(trace_of(9, "bo")), trace_id="third")
    assert ahead.lag().length == 3


def test_an_order_is_newer_than_all_before_it_though_a_clock_was_ahead(redis_client: redis.Redis) -> None:
    orders, ahead_ms = ErasureOrders(redis_client, "toy"), now_ms() + 10**6
    redis_client.hset(RedisKeys(model_key="toy").erasures, "anna", ahead_ms)
    assert ahead_ms < orders.order("bo") < orders.order("bo") < orders.order("anna")


@pytest.mark.parametrize("skew_ms", [10**6, -(10**6)])
def test_whoever_reports_is_found_whatever_this_machines_clock_says(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch, skew_ms: int
) -> None:
    orders = ErasureOrders(redis_client, "toy")
    orders.report("trainer-0", TrainerReport(erased_ms=5))
    redis_client.xadd(RedisKeys(model_key="toy").gateways, {"gateway": "stopped", "erased_ms": 5}, id="1-1")
    orders.report_gateway("gateway-0", 5)
    monkeypatch.setattr(redis_of_ours, "now_ms", lambda: int(1000 * time.time()) + skew_ms)
    orders.report("trainer-1", TrainerReport(erased_ms=5))
    assert set(orders.trainers()) == {"trainer-0", "trainer-1"}
    assert orders.gateways() == {"gateway-0": 5}
    key = RedisKeys(model_key="toy").trainers
    redis_client.hset(key, "stopped", msgspec.json.encode(TrainerReport(at_ms=1, erased_ms=5)))
    assert "stopped" not in orders.trainers()


@pytest.mark.parametrize("skew_s", [5 * 3600, -5 * 3600])
def test_an_order_covers_what_was_captured_before_it_whatever_this_machines_clock_says(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch, skew_s: int
) -> None:
    created_ms = now_ms()
    monkeypatch.setattr(time, "time_ns", lambda: 10**6 * created_ms + 10**9 * skew_s)
    at_ms = ErasureOrders(redis_client, "toy").order("anna")
    assert created_ms <= at_ms < created_ms + 3600 * 1000


def test_of_two_orders_made_at_once_the_later_one_is_newer(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Services report the newest order that they have carried out."""
    orders, first = ErasureOrders(redis_client, "toy"), list[int]()

    def read_slowly() -> int:
        if not first:
            first.append(0)
            first[0] = ErasureOrders(redis_client, "toy").order("anna")
        return 0

    monkeypatch.setattr(redis_of_ours.ServerInfo, "time_ms", lambda _: read_slowly())
    at_ms = orders.order("bo")
    assert orders.orders() == {"anna": first[0], "bo": at_ms}
    assert at_ms > first[0]


def recording(path: Path, traces: list[Trace]) -> Path:
    with RecordingWriter(path, HEADER) as writer:
        for trace in traces:
            writer.append(encode_trace(trace), trace_id=trace.header.trace_id)
    return path


def ids_in(path: Path) -> list[str]:
    with RecordingReader(path) as reader:
        assert reader.header == HEADER
        return [trace.header.trace_id for trace in reader.traces()]


def test_a_recording_loses_what_is_chosen_and_what_nobody_can_read(tmp_path: Path) -> None:
    traces = [trace_of(number, tenant) for number, tenant in enumerate(["anna", "bo", "anna", "bo", "bo"])]
    path = recording(tmp_path / "a.rec", traces)
    path.chmod(0o640)
    data = bytearray(path.read_bytes())
    data[data.index(traces[4].token_ids.tobytes())] ^= 1
    path.write_bytes(bytes(data) + b"\x10\0\0\0cut")
    before = path.read_bytes()
    planned = remove_from_recording(path, is_annas, dry_run=True)
    assert path.read_bytes() == before
    assert dataclasses.astuple(planned) == (3, 2, 1, 7)
    assert remove_from_recording(path, is_annas) == planned
    assert ids_in(path) == ["bo-1", "bo-3"]
    assert path.stat().st_mode & 0o777 == 0o640
    assert traces[0].token_ids.tobytes() not in path.read_bytes()
    done = path.stat()
    assert remove_from_recording(path, is_annas).removed == 0
    assert path.stat().st_ino == done.st_ino, "nothing to do, nothing written"
    assert list(tmp_path.iterdir()) == [path]


def test_a_recording_stays_private_and_its_owners_and_a_link_to_it_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recording(tmp_path / "a.rec", [trace_of(0, "anna"), trace_of(1, "bo")])
    link = tmp_path / "link.rec"
    link.symlink_to(path)
    path.chmod(0o600)
    meanwhile: list[int] = []

    def noted(header: TraceHeader) -> bool:
        meanwhile.extend(stat.S_IMODE(each.stat().st_mode) for each in tmp_path.glob(".a.rec.*"))
        return is_annas(header)

    given: list[tuple[object, ...]] = []
    monkeypatch.setattr("speculator.host.os.chown", lambda *words: given.append(words))
    umask = os.umask(0o022)
    try:
        remove_from_recording(link, noted)
    finally:
        os.umask(umask)
    assert set(meanwhile) == {0o600}
    assert (link.is_symlink(), ids_in(path)) == (True, ["bo-1"])
    assert [words[1:] for words in given] == [(path.stat().st_uid, path.stat().st_gid)]


@pytest.mark.parametrize("refusal", [errno.EPERM, errno.EINVAL])
def test_another_group_gets_no_rights_to_a_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    """EINVAL: an owner whom a container's user namespace does not know."""

    def chown(*_: object) -> None:
        raise OSError(refusal, os.strerror(refusal))

    path = recording(tmp_path / "a.rec", [trace_of(0, "anna"), trace_of(1, "bo")])
    path.chmod(0o640)
    monkeypatch.setattr("speculator.host.os.chown", chown)
    assert remove_from_recording(path, is_annas).removed == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_recording_on_a_file_system_without_modes_is_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chmod(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    path = recording(tmp_path / "a.rec", [trace_of(0, "anna"), trace_of(1, "bo")])
    monkeypatch.setattr("speculator.host.os.chmod", chmod)
    assert remove_from_recording(path, is_annas).removed == 1
    assert ids_in(path) == ["bo-1"]


def test_a_recording_is_whole_when_it_cannot_be_rewritten(tmp_path: Path) -> None:
    path = recording(tmp_path / "a.rec", [trace_of(0, "anna"), trace_of(1, "bo")])
    before, leftover = path.read_bytes(), tmp_path / ".a.rec.rewritten"
    leftover.mkdir()
    assert remove_from_recording(path, lambda header: False).removed == 0, "nothing to do, nothing written"
    with pytest.raises(ConfigError, match="check its folder"):
        remove_from_recording(path, is_annas)
    assert path.read_bytes() == before
    leftover.rmdir()
    leftover.write_bytes(b"left by a kill")
    remove_from_recording(path, is_annas)
    assert ids_in(path) == ["bo-1"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_of_another_schema_is_not_kept(tmp_path: Path) -> None:
    path = recording(tmp_path / "a.rec", [trace_of(0, "bo")])
    header = msgspec.structs.replace(trace_of(1, "bo").header)
    payload = encode_trace(trace_of(1, "bo")).replace(b'schema_version\\":3', b'schema_version\\":7')
    with RecordingWriter(path, HEADER) as writer:
        writer.append(payload, trace_id=header.trace_id)
    assert remove_from_recording(path, is_annas).unreadable == 1
