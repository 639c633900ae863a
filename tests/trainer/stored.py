"""Traces as the replay keeps them, without a model: texts, tenants and sizes as a test wants them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Any

import numpy as np

from tests.fixtures.drafts import CONFIG, make_draft
from tests.fixtures.traces import make_trace
from trainer.learning.batch import Example, make_example
from trainer.learning.labels import draft_ids_by_target_id
from trainer.replay.reservoirs import Provenance, Stored


@functools.cache
def _example(num_tokens: int) -> Example:
    draft, trace = make_draft(), make_trace(T=num_tokens, R=0)
    trace = dataclasses.replace(
        trace,
        token_ids=trace.token_ids % CONFIG.vocab_size,
        target_topk_ids=np.where(trace.target_topk_ids < 0, -1, trace.target_topk_ids % CONFIG.vocab_size),
        constrained=np.zeros(num_tokens, np.bool_),
    )
    draft_ids_V = draft_ids_by_target_id(draft.d2t, CONFIG.vocab_size)
    return make_example(trace, draft_ids_V, feature_width=draft.fc.in_features)


def stored_of(trace_id: str, *, num_tokens: int = 24, text: str | None = None, **provenance: Any) -> Stored:
    """A trace whose text, and prompt, is its id unless `text` says otherwise. Its tensors are those of every other of
    its length.
    """
    text_hash = hashlib.blake2b((text or trace_id).encode(), digest_size=16).digest()
    values: dict[str, Any] = {
        "tenant": "default",
        "request_id": trace_id,
        "domain": "",
        "created_ms": 0,
        "text_hash": text_hash,
        "prompt_hash": text_hash,
    }
    example = dataclasses.replace(_example(num_tokens), trace_id=trace_id)
    return Stored(example=example, provenance=Provenance(**values | provenance))
