"""Start local engines for benchmarks, and get greedy answers from them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from serving.engine import GenerateRequest
from serving.local.config import LocalEngineConfig
from serving.local.engine import LocalEngine
from serving.local.target.model import Target as TargetModel
from serving.metrics import EngineMetrics
from serving.speedup import SpeedupMeter
from speculator.draft.checkpoint import target_fingerprint
from speculator.draft.eagle3 import Eagle3Draft
from speculator.draft.sampling_params import SamplingParams


@contextlib.contextmanager
def engine_with(
    model_dir: Path,
    draft: Eagle3Draft,
    threads: int,
    *,
    draft_version: int = 1,
    settings: Mapping[str, Any] | None = None,
    **wiring: Any,
) -> Iterator[LocalEngine]:
    """A running engine with this draft; `settings` are those of `LocalEngineConfig`."""
    config = LocalEngineConfig(model_dir=model_dir, model_name=model_dir.name, num_threads=threads, **(settings or {}))
    target = TargetModel(
        model_dir,
        num_slots=config.num_slots,
        context_length=config.context_length,
        cache_margin=config.cache_margin,
        dtype=getattr(torch, config.dtype),
    )
    engine = LocalEngine(
        config,
        target=target,
        draft=draft.to(target.embed.dtype),
        draft_version=draft_version,
        target_fingerprint=target_fingerprint(model_dir),
        metrics=EngineMetrics(CollectorRegistry()),
        meter=SpeedupMeter(),
        **{"load_draft": lambda _: {}, **wiring},
    )
    engine.start()
    # As in service: else a full garbage collection over all imported modules would fall into a timed part.
    gc.collect()
    gc.freeze()
    try:
        yield engine
    finally:
        gc.unfreeze()
        engine.stop()


def greedy(
    engine: LocalEngine, prompts: Sequence[Sequence[int]], max_tokens: int, *, ignore_eos: bool = True
) -> list[list[int]]:
    """Greedy tokens for every prompt, all prompts at the same time; by default `max_tokens` of each."""

    async def answer(row: int, prompt: Sequence[int]) -> list[int]:
        request = GenerateRequest(
            request_id=str(row),
            prompt_token_ids=tuple(prompt),
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=0),
            ignore_eos=ignore_eos,
        )
        return [token async for chunk in engine.generate(request) for token in chunk.token_ids]

    async def together() -> list[list[int]]:
        return await asyncio.gather(*(answer(row, prompt) for row, prompt in enumerate(prompts)))

    return asyncio.run(together())
