"""Traces that were damaged on their way, and entries of the stream that nobody of ours has written."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from speculator.errors import ConfigError, StreamError, TraceError
from speculator.recording import RecordingHeader, RecordingReader, RecordingWriter
from speculator.redis.client import RedisKeys
from speculator.redis.control_plane import DraftPointer
from speculator.redis.trace_stream import TraceStream
from speculator.trace import check_trace, decode_trace, encode_trace
from tests.fixtures.traces import make_trace, with_branches
from tests.hostile.judge import Choose, FailureError, Inputs, Outcome, garbled

MODEL_KEY = "hostile"
KEYS = RedisKeys(model_key=MODEL_KEY)


def original(choose: Choose) -> bytes:
    trace = make_trace(choose(1000), T=1 + choose(20), K=1 + choose(5), R=choose(5), P=choose(4))
    trace = with_branches(trace) if choose(2) else trace
    return encode_trace(trace, features="float8" if choose(2) else "bfloat16")


def mutate(raw: bytes, choose: Choose) -> bytes:
    """Changed in a few places, or cut."""
    return garbled(raw, choose, head=1500) if choose(5) else raw[: 1 + choose(len(raw))]


def mutated_traces(choose: Choose, count: int) -> Inputs:
    for number in range(count):
        yield str(number), partial(decode, mutate(original(choose), choose))


def mutated_recordings(path: Path, choose: Choose, count: int) -> Inputs:
    written = recording(path, choose)
    for number in range(count):
        yield str(number), partial(read_recording, path, mutate(written, choose))


def decode(raw: bytes) -> Outcome:
    try:
        trace = decode_trace(raw)
    except TraceError as refusal:
        return type(refusal).__name__
    check_trace(trace)
    return "decoded"


def read_recording(path: Path, raw: bytes) -> Outcome:
    path.write_bytes(raw)
    try:
        with RecordingReader(path) as reader:
            for trace in reader.traces():
                check_trace(trace)
            damaged = bool(reader.num_damaged or reader.num_cut_bytes)
    except ConfigError:
        return "ConfigError"
    return "read, with damage counted" if damaged else "read"


def recording(path: Path, choose: Choose) -> bytes:
    header = RecordingHeader(target_fingerprint="f" * 64, model="toy", created_ms=1)
    with RecordingWriter(path, header) as writer:
        for number in range(3):
            writer.append(original(choose), trace_id=str(number))
    raw = path.read_bytes()
    path.unlink()
    return raw


def foreign_entries() -> Iterator[tuple[str, dict[str, Any]]]:
    """Fields of an XADD by somebody else: any client that may write to this Redis."""
    ours = {"payload": b"x", "trace_id": "t", "created_ms": 1, "index": 0}
    yield "other fields", {"hello": "world"}
    for name, value in (("created_ms", b"soon"), ("created_ms", b""), ("created_ms", b"9" * 6000), ("index", b"first")):
        yield f"{name}: {value[:8]!r}", {**ours, name: value}
    for name in ours:
        yield f"no {name}", {key: value for key, value in ours.items() if key != name}
    yield "trace id of bytes", {**ours, "trace_id": b"\xff\xfe\x00"}
    yield "long trace id", {**ours, "trace_id": b"t" * 1_000_000}


def consume(client: Any, fields: dict[str, Any]) -> Outcome:
    """What a trainer does with the entry, and with one of ours behind it, which must come through."""
    client.flushall()
    stream = TraceStream(client, MODEL_KEY, max_bytes=100_000_000)
    client.xadd(KEYS.traces, fields)
    stream.append(encode_trace(make_trace()), trace_id="ours")
    seen = []
    try:
        while entries := stream.read(10, 0):
            for entry in entries:
                outcome = decode(entry.payload)
                seen.append(outcome)
                if outcome == "decoded":
                    stream.ack([entry.id])
                else:
                    stream.dead_letter(entry, outcome)
        stream.lag()
    except StreamError as refusal:
        seen.append(f"StreamError: {refusal}")
    if seen != ["TraceError", "decoded"]:
        raise FailureError(f"the trace behind it did not come through: {seen}")
    return "dead letter"


def odd_pointers(client: Any) -> Inputs:
    values = (b"", b"abc", b"-1", b"0", b"1.5", b"1e9", b"\xff", b"9" * 5000, b" 7", b"1_0", "٣".encode())
    yield from ((repr(value[:12]), partial(follow, client, value)) for value in values)


def follow(client: Any, value: bytes) -> Outcome:
    """What an engine's follower reads where the pointer stands: a version, or an error that it expects."""
    client.flushall()
    pointer = DraftPointer(client, MODEL_KEY)
    for key in (KEYS.desired_draft, KEYS.pinned_draft):
        client.set(key, value)
    outcomes = set()
    for read in (pointer.desired, pointer.pinned, pointer.published):
        try:
            outcomes.add(f"read as {str(read())[:12]}")
        except StreamError:
            outcomes.add("StreamError")
    return ", ".join(sorted(outcomes))
