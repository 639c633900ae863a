"""A draft that knows the traffic, for benchmarks of what happens to it under load."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from speculator.checkpoint import target_fingerprint
from speculator.fresh import fresh_draft
from speculator.labels import draft_ids_by_target_id
from speculator.lineage import load_draft
from speculator.model import Eagle3Draft
from speculator.store import DraftStore
from speculator.trace import Trace
from trainer.batch import Example, cut, make_example, pack
from trainer.config import load_config
from trainer.step import Learner


def trained(model_dir: Path, traces: Sequence[Trace], num_steps: int) -> tuple[Eagle3Draft, list[Example]]:
    """A draft that has learnt these answers, and the answers as examples."""
    unused = {"redis_url": "", "model_key": "", "store_dir": Path(), "state_dir": Path()}
    config = load_config(model_dir=model_dir, seed=0, **unused)
    draft = fresh_draft(model_dir, draft_vocab_size=config.draft_vocab_size, seed=0)
    examples = as_examples(draft, traces)
    learner, rng = Learner(draft, config), random.Random(0)
    for _ in range(num_steps):
        windows = [cut(example, max_bases=config.max_bases, rng=rng) for example in rng.sample(examples, 2)]
        learner.step(pack(windows, max_context=config.max_context))
    return learner.averaged, examples


def as_examples(draft: Eagle3Draft, traces: Sequence[Trace]) -> list[Example]:
    draft_ids_V = draft_ids_by_target_id(draft.d2t, draft.config.vocab_size)
    return [make_example(trace, draft_ids_V, feature_width=draft.fc.in_features) for trace in traces]


def good_draft(
    store: Path | None, model_dir: Path, traces: Sequence[Trace], num_steps: int
) -> tuple[Eagle3Draft, list[Example]]:
    """The last good draft of a store, or one trained on these answers; and the answers as examples."""
    if store is None:
        return trained(model_dir, traces, num_steps)
    versions, fingerprint = DraftStore(store), target_fingerprint(model_dir)
    version = versions.lifecycle.last_good() or versions.latest() or 0
    embed = fresh_draft(model_dir, seed=0).embed
    draft = load_draft(versions, version, embed=embed, target_fingerprint=fingerprint)
    return draft, as_examples(draft, traces)
