"""What each of two processes does in test_ranks.py: `python -m tests.trainer.ranks MODEL FOLDER REDIS_URL PORT`.

Every process writes what it saw to FOLDER/<rank>.json, and weights beside it; the test compares. In the end they meet
once more, at PORT, and rank 1 is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
import torch
from prometheus_client import CollectorRegistry

from speculator.draft.initialization import fresh_draft
from speculator.errors import ConfigError, StoreError, StreamError
from speculator.redis.control_plane import machine_id
from speculator.redis.trace_stream import TraceStream
from speculator.trace import Trace, decode_trace
from speculator.versions.lifecycle import Lifecycle, VersionState
from speculator.versions.store import DraftStore
from tests.trainer.examples import batch_of, config_for, promote
from tests.trainer.reviewing import Pointer, accepted
from tests.trainer.stored import stored_of
from trainer.config import TrainerConfig
from trainer.learning.batch import Batch
from trainer.learning.optimizer_step import Learner
from trainer.loop import Trainer
from trainer.metrics import TrainerMetrics
from trainer.ranks import Ranks, join_ranks
from trainer.release.live_review import Review
from trainer.replay.reservoirs import Stored
from trainer.statistics import AcceptanceCounts
from trainer.throttle import Throttle

SHARES = (slice(0, 1), slice(1, 4))
"""The traces of each rank: very different counts of labels and verdicts."""
SETTINGS = {"autocast": False, "loss": "forward_kl=1,policy_gradient=0.3,discard=0.5,correction=cispo"}
NUM_STEPS = 3
KEYS = ("two-ranks", "one-that-hears-nothing", "one-that-became-two")


def new_learner(model_dir: Path, folder: Path, ranks: Ranks | None = None) -> Learner:
    config = config_for(model_dir, folder, **SETTINGS)
    return Learner(fresh_draft(model_dir, draft_vocab_size=40, seed=0), config, ranks)


def stream_config(model_dir: Path, folder: Path, redis_url: str, key: str) -> TrainerConfig:
    return config_for(
        model_dir, folder / key, redis_url=redis_url, model_key=key, max_waiting_traces=2, batch_tokens=200
    )


def read_traces(folder: Path) -> list[Trace]:
    return [decode_trace(path.read_bytes()) for path in sorted(folder.glob("*.trace"))]


def words(ranks: Ranks) -> dict[str, Any]:
    """Everything that `Ranks` says besides gradients."""
    own = ranks.rank

    def refuse() -> int:
        raise ConfigError("no")

    seen: dict[str, Any] = {
        "sum": ranks.sum([own + 1, 0.5]),
        "any": [ranks.any(own == 1), ranks.any(False)],
        "max": ranks.max(7 * own),
        "agree": [ranks.all_equal(1, 2.0), ranks.all_equal(own)],
        "gather": [part.decode() for part in ranks.gather(b"x" * 1000 if own else b"")],
        "lead": ranks.run_on_leader(lambda: 40 + own),
    }
    try:
        ranks.run_on_leader(refuse)
    except (ConfigError, StoreError) as error:
        seen["refused"] = type(error).__name__
    return seen


def unlabelled(batch: Batch) -> Batch:
    return dataclasses.replace(
        batch, labels=dataclasses.replace(batch.labels, labelled=torch.zeros_like(batch.labels.labelled))
    )


def uneven_steps(learner: Learner, batch: Batch, rank: int) -> dict[str, Any]:
    """Steps in which one rank has nothing to give, or harm."""
    spoilt = dataclasses.replace(batch, aux=torch.full_like(batch.aux, float("nan")))
    before = {name: tensor.clone() for name, tensor in learner.state().items()}
    bad = learner.step(spoilt if rank == 1 else batch)
    untouched = all(torch.equal(tensor, before[name]) for name, tensor in learner.state().items())
    return {
        "bad": dataclasses.asdict(bad),
        "untouched": untouched,
        "no_batch": dataclasses.asdict(learner.step(None if rank == 1 else batch)),
        "no_label": dataclasses.asdict(learner.step(unlabelled(batch) if rank == 0 else batch)),
        "nothing": dataclasses.asdict(learner.step(None)),
    }


def sums(trainer: Trainer) -> list[float]:
    return [float(weight.detach().double().sum()) for weight in trainer.learner.draft.parameters()]


def trainers(config: TrainerConfig, ranks: Ranks) -> dict[str, Any]:
    """Two traces each, one of which is bad on rank 1, through a real stream."""
    trainer = Trainer(config, CollectorRegistry(), ranks=ranks, decide=promote)
    trainer.read(block_ms=0)
    if ranks.rank == 1:
        trainer.replay.waiting[-1].example.aux.fill_(float("nan"))
    waiting = trainer.replay.num_waiting
    trainer.step()
    skipped = trainer.learner.num_steps
    kept = sorted(trainer.replay.members)
    trainer.step()
    steps = [skipped, trainer.learner.num_steps]
    trainer.checkpoint()
    trainer.ack()
    due = [trainer.candidates.due, trainer.checkpoint_due, trainer.has_work]
    trainer.publish()
    published = trainer.training.version
    weights = sums(trainer)
    if ranks.is_leader:
        for state in (VersionState.LIVE, VersionState.ROLLED_BACK):
            DraftStore(config.store_dir).lifecycle.move(published, state, actor="engine:0")
    trainer.restart_after_rollback()
    trainer.close()
    return {
        "waiting": waiting,
        "kept": kept,
        "steps": steps,
        "due": due,
        "version": published,
        "weights": weights,
        "fallen_back": {
            "version": trainer.training.version,
            "steps": trainer.learner.num_steps,
            "weights": sums(trainer),
        },
    }


def differ(config: TrainerConfig, ranks: Ranks) -> str:
    """One setting of rank 1 is another."""
    changes = {"learning_rate": 0.5} if ranks.rank == 1 else {"replay_max_bytes": 1 << 20}
    try:
        Trainer(config.model_copy(update=changes), CollectorRegistry(), ranks=ranks)
    except ConfigError as error:
        return str(error)
    return ""


def hears_nothing(config: TrainerConfig, ranks: Ranks) -> dict[str, Any]:
    """Redis is away for rank 1 from the start of the loop on; all traces come to rank 0."""
    trainer = Trainer(config, CollectorRegistry(), ranks=ranks)
    away = StreamError("away")
    names = ("read", "ack", "lag") if ranks.rank == 1 else ()
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(TraceStream, name, side_effect=away))
        for _ in range(4):
            trainer.read(block_ms=0)
            if trainer.has_work:
                trainer.step()
            trainer.checkpoint()
            trainer.ack()
    trainer.close()
    return {"steps": trainer.learner.num_steps, "weights": sums(trainer), "kept": sorted(trainer.replay.members)}


def became_two(config: TrainerConfig, ranks: Ranks) -> dict[str, Any]:
    """Go on from the checkpoint of one process."""
    trainer = Trainer(config, CollectorRegistry(), ranks=ranks)
    resumed, weights = trainer.learner.num_steps, sums(trainer)
    trainer.step()
    trainer.checkpoint()
    trainer.ack()
    trainer.close()
    return {"resumed": resumed, "weights": weights, "kept": sorted(trainer.replay.members)}


def left_alone(ranks: Ranks) -> dict[str, Any]:
    """Rank 1 is killed while rank 0 waits for it."""
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start_s = time.monotonic()
    try:
        ranks.any(True)
    except Exception as error:
        return {"error": type(error).__name__, "seconds": time.monotonic() - start_s}
    finally:
        ranks.close()
    return {}


def reviewed(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """A version that is ten per cent worse; traces come to both ranks, and to rank 1 fewer."""
    states, pointer, changes = Lifecycle(folder / "reviewed"), Pointer(), {1: 0.0, 2: -0.1}
    way = (VersionState.WRITTEN, VersionState.VALIDATED, VersionState.SCORED, VersionState.LIVE)
    for version, state in [*((1, one) for one in (*way, VersionState.PROMOTED)), *((2, one) for one in way)]:
        ranks.run_on_leader(partial(states.move, version, state, actor="engine:0"))
    turns, decoded, versions = itertools.count(), [], []

    def score(version: int, stored: Stored, _: TrainerConfig) -> AcceptanceCounts:
        decoded.append(stored.trace_id)
        return accepted(version, stored.trace_id, changes[version])

    review = Review(
        states,
        pointer,  # type: ignore[arg-type]
        config_for(folder, folder, review_traces=60),
        TrainerMetrics(CollectorRegistry()),
        ranks,
        load_draft=lambda version: version,  # type: ignore[arg-type,return-value]
        clock=lambda: float(next(turns)),
        score=score,  # type: ignore[arg-type]
    )
    for turn in range(30):
        review.take_turn()
        versions.append(review.version)
        if ranks.is_leader or turn % 2:
            review.arrived([stored_of(f"{ranks.rank}-{turn}")])
    return {"versions": versions, "decoded": len(decoded), "state": str(states.state(2)), "desired": pointer.version}


def rested(ranks: Ranks) -> float:
    """Seconds of a rest. Only rank 0 sees a busy engine, and only rank 1 is told to stop."""
    stop = threading.Event()
    if not ranks.is_leader:
        stop.set()
    reports = {"engine": {"machine": machine_id(), "busy": "1.0"}} if ranks.is_leader else {}
    throttle = Throttle(lambda: reports, ranks, TrainerMetrics(CollectorRegistry()), busy_share=0.5)
    start_s = time.monotonic()
    throttle.rest(0.3 if ranks.is_leader else 60.0, stop)
    return time.monotonic() - start_s


def main(model_dir: Path, folder: Path, redis_url: str, last_port: str) -> None:
    torch.set_num_threads(1)
    ranks = join_ranks(torch.device("cpu"))
    seen: dict[str, Any] = {"words": words(ranks)}
    learner = new_learner(model_dir, folder, ranks)
    batch = batch_of(read_traces(folder)[SHARES[ranks.rank]], learner.draft)
    seen["steps"] = [dataclasses.asdict(learner.step(batch)) for _ in range(NUM_STEPS)]
    safetensors.torch.save_file(learner.state(), folder / f"together-{ranks.rank}.safetensors")
    seen["uneven"] = uneven_steps(learner, batch, ranks.rank)
    safetensors.torch.save_file(learner.state(), folder / f"uneven-{ranks.rank}.safetensors")
    configs = {key: stream_config(model_dir, folder, redis_url, key) for key in KEYS}
    seen["differ"] = differ(configs[KEYS[0]], ranks)
    seen[KEYS[0]] = trainers(configs[KEYS[0]], ranks)
    seen[KEYS[1]] = hears_nothing(configs[KEYS[1]], ranks)
    seen[KEYS[2]] = became_two(configs[KEYS[2]], ranks)
    seen["reviewed"] = reviewed(folder, ranks)
    seen["rested"] = rested(ranks)
    ranks.close()
    seen["threads"] = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    report = folder / f"{ranks.rank}.json"
    report.write_text(json.dumps(seen))
    os.environ["MASTER_PORT"] = last_port
    seen["left_alone"] = left_alone(join_ranks(torch.device("cpu")))
    report.write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
