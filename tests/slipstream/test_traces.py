"""`slipstream traces`: from a real stream into a file, and what can be learnt about it there."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import redis
from typer.testing import CliRunner

from slipstream.cli.main import app
from slipstream.traces import summary
from speculator.draft.checkpoint import model_key, target_fingerprint
from speculator.draft.sampling_params import SamplingParams
from speculator.host import now_ms
from speculator.recording import RecordingHeader, RecordingReader, RecordingWriter
from speculator.redis.client import RedisKeys
from speculator.redis.trace_stream import TraceStream
from speculator.trace import Trace, encode_trace
from tests.fixtures.traces import make_trace, send, with_branches
from trainer.release.gate import recorded_rounds
from trainer.statistics import AcceptanceCounts

Refused = Callable[..., str]


def domain_traces(fingerprint: str) -> list[Trace]:
    return [
        with_branches(
            make_trace(seed, trace_id=f"trace-{seed}", domain="ab"[seed % 2], target_fingerprint=fingerprint, R=5)
        )
        for seed in range(6)
    ]


@pytest.fixture
def stream(redis_client: redis.Redis, toy_model: Path) -> TraceStream:
    return TraceStream(redis_client, model_key(toy_model, target_fingerprint(toy_model)), max_bytes=10**8)


@pytest.fixture
def filled(stream: TraceStream, toy_model: Path) -> list[Trace]:
    traces = domain_traces(target_fingerprint(toy_model))
    for trace in traces:
        stream.append(encode_trace(trace), trace_id=trace.header.trace_id)
    return traces


@pytest.fixture
def cli(redis_url: str, toy_model: Path) -> Callable[..., str]:
    """Run a command that must succeed; returns its standard output."""

    def run(*arguments: object) -> str:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.stderr
        return result.stdout

    return run


@pytest.fixture
def record(cli: Callable[..., str], redis_url: str, toy_model: Path) -> Callable[..., None]:
    return lambda out, *more: cli(
        "traces", "record", "--model", toy_model, "--redis-url", redis_url, "--out", out, *more
    ) and None  # fmt: skip


def ids_in(path: Path) -> list[str]:
    with RecordingReader(path) as reader:
        return [trace.header.trace_id for trace in reader.traces()]


def test_a_stream_is_copied_and_its_accounts_stay(
    stream: TraceStream, filled: list[Trace], record: Callable[..., None], tmp_path: Path
) -> None:
    entries = stream.read(2, 0)
    stream.ack([entries[0].id])
    before = stream.lag()
    record(tmp_path / "out.rec", "--note", "by a test")
    assert stream.lag() == before
    assert ids_in(tmp_path / "out.rec") == [trace.header.trace_id for trace in filled]
    assert len(stream.read(100, 0)) == 4, "the trainer still gets what it has not read"


def test_a_recording_is_continued_with_what_is_new_and_what_arrives_meanwhile(
    stream: TraceStream, filled: list[Trace], record: Callable[..., None], tmp_path: Path
) -> None:
    out = tmp_path / "out.rec"
    record(out)
    more = make_trace(50, trace_id="more", target_fingerprint=filled[0].header.target_fingerprint)
    stream.append(encode_trace(more), trace_id="more")
    stream.append(encode_trace(filled[0]), trace_id="trace-0")
    stream.append(b"not a trace", trace_id="broken")
    late = make_trace(51, trace_id="late", target_fingerprint=filled[0].header.target_fingerprint)
    timer = threading.Timer(0.5, lambda: stream.append(encode_trace(late), trace_id="late"))
    timer.start()
    record(out, "--seconds", 2)
    timer.join()
    assert ids_in(out) == [*(trace.header.trace_id for trace in filled), "more", "late"]


def test_what_is_of_another_target_or_no_trace_at_all_is_left_out(
    stream: TraceStream, filled: list[Trace], cli: Callable[..., str], redis_client: redis.Redis, redis_url: str,
    toy_model: Path, tmp_path: Path,
) -> None:  # fmt: skip
    out, header = tmp_path / "out.rec", filled[0].header
    foreign = make_trace(52, trace_id="foreign", target_fingerprint="0" * 64)
    stream.append(encode_trace(foreign), trace_id="foreign")
    redis_client.xadd(RedisKeys(model_key=model_key(toy_model, header.target_fingerprint)).traces, {"not": "ours"})
    words = ("traces", "record", "--model", toy_model, "--redis-url", redis_url, "--out", out, "--json")
    assert json.loads(cli(*words)) == {"recorded": 6, "known": 0, "unusable": 1, "removed_bytes": 0}
    assert json.loads(cli(*words)) == {"recorded": 0, "known": 6, "unusable": 1, "removed_bytes": 0}
    assert ids_in(out) == [trace.header.trace_id for trace in filled]


def test_a_long_stream_is_copied_to_its_end(
    stream: TraceStream, record: Callable[..., None], toy_model: Path, tmp_path: Path
) -> None:
    fingerprint = target_fingerprint(toy_model)
    send(stream, (make_trace(0, trace_id=str(number), target_fingerprint=fingerprint) for number in range(40)))
    record(tmp_path / "out.rec")
    assert ids_in(tmp_path / "out.rec") == [str(number) for number in range(40)]


def test_a_model_without_a_stream_is_refused(
    redis_client: redis.Redis, redis_url: str, toy_model: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    """As where its folder has another name: the name is part of the stream's."""
    out, same = tmp_path / "out.rec", ("--model", toy_model, "--redis-url", redis_url)
    for words in (("record", *same, "--out", out), ("prune", *same, "--older-than-hours", 1)):
        assert "in this Redis: check --redis-url, or serve with --capture" in refused("traces", *words)
    TraceStream(redis_client, "other-0123", max_bytes=10**8).append(b"trace", trace_id="a")
    assert "set --model to the one of other-0123" in refused("traces", "record", *same, "--out", out)
    assert not out.exists()
    key = model_key(toy_model, target_fingerprint(toy_model))
    assert f"no traces of {key!r}" in refused("traces", "record", *same, "--out", out, "--seconds", 0.01)


def test_info_counts_what_is_there(
    filled: list[Trace], record: Callable[..., None], cli: Callable[..., str], tmp_path: Path
) -> None:
    out = tmp_path / "out.rec"
    record(out)
    document = json.loads(cli("traces", "info", out, "--json"))
    assert document["traces"] == 6
    assert document["tokens"] == sum(trace.num_tokens for trace in filled)
    assert document["proposals"] == sum(int((trace.rounds.draft_tokens >= 0).sum()) for trace in filled)
    assert document["branch_rows"] == sum(trace.num_branches for trace in filled) > 0
    assert document["bytes"] == out.stat().st_size
    assert (document["cut_off_bytes"], document["damaged_entries"]) == (0, 0)
    assert {name: counts["traces"] for name, counts in document["domains"].items()} == {"a": 3, "b": 3}
    live = sum((recorded_rounds(trace) for trace in filled), AcceptanceCounts())
    assert document["accept_length"] == pytest.approx(live.length, abs=1e-4)
    assert sum(document["draft_versions"].values()) == sum(len(trace.rounds.position) for trace in filled)
    out.write_bytes(out.read_bytes()[:-100])
    document = json.loads(cli("traces", "info", out, "--json"))
    assert document["traces"] == 5
    assert document["cut_off_bytes"] > 0


def test_temperatures_that_read_the_same_are_counted_together(tmp_path: Path) -> None:
    header = RecordingHeader(target_fingerprint="f" * 64, model="m", created_ms=0, note="")
    with RecordingWriter(tmp_path / "out.rec", header) as writer:
        for temperature in (0.7, 0.70000001, 0.2):
            trace = make_trace(trace_id=str(temperature), sampling=SamplingParams(temperature=temperature))
            writer.append(encode_trace(trace), trace_id=trace.header.trace_id)
    assert summary(tmp_path / "out.rec")["temperatures"] == {"0.2": 1, "0.7": 2}


def test_export_writes_one_line_a_trace_with_everything_but_the_features(
    filled: list[Trace], record: Callable[..., None], cli: Callable[..., str], tmp_path: Path
) -> None:
    out, lines = tmp_path / "out.rec", tmp_path / "out.jsonl"
    record(out)
    cli("traces", "export", out, "--out", lines)
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert cli("traces", "export", out) == lines.read_text()
    for row, trace in zip(rows, filled, strict=True):
        header, rounds = trace.header, trace.rounds
        assert (row["trace_id"], row["domain"]) == (header.trace_id, header.domain)
        assert row["sampling"]["temperature"] == header.sampling.temperature
        assert [*row["prompt_token_ids"], *row["completion_token_ids"]] == trace.token_ids.tolist()
        assert len(row["prompt_token_ids"]) == header.num_prompt_tokens
        assert [len(ids) for ids in row["target_topk_ids"]] == [len(each) for each in row["target_topk_logprobs"]]
        assert row["target_topk_ids"][0] == []
        assert row["target_topk_ids"][-1] == trace.target_topk_ids[-1].tolist()
        assert len(row["rounds"]) == len(rounds.position)
        for found, position, tokens in zip(row["rounds"], rounds.position, rounds.draft_tokens, strict=True):
            assert found["position"] == position
            assert found["tokens"] == tokens[tokens >= 0].tolist()
            assert len(found["logprobs"]) == len(found["parents"]) == len(found["tokens"])
        assert len(row["branches"]) == trace.num_branches
        for found in row["branches"]:
            assert trace.branches is not None
            assert (found["round"], found["proposal"]) in zip(trace.branches.round, trace.branches.node, strict=True)
            assert len(found["target_topk_ids"]) == len(found["target_topk_logprobs"]) > 0
    assert any(row["branches"] for row in rows)


def test_a_token_that_could_not_be_drawn_has_a_finite_logprob_in_an_export(
    cli: Callable[..., str], tmp_path: Path
) -> None:
    """Such as behind a mask of a grammar. JSON has no infinite numbers."""
    trace = make_trace(trace_id="masked")
    trace.target_topk_logprobs[-1, -1] = -np.inf
    out = tmp_path / "out.rec"
    with RecordingWriter(out, RecordingHeader(target_fingerprint="f" * 64, model="m", created_ms=0, note="")) as writer:
        writer.append(encode_trace(trace), trace_id="masked")
    row = json.loads(cli("traces", "export", out))
    assert row["target_topk_logprobs"][-1][-1] == -1e4
    assert row["target_topk_logprobs"][-1][0] == pytest.approx(float(trace.target_topk_logprobs[-1, 0]), abs=1e-4)


def test_what_cannot_work_is_said_in_one_line(
    refused: Refused, toy_model: Path, redis_url: str, tmp_path: Path, redis_client: redis.Redis, stream: TraceStream
) -> None:
    source = ("traces", "record", "--model", toy_model, "--redis-url")
    assert "redis" in refused(*source, f"unix://{tmp_path}/no.sock", "--out", tmp_path / "a.rec").lower()
    assert "does not exist" in refused(*source, redis_url, "--out", tmp_path / "no" / "a.rec")
    (tmp_path / "text").write_text("hello")
    stream.append(b"not a trace", trace_id="broken")
    assert "not a recording" in refused(*source, redis_url, "--out", tmp_path / "text")
    assert "not a recording" in refused("traces", "info", tmp_path / "text")
    (out := tmp_path / "earlier.jsonl").write_text("{}\n")
    assert "cannot read" in refused("traces", "export", tmp_path / "missing", "--out", out)
    assert "is read, too" in refused("traces", "export", out, "--out", out)
    assert out.read_text() == "{}\n"


def test_a_stream_is_pruned_by_hours(
    stream: TraceStream, cli: Callable[..., str], redis_client: redis.Redis, redis_url: str, toy_model: Path
) -> None:
    key = RedisKeys(model_key=model_key(toy_model, target_fingerprint(toy_model))).traces
    for minutes in (90, 30):
        redis_client.xadd(key, {"payload": b""}, id=f"{now_ms() - 60_000 * minutes}-0")
    stream.append(b"", trace_id="young")
    words = ("traces", "prune", "--older-than-hours", 1, "--model", toy_model, "--redis-url", redis_url, "--json")
    assert json.loads(cli(*words)) == {"removed": {"stream": 1}}
    assert stream.lag().length == 2


def test_old_traces_are_pruned_from_recordings_and_the_stream(
    stream: TraceStream, filled: list[Trace], record: Callable[..., None], cli: Callable[..., str], redis_url: str,
    toy_model: Path, tmp_path: Path, refused: Refused,
) -> None:  # fmt: skip
    """In a recording by when they were made, in a stream by when they came there."""
    out = tmp_path / "out.rec"
    fingerprint = filled[0].header.target_fingerprint
    young = make_trace(50, trace_id="young", target_fingerprint=fingerprint, created_ms=now_ms())
    stream.append(encode_trace(young), trace_id="young")
    record(out)
    both = ("--model", toy_model, "--redis-url", redis_url, "--json")
    assert json.loads(cli("traces", "prune", out, "--older-than-hours", 1, *both)) == {
        "removed": {str(out): 6, "stream": 0}
    }
    assert ids_in(out) == ["young"]
    assert stream.lag().length == 7
    assert json.loads(cli("traces", "prune", "--older-than-hours", 1e-9, *both)) == {"removed": {"stream": 7}}
    assert (stream.lag().length, stream.lag().lost) == (0, 7)
    assert json.loads(cli("traces", "prune", "--older-than-hours", 1e-9, *both)) == {"removed": {"stream": 0}}
    assert "6 traces removed" not in cli("traces", "prune", out, "--older-than-hours", 1)
    assert "--older-than-hours" in refused("traces", "prune", out)
    assert "nothing to prune" in refused("traces", "prune", "--older-than-hours", 1)
