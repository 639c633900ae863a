"""Shortcuts from traces to batches and trainer settings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speculator.draft.eagle3 import Eagle3Draft
from speculator.recording import RecordingHeader, RecordingWriter
from speculator.trace import Trace, encode_trace
from trainer.config import TrainerConfig
from trainer.learning.batch import Batch, Example, cut, make_example, pack
from trainer.learning.labels import draft_ids_by_target_id
from trainer.loop import Trainer
from trainer.release.gate import GateDecision, GateOutcome, accept_probabilities, expected_rounds
from trainer.statistics import AcceptanceCounts, Comparison


def example_of(trace: Trace, draft: Eagle3Draft) -> Example:
    draft_ids_V = draft_ids_by_target_id(draft.d2t, draft.config.vocab_size)
    return make_example(trace, draft_ids_V, feature_width=draft.fc.in_features)


def batch_of(traces: Sequence[Trace], draft: Eagle3Draft) -> Batch:
    windows = [cut(example_of(trace, draft), max_bases=512, rng=random.Random(0)) for trace in traces]
    return pack(windows, max_context=512)


def acceptance(draft: Eagle3Draft, traces: Sequence[Trace], *, depth: int) -> AcceptanceCounts:
    """Of greedy chains from every base on, those in the prompt included."""
    total = AcceptanceCounts()
    for trace in traces:
        accept_NK, labelled_N = accept_probabilities(
            draft, batch_of([trace], draft), depth=depth, verification="target_only"
        )
        total += expected_rounds(accept_NK, labelled_N, depth)
    return total


def config_for(model_dir: Path, folder: Path, **changes: Any) -> TrainerConfig:
    """Small, and everything is learnt from at once: what is held out is for tests of that."""
    values: dict[str, Any] = {
        "model_dir": model_dir,
        "redis_url": "redis://unused",
        "model_key": "toy",
        "store_dir": folder / "store",
        "state_dir": folder / "state",
        "draft_vocab_size": 40,
        "batch_tokens": 64,
        "learning_rate": 3e-3,
        "nice": 0,
        "holdout_share": 1e-9,
        "golden_traces": 0,
    }
    return TrainerConfig(**values | changes)


def record(path: Path, traces: Sequence[Trace]) -> Path:
    """A recording of these traces, as `slipstream traces record` writes it."""
    fingerprint = traces[0].header.target_fingerprint
    header = RecordingHeader(target_fingerprint=fingerprint, model="toy", created_ms=0)
    with RecordingWriter(path, header) as writer:
        for trace in traces:
            writer.append(encode_trace(trace), trace_id=trace.header.trace_id)
    return path


def promote(fresh: Comparison, golden: Comparison | None, *, incumbent: int, **_: float) -> GateDecision:
    """A gate that is open, for tests of what lies behind it: in place of `decide` of trainer/release/gate.py."""
    return GateDecision(outcome=GateOutcome.PROMOTE, reason="a test", incumbent=incumbent, fresh=fresh, golden=golden)


def metric(trainer: Trainer, name: str, **labels: str) -> float | None:
    return trainer.metrics.registry.get_sample_value(f"slipstream_trainer_{name}", labels)
