"""From stream entries to examples, with a real Redis: once each, and acked only after a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import redis
import safetensors.torch
import torch
from prometheus_client import CollectorRegistry

from speculator.draft.initialization import fresh_draft
from speculator.draft.sampling_params import SamplingParams
from speculator.redis.client import RedisKeys
from speculator.redis.stream_accounting import StreamLag
from speculator.redis.trace_stream import TraceStream
from speculator.trace import Trace, TraceHeader, encode_trace
from trainer.learning.batch import make_example
from trainer.learning.labels import draft_ids_by_target_id
from trainer.metrics import TrainerMetrics
from trainer.replay.trace_source import RETRY_S, TraceFiles, TraceSource, consumer_name


class Desk:
    """A producer, a consumer, and the consumer's counters."""

    def __init__(self, client: redis.Redis, model_dir: Path, fingerprint: str, folder: Path) -> None:
        self._client, self._fingerprint, self.folder = client, fingerprint, folder
        draft = fresh_draft(model_dir, draft_vocab_size=40, seed=0)
        self._make_example = functools.partial(
            make_example,
            draft_ids_V=draft_ids_by_target_id(draft.d2t, draft.config.vocab_size),
            feature_width=draft.fc.in_features,
        )
        self.registry = CollectorRegistry()
        self.metrics = TrainerMetrics(self.registry)
        self.stream = self._new_stream()

    def _new_stream(self, rank: int = 0) -> TraceStream:
        return TraceStream(self._client, "toy", max_bytes=10**8, consumer=consumer_name(rank))

    def source(
        self, used_trace_ids: list[str] | None = None, *, rank: int = 0, retry_s: float = RETRY_S
    ) -> TraceSource:
        """As after a start of the trainer."""
        return TraceSource(
            self._new_stream(rank),
            self._make_example,
            target_fingerprint=self._fingerprint,
            used_trace_ids=used_trace_ids or [],
            trace_files=TraceFiles(self.folder),
            metrics=self.metrics,
            retry_s=retry_s,
        )

    def send(self, trace: Trace) -> str:
        return self.stream.append(encode_trace(trace), trace_id=trace.header.trace_id)

    def lag(self) -> StreamLag:
        return self.stream.lag()

    def dead_letters(self) -> list[str]:
        entries = self._client.xrange(RedisKeys(model_key="toy").dead_letters)
        return [fields[b"reason"].decode() for _, fields in entries]


@pytest.fixture
def desk(redis_client: redis.Redis, model_dir: Path, traces: list[Trace], tmp_path: Path) -> Desk:
    return Desk(redis_client, model_dir, traces[0].header.target_fingerprint, tmp_path / "replay")


def test_an_entry_is_acked_when_it_was_used_and_saved(desk: Desk, traces: list[Trace]) -> None:
    source = desk.source()
    for trace in traces[:3]:
        desk.send(trace)
    first, second, third = source.read(10, 0)
    source.mark_used([first, third])
    assert desk.lag().acked == 0
    assert source.used_trace_ids == ["trace-0", "trace-2"]
    source.ack_used()
    assert (desk.lag().acked, desk.lag().pending) == (2, 1)
    source.mark_used([second])
    source.ack_used()
    assert (desk.lag().acked, desk.lag().pending) == (3, 0)


def test_what_was_not_saved_comes_again_after_a_restart(desk: Desk, traces: list[Trace]) -> None:
    for trace in traces[:2]:
        desk.send(trace)
    before = desk.source()
    used, _ = before.read(10, 0)
    before.mark_used([used])
    saved = before.used_trace_ids  # the checkpoint is written, and then the process dies before the ack

    after = desk.source(saved)
    assert [example.trace_id for example in after.read(10, 0)] == ["trace-1"]
    after.ack_used()
    assert (desk.lag().acked, desk.lag().pending) == (1, 1)


def test_what_a_consumer_had_in_hand_that_is_gone_for_good_is_taken_over(
    desk: Desk, traces: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.replay.trace_source._NUM_TAKEN_OVER", 2)
    for trace in traces:
        desk.send(trace)
    sources = [desk.source(rank=rank) for rank in range(3)]
    by_rank = [source.read(count, 0) for source, count in zip(sources, (2, 1, 4), strict=True)]
    sources[2].mark_used(by_rank[2][:1])
    saved = sources[2].used_trace_ids
    time.sleep(0.01)

    alone = desk.source(saved)
    alone.take_over()
    assert [stored.trace_id for stored in alone.read(3, 0)] == ["trace-0", "trace-1", "trace-2"]
    rest = [stored.trace_id for _ in range(3) for stored in alone.read(3, 0)]
    assert rest == ["trace-4", "trace-5", "trace-6", "trace-7"], "and the new one after the pending ones"
    alone.ack_used()
    assert (desk.lag().acked, desk.lag().pending) == (1, 7)


def test_a_trace_that_was_sent_twice_is_learnt_from_once(desk: Desk, traces: list[Trace]) -> None:
    source = desk.source()
    for _ in range(2):
        desk.send(traces[0])
    examples = source.read(10, 0)
    assert len(examples) == 1
    source.mark_used(examples)
    desk.send(traces[0])
    assert source.read(10, 0) == []
    source.ack_used()
    assert (desk.lag().acked, desk.lag().pending) == (3, 0)
    assert desk.registry.get_sample_value("slipstream_trainer_traces_total", {"outcome": "duplicate"}) == 2


def test_of_many_traces_the_oldest_ids_are_forgotten(desk: Desk, traces: list[Trace]) -> None:
    known = [f"old-{number}" for number in range(20_000)]
    source = desk.source(known)
    desk.send(traces[0])
    source.mark_used(source.read(1, 0))
    assert source.used_trace_ids == [*known[1:], "trace-0"]


def test_unusable_entries_are_set_aside_with_the_reason_and_the_rest_goes_on(desk: Desk, traces: list[Trace]) -> None:
    good = traces[0]
    desk.stream.append(b"\x00garbage", trace_id="garbage")
    desk.stream.append(encode_trace(good)[:-10], trace_id="truncated")
    desk.send(dataclasses.replace(good, header=_header(good, trace_id="other", target_fingerprint="0" * 64)))
    desk.send(dataclasses.replace(good, header=_header(good, trace_id="prompt"), constrained=good.constrained | True))
    narrow = dataclasses.replace(good, header=_header(good, trace_id="narrow"), aux_hidden=good.aux_hidden[:, :48])
    desk.send(narrow)
    high = np.where(good.token_ids == good.token_ids[-1], 10**6, good.token_ids).astype(np.int32)
    desk.send(dataclasses.replace(good, header=_header(good, trace_id="high"), token_ids=high))
    desk.send(good)
    assert [example.trace_id for example in desk.source().read(10, 0)] == ["trace-0"]
    reasons = desk.dead_letters()
    for reason, expected in zip(
        reasons, ["not a trace", "not a trace", "of target", "no position", "wide", "vocabulary"], strict=True
    ):
        assert expected in reason
    assert (desk.lag().dead_lettered, desk.lag().pending) == (6, 1)
    settled = desk.registry.get_sample_value("slipstream_trainer_stream_entries", {"state": "acked"})
    assert settled == 6, "nothing else tells so before the next checkpoint"


def test_a_header_may_have_every_value_up_to_its_bounds(desk: Desk, traces: list[Trace]) -> None:
    for number, (temperature, top_p, top_k) in enumerate([(1e30, 1e-9, 2**31 - 1), (5e-324, 1.0, 1), (0.1, 0.5, 0)]):
        sampling = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
        header = _header(traces[number], sampling=sampling, created_ms=2**53 - 1)
        desk.send(dataclasses.replace(traces[number], header=header))
    assert len(desk.source().read(10, 0)) == 3
    assert desk.dead_letters() == []


def test_a_nan_in_the_features_is_set_aside(desk: Desk, traces: list[Trace]) -> None:
    payload = bytearray(encode_trace(traces[0], features="bfloat16"))
    features = traces[0].aux_hidden.view(-1)[:8].view(dtype=torch.uint8).numpy().tobytes()
    at = bytes(payload).index(features)
    payload[at : at + 2] = b"\xff\x7f"
    desk.stream.append(bytes(payload), trace_id="trace-0")
    assert desk.source().read(10, 0) == []
    assert "not finite" in desk.dead_letters()[0]


def test_history_is_what_was_acked(desk: Desk, traces: list[Trace]) -> None:
    source = desk.source()
    for trace in traces[:4]:
        desk.send(trace)
    desk.stream.append(b"garbage", trace_id="garbage")
    examples = source.read(10, 0)
    source.mark_used(examples[:3])
    source.ack_used()
    assert [stored.trace_id for stored in desk.source().history()] == ["trace-0", "trace-1", "trace-2"]


def test_history_has_what_is_wanted_and_what_was_not_acked_comes_later(desk: Desk, traces: list[Trace]) -> None:
    source = desk.source()
    for trace in traces[:4]:
        desk.send(trace)
    examples = source.read(10, 0)
    source.mark_used(examples[:2])
    source.ack_used()
    source.mark_used(examples[2:3])
    saved = source.used_trace_ids  # the checkpoint is written, and then the process dies before the ack

    shutil.rmtree(desk.folder)
    after = desk.source(saved)
    wanted = ["trace-1", "trace-2", "trimmed"]
    assert [stored.trace_id for stored in after.history(wanted)] == ["trace-1"]
    assert [stored.trace_id for stored in after.read(10, 0)] == ["trace-3"]
    assert [stored.trace_id for stored in after.pop_found()] == ["trace-2"]
    assert after.pop_found() == []


def test_history_comes_from_the_shelf_where_the_stream_has_it_no_more(
    desk: Desk, traces: list[Trace], redis_client: redis.Redis
) -> None:
    source = desk.source()
    for trace in traces[:3]:
        desk.send(trace)
    source.mark_used(source.read(10, 0))
    source.ack_used()
    redis_client.flushall()
    after = desk.source(source.used_trace_ids)
    assert [stored.trace_id for stored in after.history(["trace-2", "trace-0"])] == ["trace-2", "trace-0"]


def test_what_a_trace_says_about_itself_travels_along(desk: Desk, traces: list[Trace]) -> None:
    desk.send(dataclasses.replace(traces[0], header=_header(traces[0], tenant="me", domain="math")))
    [stored] = desk.source().read(1, 0)
    assert (stored.provenance.tenant, stored.provenance.domain) == ("me", "math")


def test_an_unknown_schema_and_an_empty_span_are_set_aside(desk: Desk, traces: list[Trace]) -> None:
    payload = encode_trace(traces[0])
    desk.stream.append(payload.replace(b'schema_version\\":3', b'schema_version\\":9'), trace_id="future")
    tensors = safetensors.torch.load(payload)
    header_end = 8 + int.from_bytes(payload[:8], "little")
    metadata = json.loads(payload[8:header_end])["__metadata__"]
    empty = {name: tensor[:0].clone() for name, tensor in tensors.items()}
    desk.stream.append(safetensors.torch.save(empty, metadata), trace_id="empty")
    desk.send(traces[1])
    assert [stored.trace_id for stored in desk.source().read(10, 0)] == ["trace-1"]
    future, nothing = desk.dead_letters()
    assert "schema version 9" in future
    assert "no tokens" in nothing


def test_redis_being_away_is_counted_and_survived(
    desk: Desk, traces: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = desk.source(retry_s=0.0)
    desk.send(traces[0])
    examples = source.read(10, 0)
    source.mark_used(examples)
    with monkeypatch.context() as away:
        away.setattr(redis.Redis, "execute_command", _refuse)
        away.setattr(redis.client.Pipeline, "execute", _refuse)
        assert source.read(10, 0) == []
        source.ack_used()
        assert list(source.history()) == []
    for operation in ("read", "ack", "recent"):
        labels = {"operation": operation}
        assert desk.registry.get_sample_value("slipstream_trainer_stream_errors_total", labels) == 1
    assert source.read(10, 0) == [], "the entry in hand is delivered again, and is not taken twice"
    source.ack_used()
    assert (desk.lag().acked, desk.lag().pending) == (1, 0)


def _refuse(*_: object, **__: object) -> None:
    raise redis.exceptions.ConnectionError("away")


def test_a_read_pauses_while_redis_is_away(desk: Desk, traces: list[Trace], monkeypatch: pytest.MonkeyPatch) -> None:
    source = desk.source()
    with monkeypatch.context() as away:
        away.setattr(redis.Redis, "execute_command", _refuse)
        assert source.read(10, 0) == []
    desk.send(traces[0])
    start_s = time.monotonic()
    assert source.read(10, 50) == [], "not asked again so soon"
    assert 0.04 < time.monotonic() - start_s < 1.0


def test_a_dead_letter_waits_for_redis_and_holds_nothing_up(
    desk: Desk, traces: list[Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = desk.source(retry_s=0.0)
    desk.stream.append(b"garbage", trace_id="garbage")
    desk.send(traces[0])
    with monkeypatch.context() as away:
        away.setattr(redis.client.Pipeline, "execute", _refuse)
        assert len(source.read(10, 0)) == 1
    assert desk.dead_letters() == []
    assert source.read(10, 0) == []
    assert len(desk.dead_letters()) == 1


def _header(trace: Trace, **changes: object) -> TraceHeader:
    return msgspec.structs.replace(trace.header, **changes)
