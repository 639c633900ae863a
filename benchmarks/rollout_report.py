"""What benchmarks/rollouts.py measured, as a table, figures and targets."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from benchmarks.common import Spread, Target, finish
from benchmarks.rollout_driver import Rollout
from benchmarks.rollout_ways import Counts
from benchmarks.suffix import Answer, Replay, replay
from serving.rollout.work import GroupRequest
from speculator.suffix import SuffixConfig


@dataclass
class Measured:
    rollouts: list[Rollout] = field(default_factory=list)
    counts: list[Counts] = field(default_factory=list)


def answers_of(rollout: Rollout, groups: Sequence[GroupRequest]) -> list[Answer]:
    """The samples that have something to replay, group by group."""
    prompts = {group.group_id: group for group in groups}
    return [
        Answer(
            workload="group",
            prompt=list(prompts[sample.group_id].prompt_token_ids),
            tokens=tokens,
            limit=prompts[sample.group_id].max_tokens,
            group=sample.group_id,
        )
        for sample, tokens in rollout.texts.items()
        if len(tokens) > 1
    ]


def replays(answers: Sequence[Answer], slots: int) -> dict[str, Replay]:
    """The answers once more, with all proposals of at most 8 tokens."""
    return {
        "ungrouped": replay(answers, SuffixConfig(), shared=False, at_once=slots)["group"],
        "tenants_window": replay(answers, SuffixConfig(), grouped=False, at_once=slots)["group"],
        "grouped": replay(answers, SuffixConfig(), at_once=slots)["group"],
    }


def report(found: dict[str, Measured], replayed: dict[str, Replay], arguments: argparse.Namespace) -> None:
    base = found["fifo"].rollouts
    first = base[0]
    lengths = sorted(map(len, first.texts.values()))
    num_cut = sum(length == arguments.limit for length in lengths)
    rows: list[tuple[str, object]] = [
        (
            f"{len(lengths)} samples, {first.num_tokens} tokens",
            f"median {statistics.median(lengths):.0f}, {num_cut} at the limit of {arguments.limit}",
        ),
        ("", "wall s, token/s, ÷ fifo by wall (least … most) and by CPU time, tail s"),
    ]
    document: dict[str, Any] = {"arguments": {name: str(value) for name, value in vars(arguments).items()}}
    for name, measured in found.items():
        figures = _figures(measured, base)
        document[name] = figures
        wall, tail = figures["wall_s"]["median"], figures["tail_s"]["median"]
        rate, over, by_cpu = (figures[key] for key in ("tokens_a_second", "over_fifo", "over_fifo_by_cpu"))
        ratios = f"{over['median']:.2f} × ({over['min']:.2f} … {over['max']:.2f})   {by_cpu['median']:.2f} ×"
        rows.append((name, f"{wall:7.1f} {rate['median']:7.0f}   {ratios}   {tail:6.1f}"))
    rows.append(("", "accepted ÷ proposed, tokens, accepted and proposals a verification"))
    for name, measured in found.items():
        if sum(count.verifications for count in measured.counts):
            rows.append((f"acceptance, {name}", _acceptance(document[name]["acceptance"])))
    for name, one in replayed.items():
        document[f"replayed_{name}"] = one.to_dict()
        rows.append((f"all proposals, {name}", one))
    finish(rows, _targets(document), document, arguments.json)


def _targets(document: dict[str, Any]) -> list[Target]:
    """Of the ways that were run."""
    targets = []
    if "everything" in document:
        over_fifo = document["everything"]["over_fifo"]["median"]
        targets.append(Target("everything_over_fifo", over_fifo, 1.4))
        if "plain" in document:
            targets.append(Target("everything_over_plain", over_fifo / document["plain"]["over_fifo"]["median"], 1.4))
    ungrouped = "context_aware" if "context_aware" in document else "fifo"
    if "grouped" in document:
        accepted, before = (document[name]["acceptance"]["accepted_a_verification"] for name in ("grouped", ungrouped))
        targets.append(Target(f"grouped_over_{ungrouped}_accepted_a_verification", accepted / max(before, 1e-9), 1.2))
    return targets


def _figures(measured: Measured, base: Sequence[Rollout]) -> dict[str, Any]:
    """Ratios are of time a token, turn by turn: batches of another size round otherwise, so a few texts differ."""
    pairs = list(zip(measured.rollouts, base, strict=False))
    wall = [other.wall_s / other.num_tokens * one.num_tokens / one.wall_s for one, other in pairs]
    cpu = [other.cpu_s / other.num_tokens * one.num_tokens / one.cpu_s for one, other in pairs]
    same = [sum(text == base[0].texts[key] for key, text in one.texts.items()) for one in measured.rollouts]
    totals = [sum(getattr(one, each.name) for one in measured.counts) for each in fields(Counts)]
    return {
        "wall_s": Spread.of([one.wall_s for one in measured.rollouts]).to_dict(),
        "cpu_s": Spread.of([one.cpu_s for one in measured.rollouts]).to_dict(),
        "tail_s": Spread.of([one.tail_s for one in measured.rollouts]).to_dict(),
        "tokens_a_second": Spread.of([one.num_tokens / one.wall_s for one in measured.rollouts]).to_dict(),
        "over_fifo": Spread.of(wall).to_dict(),
        "over_fifo_by_cpu": Spread.of(cpu).to_dict(),
        "same_texts_as_fifo": same[0] / len(base[0].texts),
        "leases": measured.rollouts[0].num_leases,
        "acceptance": Counts(*totals).to_dict(),
    }


def _acceptance(figures: dict[str, float]) -> str:
    return (
        f"{figures['accepted_over_proposed']:6.1%}   {figures['tokens_a_verification']:.3f}   "
        f"{figures['accepted_a_verification']:.3f}   {figures['proposed_a_verification']:.3f}   "
        f"(of the head {figures['from_head_over_proposed']:.0%})"
    )
