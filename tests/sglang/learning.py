"""A draft that learns from captured traces, in the test's own process."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import torch

from speculator.draft.checkpoint import draft_config_json, draft_state, read_target_tensor
from speculator.trace import Trace
from speculator.versions.lineage import admit, load_draft
from speculator.versions.store import DraftStore
from trainer.config import TrainerConfig
from trainer.learning.batch import cut, make_example, pack
from trainer.learning.labels import draft_ids_by_target_id
from trainer.learning.optimizer_step import Learner


def train_version(
    store: DraftStore, model_dir: Path, traces: Iterable[Trace], *, num_steps: int, parent: int = 1
) -> int:
    """Learn from traces for `num_steps` steps, starting at version `parent`, and store the result as a version."""
    torch.set_num_threads(1)
    embed = read_target_tensor(model_dir, "model.embed_tokens.weight")
    fingerprint = store.manifest(parent).target_fingerprint
    draft = load_draft(store, parent, embed=embed, target_fingerprint=fingerprint)
    config = TrainerConfig(
        model_dir=model_dir, redis_url="unused", model_key="unused", store_dir=store.root, state_dir=store.root
    )
    learner, rng = Learner(draft, config), random.Random(0)
    draft_ids_V = draft_ids_by_target_id(draft.d2t, draft.config.vocab_size)
    examples = [make_example(trace, draft_ids_V, feature_width=draft.fc.in_features) for trace in traces]
    for _ in range(num_steps):
        windows = [cut(example, max_bases=config.max_bases, rng=rng) for example in rng.sample(examples, 4)]
        assert learner.step(pack(windows, max_context=config.max_context)).applied
    manifest = store.write(
        draft_state(learner.averaged),
        draft_config_json(draft.config),
        parent=parent,
        target_fingerprint=fingerprint,
        info={"num_steps": num_steps},
    )
    admit(store, manifest.version, target_fingerprint=fingerprint, actor="test", reason="learnt")
    return manifest.version
