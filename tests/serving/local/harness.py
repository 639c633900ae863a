"""A local engine on the toy target and on one thread, else as it ships, and a way to ask it for text."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from serving.engine import Chunk, GenerateRequest, WatchedRound
from serving.group_cache.sync import GroupSharing
from serving.local.config import DtypeName, LocalEngineConfig
from serving.local.engine import LocalEngine
from serving.local.scheduler.queue import Inbox
from serving.local.target.layers import Parents
from serving.local.target.model import Target
from serving.metrics import EngineMetrics
from serving.speedup import SpeedupMeter
from speculator.draft.checkpoint import draft_state
from speculator.draft.eagle3 import Eagle3Draft
from speculator.draft.sampling_params import SamplingParams
from speculator.proposals.planner import RoundPlanner
from speculator.trace import Trace
from tests.fixtures.decoding import FixedPlanner
from tests.fixtures.toy import random_draft

GREEDY = SamplingParams(temperature=0)


class Row(NamedTuple):
    """New tokens of a slot in one pass, and the position of the first."""

    slot: int
    start: int
    tokens: tuple[int, ...]

    def is_piece_of(self, prompt: Sequence[int]) -> bool:
        """Fewer than four tokens may be the same by chance."""
        return len(self.tokens) > 3 and self.tokens == tuple(prompt[self.start : self.start + len(self.tokens)])


class WatchedTarget(Target):
    """Notes the rows of every pass, behind which `on_pass` is called, on the engine's thread.

    With `any_rows` it takes rows of different length on every machine, and computes one after the other; with False on
    none; with None where the target does.
    """

    any_rows: bool | None = None

    def __init__(self, model_dir: Path, **settings: Any) -> None:
        super().__init__(model_dir, **{"num_slots": 4, "context_length": 256, "cache_margin": 17, **settings})
        self.passes: list[list[Row]] = []
        self.on_pass: Callable[[list[Row]], object] = lambda _: None

    @property
    def takes_windows(self) -> bool:
        return super().takes_windows if self.any_rows is None else self.any_rows

    def forward(
        self,
        rows: Sequence[Sequence[int]],
        *,
        first_slot: int,
        starts: Sequence[int],
        parents: Sequence[Parents] | None = None,
    ) -> tuple[Tensor, Tensor]:
        parents = parents or [None] * len(rows)
        slots = range(first_slot, first_slot + len(rows))
        self.passes.append([Row(*row) for row in zip(slots, starts, map(tuple, rows), strict=True)])
        if self.any_rows:
            each = [
                Target.forward(self, [row], first_slot=slot, starts=[start], parents=[of_row])
                for slot, row, start, of_row in zip(slots, rows, starts, parents, strict=True)
            ]
            hidden_Md, aux_Mw = (torch.cat(part) for part in zip(*each, strict=True))
        else:
            hidden_Md, aux_Mw = super().forward(rows, first_slot=first_slot, starts=starts, parents=parents)
        self.on_pass(self.passes[-1])
        return hidden_Md, aux_Mw

    def num_read(self, *prompts: Sequence[int]) -> int:
        """How many tokens of these prompts were read in passes, as often as they were."""
        rows = [row for of_pass in self.passes for row in of_pass]
        return sum(len(row.tokens) for row in rows if any(map(row.is_piece_of, prompts)))


def run_pass(
    target: Target,
    tokens_BT: Tensor,
    *,
    first_slot: int,
    starts: Sequence[int],
    parents: Sequence[Parents] | None = None,
) -> tuple[Tensor, Tensor]:
    """`Target.forward` for rows of equal length: [B, T, d] and [B, T, 3d]."""
    hidden_Md, aux_Mw = target.forward(tokens_BT.tolist(), first_slot=first_slot, starts=starts, parents=parents)
    return hidden_Md.view(*tokens_BT.shape, -1), aux_Mw.view(*tokens_BT.shape, -1)


def takes_branches(traces: Sequence[Trace]) -> bool:
    """Whether any round accepted a path of a tree that is not its first chain."""
    for trace in traces:
        rounds, first = trace.rounds, trace.header.first_position
        for position, tokens, count in zip(rounds.position, rounds.draft_tokens, rounds.num_accepted, strict=True):
            committed = trace.token_ids[position + 1 - first :][:count]
            if (committed != tokens[: len(committed)]).any():
                return True
    return False


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
    inbox: Inbox

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
    plain_share: float = 0.0,
    head_off_share: float = 0.0,
    slots: int = 4,
    context_length: int = 256,
    context_window: int = 20,
    suffix_depth: int = LocalEngineConfig.suffix_depth,
    branch_share: float = LocalEngineConfig.branch_share,
    on_round: Callable[[WatchedRound], object] | None = None,
    planner: RoundPlanner | None = None,
    sharing: GroupSharing | None = None,
    dtype: DtypeName = LocalEngineConfig.dtype,
    target: Target | None = None,
    on_trace: Callable[[Trace], object] = lambda _: None,
) -> Iterator[Harness]:
    """A running engine; stopped at the end of the block. A `target` is taken as it is, with as many slots. `on_trace`
    is called before a trace is kept.
    """
    config = LocalEngineConfig(
        model_dir=model_dir,
        model_name="toy",
        dtype=dtype,
        depth=depth,
        suffix_depth=suffix_depth,
        branch_share=branch_share,
        control_share=control_share,
        plain_share=plain_share,
        head_off_share=head_off_share,
        num_slots=slots,
        context_length=context_length,
        prefill_chunk=8,
        capture_topk=8,
        context_window=context_window,
        prompt_labels=12,
        num_threads=1,
    )
    target = target or Target(
        model_dir,
        num_slots=slots,
        context_length=context_length,
        cache_margin=config.cache_margin,
        dtype=getattr(torch, dtype),
    )
    drafts: dict[int, Eagle3Draft] = {}
    registry, inbox = CollectorRegistry(), Inbox(16)
    traces: list[Trace] = []
    draft = (draft or random_draft(model_dir, seed=1)).to(target.embed.dtype)
    meter = SpeedupMeter()

    def load_draft(version: int) -> dict[str, torch.Tensor]:
        return draft_state(drafts[version])

    def keep(trace: Trace) -> None:
        on_trace(trace)
        traces.append(trace)

    engine = LocalEngine(
        config,
        target=target,
        draft=draft,
        draft_version=1,
        target_fingerprint="toy",
        load_draft=load_draft,
        metrics=EngineMetrics(registry),
        meter=meter,
        on_trace=keep,
        on_round=on_round,
        planner=planner,
        sharing=sharing,
        inbox=inbox,
    )
    engine.start()
    try:
        yield Harness(engine, registry, traces, drafts, meter, inbox)
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
