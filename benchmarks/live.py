"""A running local engine with a draft that knows the traffic, for benchmarks of what happens to it under load."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from serving.engine import GenerateRequest
from serving.local.config import LocalEngineConfig
from serving.local.engine import LocalEngine
from serving.local.target import Target as TargetModel
from serving.metrics import EngineMetrics
from serving.speedup import SpeedupMeter
from speculator.checkpoint import target_fingerprint
from speculator.fresh import fresh_draft
from speculator.labels import draft_ids_by_target_id
from speculator.lineage import load_draft
from speculator.model import Eagle3Draft
from speculator.sampling import SamplingParams
from speculator.store import DraftStore
from speculator.trace import Trace
from trainer.batch import Example, cut, make_example, pack
from trainer.config import load_config
from trainer.step import Learner


async def stream(
    engine: LocalEngine, request_id: str, prompt: Sequence[int], max_tokens: int
) -> AsyncIterator[tuple[int, ...]]:
    """The tokens of one greedy answer, chunk by chunk."""
    request = GenerateRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=0),
        ignore_eos=True,
    )
    async for chunk in engine.generate(request):
        yield chunk.token_ids


async def ask(engine: LocalEngine, request_id: str, prompt: Sequence[int], max_tokens: int) -> list[int]:
    return [token async for tokens in stream(engine, request_id, prompt, max_tokens) for token in tokens]


async def answers_of(engine: LocalEngine, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """All at the same time."""
    return await asyncio.gather(*(ask(engine, str(row), prompt, max_tokens) for row, prompt in enumerate(prompts)))


@contextlib.contextmanager
def engine_with(
    model_dir: Path, draft: Eagle3Draft, threads: int, *, settings: Mapping[str, Any] | None = None, **wiring: Any
) -> Iterator[LocalEngine]:
    """A running engine with this draft as version 1; `settings` are those of `LocalEngineConfig`."""
    config = LocalEngineConfig(model_dir=model_dir, model_name=model_dir.name, num_threads=threads, **(settings or {}))
    target = TargetModel(
        model_dir,
        num_slots=config.num_slots,
        context_length=config.context_length,
        cache_margin=config.max_depth + 1,
        dtype=getattr(torch, config.dtype),
    )
    engine = LocalEngine(
        config,
        target=target,
        draft=draft.to(target.embed.dtype),
        draft_version=1,
        target_fingerprint=target_fingerprint(model_dir),
        metrics=EngineMetrics(CollectorRegistry()),
        meter=SpeedupMeter(),
        **{"load_draft": lambda _: {}, **wiring},
    )
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


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
