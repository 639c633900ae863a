"""Train or load drafts for benchmarks, and add versions to a store without the gate."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from speculator.draft.checkpoint import draft_config_json, draft_state, target_fingerprint
from speculator.draft.eagle3 import Eagle3Draft
from speculator.draft.initialization import fresh_draft
from speculator.trace import Trace
from speculator.versions.lineage import admit, begin, load_draft
from speculator.versions.store import DraftStore, Manifest
from trainer.config import load_config
from trainer.learning.batch import Example, cut, make_example, pack
from trainer.learning.labels import draft_ids_by_target_id
from trainer.learning.optimizer_step import Learner


def trained(model_dir: Path, traces: Sequence[Trace], num_steps: int) -> Eagle3Draft:
    """Train a fresh draft on these answers with the trainer's own step."""
    unused = {"redis_url": "", "model_key": "", "store_dir": Path(), "state_dir": Path()}
    config = load_config(model_dir=model_dir, seed=0, **unused)
    draft = fresh_draft(model_dir, draft_vocab_size=config.draft_vocab_size, seed=0)
    examples = as_examples(draft, traces)
    learner, rng = Learner(draft, config), random.Random(0)
    for _ in range(num_steps):
        windows = [cut(example, max_bases=config.max_bases, rng=rng) for example in rng.sample(examples, 2)]
        learner.step(pack(windows, max_context=config.max_context))
    return learner.averaged


def as_examples(draft: Eagle3Draft, traces: Sequence[Trace]) -> list[Example]:
    """The traces as training examples for this draft."""
    draft_ids_V = draft_ids_by_target_id(draft.d2t, draft.config.vocab_size)
    return [make_example(trace, draft_ids_V, feature_width=draft.fc.in_features) for trace in traces]


def last_good(root: Path, model_dir: Path) -> Eagle3Draft:
    """Load the last good draft of a store, or its newest one where none is promoted."""
    store, version = DraftStore(root), last_good_manifest(root).version
    embed = fresh_draft(model_dir, seed=0).embed
    return load_draft(store, version, embed=embed, target_fingerprint=target_fingerprint(model_dir))


def last_good_manifest(root: Path) -> Manifest:
    """Manifest of the version that `last_good` loads."""
    store = DraftStore(root)
    return store.manifest(store.lifecycle.last_good() or store.latest() or 0)


def add_version(store: DraftStore, state: Mapping[str, Tensor], like: Eagle3Draft, fingerprint: str) -> int:
    """Add a version with these tensors and the config of `like` to a store; it may be published."""
    version = store.write(
        dict(state),
        draft_config_json(like.config),
        parent=store.latest(),
        target_fingerprint=fingerprint,
        info={"origin": "benchmark"},
    ).version
    admit(store, version, target_fingerprint=fingerprint, actor="benchmark", reason="benchmark")
    return version


def add_first(store: DraftStore, draft: Eagle3Draft, fingerprint: str) -> int:
    """Add the first version of a store; it is promoted at once, since there is none to compare it with."""
    version = add_version(store, draft_state(draft), draft, fingerprint)
    begin(store, version, target_fingerprint=fingerprint)
    return version
