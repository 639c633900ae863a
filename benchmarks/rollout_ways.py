"""The ways of benchmarks/rollouts.py to answer groups, and local engines that are set from one to the next."""

from __future__ import annotations

import argparse
import contextlib
import copy
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter

from benchmarks.engines import engine_with
from serving.group_text import GroupSharing
from serving.local.config import LocalEngineConfig
from serving.local.engine import LocalEngine
from serving.metrics import GroupTextMetrics
from serving.rollout.division import Division, EngineCosts
from serving.rollout.order import ContextAware, Fifo
from serving.rollout.scheduler import Policy
from serving.rollout.work import GroupRequest
from speculator.embedded_redis import EmbeddedRedis
from speculator.group_store import GroupTexts
from speculator.model import Eagle3Draft
from speculator.planner import Plan, RoundPlanner
from speculator.redis_client import connect
from speculator.suffix import SuffixDrafter, SuffixRequest

LONGEST_PROMPT = 300


@dataclass(frozen=True, kw_only=True)
class Way:
    policy: Policy
    has_barrier: bool = False
    drafts: bool = True
    copies_prompts: bool = False
    is_grouped: bool = False
    uses_head: bool = False


def ways(chunk_tokens: int, costs: EngineCosts) -> dict[str, Way]:
    fifo = Policy(order=Fifo())
    aware = Policy(order=ContextAware(), division=Division(chunk_tokens=chunk_tokens, costs=costs))
    return {
        "plain": Way(policy=fifo, has_barrier=True, drafts=False),
        "fifo": Way(policy=fifo, has_barrier=True),
        "queue": Way(policy=fifo),
        "prompt_once": Way(policy=fifo, copies_prompts=True),
        "context_aware": Way(policy=aware, copies_prompts=True),
        "grouped": Way(policy=aware, copies_prompts=True, is_grouped=True),
        "everything": Way(policy=aware, copies_prompts=True, is_grouped=True, uses_head=True),
    }


def dealt_batches(groups: Sequence[GroupRequest], num_engines: int, slots: int) -> list[list[Sequence[GroupRequest]]]:
    """For each engine the batches that it answers one after another: whole groups, dealt to engines in turn, as many
    as fill the slots.
    """
    size = max(1, slots // len(groups[0].seeds))
    shares = [groups[number::num_engines] for number in range(num_engines)]
    return [[share[first : first + size] for first in range(0, len(share), size)] for share in shares]


class _Planner(RoundPlanner):
    """The engine's own, with or without the head."""

    uses_head = False

    def plan(
        self,
        domains: Sequence[str],
        num_keys: int,
        suffixes: Sequence[Sequence[float]],
        *,
        head_depth: int,
        unread: Sequence[int],
    ) -> Plan:
        depth = head_depth if self.uses_head else 0
        return super().plan(domains, num_keys, suffixes, head_depth=depth, unread=unread)

    @property
    def is_awake(self) -> bool:
        return self.uses_head and super().is_awake


class _OwnText(SuffixDrafter):
    """Every request proposes from its own text alone."""

    def start(self, prompt: Sequence[int], *, tenant: str, group_id: str = "", shared: bool = True) -> SuffixRequest:
        return super().start(prompt, tenant=tenant, shared=False)


@dataclass(frozen=True)
class Counts:
    """What verifications were offered and took."""

    verifications: int = 0
    proposed: int = 0
    accepted: int = 0
    from_head: int = 0
    """Of the proposed ones."""

    def since(self, before: Counts) -> Counts:
        return Counts(*(getattr(self, each.name) - getattr(before, each.name) for each in fields(self)))

    def to_dict(self) -> dict[str, float]:
        rounds = max(self.verifications, 1)
        return {
            "accepted_over_proposed": round(self.accepted / max(self.proposed, 1), 4),
            "tokens_a_verification": round(1 + self.accepted / rounds, 4),
            "accepted_a_verification": round(self.accepted / rounds, 4),
            "proposed_a_verification": round(self.proposed / rounds, 4),
            "from_head_over_proposed": round(self.from_head / max(self.proposed, 1), 4),
        }


@dataclass(frozen=True)
class Machine:
    """The engines, and how they are set from one rollout to the next."""

    engines: dict[str, LocalEngine]
    planners: list[_Planner]

    def prepare(self, way: Way) -> None:
        for engine, planner in zip(self.engines.values(), self.planners, strict=True):
            engine.set_depth(LocalEngineConfig.depth if way.drafts else 0)
            # Nothing runs: the engine's thread waits for a request.
            engine._loop.texts.drafter = SuffixDrafter() if way.is_grouped else _OwnText()
            planner.uses_head = way.uses_head

    def counts(self) -> Counts:
        """Of all engines since their start."""
        metrics = [engine.metrics for engine in self.engines.values()]
        return Counts(
            verifications=sum(_total(one.verifications) for one in metrics),
            proposed=sum(_total(one.proposed_tokens) for one in metrics),
            accepted=sum(_total(one.accepted) for one in metrics),
            from_head=sum(_total(one.proposed_tokens, source="head") for one in metrics),
        )


def _total(counter: Counter, **labels: str) -> int:
    samples = [sample for family in counter.collect() for sample in family.samples]
    return sum(
        int(sample.value)
        for sample in samples
        if sample.name.endswith("_total") and labels.items() <= sample.labels.items()
    )


@contextlib.contextmanager
def machine(model_dir: Path, draft: Eagle3Draft, arguments: argparse.Namespace, **wiring: Any) -> Iterator[Machine]:
    """As many engines as asked for; more than one share groups through a Redis of their own."""
    settings = {
        "num_slots": arguments.slots,
        "context_length": LONGEST_PROMPT + arguments.limit,
        "max_waiting": 1024,
        "control_share": 0.0,
        "capture": False,
        # Nobody waits for a stream here.
        "prefill_chunk": 256,
    }
    names = [f"engine-{number}" for number in range(arguments.engines)]
    planners = [_Planner(max_depth=LocalEngineConfig.max_depth) for _ in names]
    with contextlib.ExitStack() as opened:
        engines = {}
        sharing = _sharing(opened, arguments.engines, draft.config.vocab_size)
        for name, planner, shared in zip(names, planners, sharing, strict=True):
            one = engine_with(
                model_dir,
                copy.deepcopy(draft),
                arguments.threads,
                settings=settings,
                planner=planner,
                sharing=shared,
                **wiring,
            )
            engines[name] = opened.enter_context(one)
        yield Machine(engines, planners)


def _sharing(opened: contextlib.ExitStack, num_engines: int, vocab_size: int) -> list[GroupSharing | None]:
    if num_engines == 1:
        return [None]
    folder = opened.enter_context(tempfile.TemporaryDirectory())
    server = opened.enter_context(EmbeddedRedis(folder))
    found: list[GroupSharing | None] = []
    for _ in range(num_engines):
        texts = GroupTexts(opened.enter_context(connect(server.url)), "benchmark")
        shared = GroupSharing(texts, vocab_size=vocab_size, metrics=GroupTextMetrics(CollectorRegistry()))
        opened.callback(shared.close, timeout_s=5)
        found.append(shared)
    return found
