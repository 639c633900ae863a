"""A disk that is really full, a small tmpfs, under each thing that writes: Redis, the draft store, the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from serving.capture.recorder import TraceRecorder
from speculator.draft.checkpoint import draft_config_json, draft_state
from speculator.errors import StoreError, StreamError
from speculator.redis.client import connect
from speculator.redis.embedded import EmbeddedRedis
from speculator.redis.trace_stream import TraceStream
from speculator.versions.lifecycle import VersionState
from speculator.versions.store import DraftStore
from tests.fixtures.faults import filled, small_disk
from tests.fixtures.toy import make_toy_model, random_draft
from tests.fixtures.traces import make_trace
from tests.fixtures.waiting import wait_until
from trainer.checkpoint import Progress, load_checkpoint, save_checkpoint


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 8 << 20) as is_small:
        if not is_small:
            pytest.skip("no tmpfs may be mounted here")
        yield tmp_path / "disk"


def test_redis_on_a_full_disk_gets_every_trace_when_there_is_room(disk: Path) -> None:
    with EmbeddedRedis(disk / "redis") as server, connect(server.url) as client:
        stream = TraceStream(client, "m", max_bytes=1 << 20)
        recorder = TraceRecorder(stream, max_buffer_bytes=1 << 20)
        recorder.submit(make_trace(trace_id="before"))
        wait_until(lambda: recorder.stats().appended == 1 and stream.lag().undelivered == 1)
        with filled(disk):
            with pytest.raises(StreamError, match="cannot write to its disk: free some space"):  # noqa: PT012
                while True:  # until its buffer is flushed, it does not know
                    stream.append(bytes(5000), trace_id="too much")
            for number in range(3):
                assert recorder.submit(make_trace(trace_id=f"meanwhile-{number}"))
            assert stream.lag().appended >= 1, "what is there can be read"
            assert recorder.stats().pending == 3
        wait_until(lambda: recorder.stats().appended == 4)
        recorder.close(20)
        trace_ids = [entry.trace_id for entry in stream.read(1000, 0)]
        assert [name for name in trace_ids if name != "too much"] == ["before", *(f"meanwhile-{n}" for n in range(3))]
        lag = stream.lag()
        assert (lag.lost, lag.appended) == (0, len(trace_ids))


def test_a_draft_that_does_not_fit_harms_no_other(disk: Path, tmp_path: Path) -> None:
    draft = random_draft(make_toy_model(tmp_path / "toy"), seed=0)
    store = DraftStore(disk / "drafts")

    def write() -> int:
        weights, config = draft_state(draft), draft_config_json(draft.config)
        return store.write(weights, config, parent=None, target_fingerprint="f" * 64, info={}).version

    assert write() == 1
    with filled(disk):
        with pytest.raises(StoreError, match="No space left"):
            write()
        store.load(1)
        assert store.versions() == [1]
    assert [path.name for path in (disk / "drafts" / "versions").iterdir()] == ["000001"]
    assert write() == 2
    assert store.lifecycle.states() == {1: VersionState.WRITTEN, 2: VersionState.WRITTEN}


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(disk: Path) -> None:
    def save(num_traces: int, num_values: int) -> None:
        progress = Progress(
            target_fingerprint="f", learnt_tokens=0, new_tokens=0, num_traces=num_traces, used_trace_ids=["a"]
        )
        save_checkpoint(disk / "state", {"weights": torch.zeros(num_values)}, progress)

    save(1, 1000)
    with filled(disk), pytest.raises(StoreError, match="free some space there"):
        save(2, 100_000)
    loaded = load_checkpoint(disk / "state")
    assert loaded is not None
    assert loaded[1].num_traces == 1
    save(3, 100_000)
    loaded = load_checkpoint(disk / "state")
    assert loaded is not None
    assert loaded[1].num_traces == 3
