"""Local engines for benchmarks: one call builds a running one, one call asks it for greedy text."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

from serving.engine import CapturePolicy, GenerateRequest
from serving.local.config import LocalEngineConfig
from serving.local.engine import LocalEngine
from serving.local.target import Target
from serving.metrics import EngineMetrics
from serving.speedup import SpeedupMeter
from speculator.checkpoint import target_fingerprint
from speculator.fresh import fresh_draft
from speculator.lineage import load_draft
from speculator.sampling import SamplingParams
from speculator.store import DraftStore


@contextlib.contextmanager
def local_engine(model_dir: Path, *, depth: int, num_threads: int, store: Path | None = None) -> Iterator[LocalEngine]:
    """A running bfloat16 engine with the newest draft of `store`, or a fresh one; capture and control share off."""
    config = LocalEngineConfig(
        model_dir=model_dir, model_name=model_dir.name, depth=depth, control_share=0.0, num_threads=num_threads
    )
    target = Target(
        model_dir, num_slots=config.num_slots, context_length=config.context_length, cache_margin=config.max_depth + 1
    )
    fingerprint = target_fingerprint(model_dir)
    if store is None:
        version, draft = 1, fresh_draft(model_dir, seed=0).to(torch.bfloat16)
    else:
        version = DraftStore(store).latest() or 0
        loaded = load_draft(DraftStore(store), version, embed=target.embed, target_fingerprint=fingerprint)
        draft = loaded.to(target.embed.dtype)
    engine = LocalEngine(
        config,
        target=target,
        draft=draft,
        draft_version=version,
        target_fingerprint=fingerprint,
        load_draft=lambda _: {},
        metrics=EngineMetrics(CollectorRegistry()),
        meter=SpeedupMeter(),
    )
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def greedy(engine: LocalEngine, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """`max_tokens` greedy tokens for every prompt, all prompts at the same time."""

    async def one(index: int, prompt: Sequence[int]) -> list[int]:
        request = GenerateRequest(
            request_id=str(index),
            prompt_token_ids=tuple(prompt),
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=0),
            ignore_eos=True,
            policy=CapturePolicy(capture=False),
        )
        return [token async for chunk in engine.generate(request) for token in chunk.token_ids]

    async def everyone() -> list[list[int]]:
        return await asyncio.gather(*(one(*row) for row in enumerate(prompts)))

    return asyncio.run(everyone())
