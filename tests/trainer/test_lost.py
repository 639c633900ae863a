"""What docs/how-to/kubernetes.md promises of a deployment that has lost its Redis, its store or the trainer's disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import redis
import torch

from speculator.draft.checkpoint import target_fingerprint
from speculator.errors import StoreError
from speculator.redis.control_plane import DraftPointer
from speculator.redis.trace_stream import TraceStream
from speculator.trace import Trace
from speculator.versions.lineage import ensure_lineage
from speculator.versions.store import DraftStore
from tests.fixtures.traces import send
from tests.trainer.examples import promote
from tests.trainer.trainers import MakeTrainer
from trainer.loop import Trainer

HOW: dict[str, Any] = {"decide": promote, "publish_interval_s": 0.0, "publish_min_tokens": 1}


@pytest.fixture
def published(start: MakeTrainer, stream: TraceStream, traces: list[Trace]) -> Trainer:
    """A trainer that has learnt from four traces, published version 2, and ended."""
    send(stream, traces[:4])
    trainer = start(**HOW)
    _learn_and_publish(trainer)
    trainer.close()
    return trainer


def _learn_and_publish(trainer: Trainer) -> None:
    trainer.read(block_ms=0)
    for _ in range(6):
        trainer.step()
    trainer.publish()
    trainer.checkpoint()
    trainer.ack()


def test_an_empty_redis_is_filled_again(
    published: Trainer, start: MakeTrainer, stream: TraceStream, traces: list[Trace], redis_client: redis.Redis
) -> None:
    pointer = DraftPointer(redis_client, "toy")
    assert pointer.desired() == 2
    redis_client.flushall()
    assert pointer.desired() is None
    trainer = start(**HOW)
    send(stream, traces[4:])
    _learn_and_publish(trainer)
    assert pointer.desired() == 3, "engines follow it again"
    assert stream.lag().acked == len(traces[4:])
    trainer.close()


def test_an_empty_store_is_filled_with_what_the_checkpoint_learnt(
    published: Trainer, start: MakeTrainer, stream: TraceStream, traces: list[Trace], model_dir: Path, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "store")
    store = DraftStore(tmp_path / "store")
    # As `slipstream drafts init --if-missing` does; its draft is of the same vocabulary.
    assert ensure_lineage(store, model_dir, target_fingerprint(model_dir), draft_vocab_size=40) == 1
    trainer = start(**HOW)
    assert trainer.training.version == 1
    learnt, found = published.learner.draft.fc.weight, trainer.learner.draft.fc.weight
    assert torch.equal(learnt, found)
    assert not torch.equal(found.bfloat16(), store.load(1)["fc.weight"])
    send(stream, traces[4:])
    _learn_and_publish(trainer)
    assert store.versions() == [1, 2], "numbers begin anew"
    trainer.close()


def test_a_store_that_is_not_mounted_is_not_begun_anew(
    published: Trainer, start: MakeTrainer, redis_client: redis.Redis, tmp_path: Path
) -> None:
    """Its second version would move engines, which have the store, back to the second one there."""
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    (tmp_path / "store").mkdir()
    with pytest.raises(StoreError, match="descends from version 2 of it: mount it"):
        start(**HOW)
    assert not list((tmp_path / "store").iterdir())
    (tmp_path / "store").rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / "store")
    trainer = start(**HOW)
    assert trainer.training.version == DraftPointer(redis_client, "toy").desired() == 2
    trainer.close()


def test_without_its_own_volume_the_trainer_goes_on_from_the_store(
    published: Trainer, start: MakeTrainer, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "state")
    newest = DraftStore(tmp_path / "store").lifecycle.newest_servable()
    assert newest == 2
    trainer = start(**HOW)
    assert trainer.training.version == newest
    weights = DraftStore(tmp_path / "store").load(newest)
    assert torch.equal(trainer.learner.draft.fc.weight.bfloat16(), weights["fc.weight"])
    assert trainer.learner.num_steps == 0
    trainer.close()
