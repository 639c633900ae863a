"""A local engine on the toy target and on one thread, else as it ships, and a way to ask it for text."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from serving.engine import Chunk, GenerateRequest, WatchedRound
from serving.group_cache.sync import GroupSharing
from serving.local.config import DtypeName, LocalEngineConfig
from serving.local.engine import LocalEngine
from serving.local.target.model import Target
from serving.metrics import EngineMetrics
from serving.speedup import SpeedupMeter
from speculator.draft.eagle3 import Eagle3Draft
from speculator.draft.sampling_params import SamplingParams
from speculator.proposals.planner import RoundPlanner
from speculator.trace import Trace
from tests.fixtures.decoding import FixedPlanner
from tests.fixtures.toy import random_draft

GREEDY = SamplingParams(temperature=0)


@dataclass
class Answer:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_accepted: int = 0
    finish_reason: str | None = None
    chunks: list[Chunk] = field(default_factory=list)


@dataclass
class Harness:
    engine: LocalEngine
    registry: CollectorRegistry
    traces: list[Trace]
    drafts: dict[int, Eagle3Draft]
    """Versions that `install_draft` can load."""
    meter: SpeedupMeter

    def request(self, prompt: str, **changes: object) -> GenerateRequest:
        values: dict[str, object] = {"request_id": prompt, "max_tokens": 40, "sampling": GREEDY, "ignore_eos": True}
        tokens = tuple(self.engine.tokenizer.encode(prompt))
        return GenerateRequest(prompt_token_ids=tokens, **{**values, **changes})  # type: ignore[arg-type]

    def ask(self, *requests: GenerateRequest, on_chunk: Callable[[int, Chunk], None] = lambda *_: None) -> list[Answer]:
        """Answer all requests at the same time; `on_chunk(index, chunk)` runs as each chunk arrives."""

        async def one(index: int, request: GenerateRequest) -> Answer:
            answer = Answer()
            async with contextlib.aclosing(self.engine.generate(request)) as chunks:
                async for chunk in chunks:
                    answer.chunks.append(chunk)
                    answer.text += chunk.text
                    answer.token_ids += chunk.token_ids
                    answer.num_accepted += chunk.num_accepted
                    answer.finish_reason = chunk.finish_reason
                    on_chunk(index, chunk)
            return answer

        async def all_of_them() -> list[Answer]:
            return await asyncio.gather(*(one(*row) for row in enumerate(requests)))

        return asyncio.run(all_of_them())

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


@contextlib.contextmanager
def toy_engine(
    model_dir: Path,
    *,
    draft: Eagle3Draft | None = None,
    depth: int = LocalEngineConfig.depth,
    control_share: float = 0.0,
    head_off_share: float = 0.0,
    slots: int = 4,
    suffix_depth: int = LocalEngineConfig.suffix_depth,
    on_round: Callable[[WatchedRound], object] | None = None,
    planner: RoundPlanner | None = None,
    sharing: GroupSharing | None = None,
    dtype: DtypeName = LocalEngineConfig.dtype,
    target: Target | None = None,
) -> Iterator[Harness]:
    """A running engine; stopped at the end of the block. A `target` is taken as it is, with as many slots."""
    config = LocalEngineConfig(
        model_dir=model_dir,
        model_name="toy",
        dtype=dtype,
        depth=depth,
        suffix_depth=suffix_depth,
        control_share=control_share,
        head_off_share=head_off_share,
        num_slots=slots,
        context_length=256,
        prefill_chunk=8,
        max_waiting=16,
        capture_topk=8,
        context_window=20,
        prompt_labels=12,
        num_threads=1,
    )
    target = target or Target(
        model_dir,
        num_slots=slots,
        context_length=256,
        cache_margin=config.cache_margin,
        dtype=getattr(torch, dtype),
    )
    drafts: dict[int, Eagle3Draft] = {}
    registry, traces = CollectorRegistry(), []
    draft = (draft or random_draft(model_dir, seed=1)).to(target.embed.dtype)
    meter = SpeedupMeter()

    def load_draft(version: int) -> dict[str, torch.Tensor]:
        from speculator.draft.checkpoint import draft_state

        return draft_state(drafts[version])

    engine = LocalEngine(
        config,
        target=target,
        draft=draft,
        draft_version=1,
        target_fingerprint="toy",
        load_draft=load_draft,
        metrics=EngineMetrics(registry),
        meter=meter,
        on_trace=traces.append,
        on_round=on_round,
        planner=planner,
        sharing=sharing,
    )
    engine.start()
    try:
        yield Harness(engine, registry, traces, drafts, meter)
    finally:
        engine.stop()


def fixed_engine(
    model_dir: Path, *, min_confidence: float = 0.0, **changes: Any
) -> contextlib.AbstractContextManager[Harness]:
    """A `toy_engine` whose rounds are the same in every run: in float64, the head's chains alone, up to three tokens,
    while it thinks that they are reached and accepted with this probability.
    """
    fixed = {"depth": 3, "suffix_depth": 0, "dtype": "float64", "planner": FixedPlanner(min_confidence)}
    return toy_engine(model_dir, **{**fixed, **changes})
