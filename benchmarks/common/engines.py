"""Running local engines for benchmarks, and greedy answers from them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
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
from speculator.lineage import load_draft
from speculator.model import Eagle3Draft
from speculator.sampling import SamplingParams
from speculator.store import DraftStore


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


async def answers_of(engine: LocalEngine, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """All at the same time."""
    return await asyncio.gather(*(ask(engine, str(row), prompt, max_tokens) for row, prompt in enumerate(prompts)))


def add_target_options(options: argparse.ArgumentParser) -> None:
    """What `target_settings` reads."""
    for flag in ("--compile-target", "--int8-target"):
        options.add_argument(flag, action="store_true", help="the engine's, as `slipstream serve` has it")


def target_settings(arguments: argparse.Namespace) -> dict[str, bool]:
    """Settings of `LocalEngineConfig`."""
    return {"compile_target": arguments.compile_target, "int8_target": arguments.int8_target}


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
        cache_margin=config.cache_margin,
        dtype=getattr(torch, config.dtype),
        compile_threads=config.num_threads if config.compile_target else None,
        int8=config.int8_target,
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
    # As in service, or a full collection walks all that was imported while something is timed.
    gc.collect()
    gc.freeze()
    try:
        yield engine
    finally:
        gc.unfreeze()
        engine.stop()


@contextlib.contextmanager
def local_engine(
    model_dir: Path,
    *,
    depth: int,
    num_threads: int,
    store: Path | None = None,
    **settings: Any,
) -> Iterator[LocalEngine]:
    """A running bfloat16 engine with the newest draft of `store`, or a fresh one; capture and control share off."""
    draft = fresh_draft(model_dir, seed=0)
    if store is not None:
        versions, fingerprint = DraftStore(store), target_fingerprint(model_dir)
        draft = load_draft(versions, versions.latest() or 0, embed=draft.embed, target_fingerprint=fingerprint)
    with engine_with(
        model_dir, draft, num_threads, settings={"depth": depth, "control_share": 0.0, **settings}
    ) as engine:
        yield engine


def greedy(engine: LocalEngine, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """`max_tokens` greedy tokens for every prompt, all prompts at the same time."""
    return asyncio.run(answers_of(engine, prompts, max_tokens))
