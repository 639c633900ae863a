"""Groups of rollouts on real local engines: what each technique of serving/rollout/ and of grouped drafting earns.

    python -m benchmarks.rollouts [--quick] [--json FILE] [--prompts FILE.jsonl] [--slots 16] [--engines 1] …

16 prompts with 8 samples each, at temperature 1 and top-p 1, to a limit that some of them reach. The real scheduler
says what runs where; the same engine, with the same weights and the same warm cost model, answers in all ways in turn:

    plain            batches of groups that fill the slots, in order, each as long as its longest sample; no drafting
    fifo             the same, with suffix drafts from each sample's own text
    queue            … without the barrier: a slot that is free takes the next sample
    prompt_once      … and samples of a group copy what another has read of their prompt
    context_aware    … and one probe of each group first, then the longest expected; samples in chunks
    grouped          … and suffix drafts from the whole group
    everything       … and the learned head, as the planner decides; trained here on other prompts

`fifo`, `queue` and `everything` are repeated after all the others while there is time. Wall clock is of the whole
rollout; CPU time is of this process, in which nothing else runs. With several engines, one thread each, they share the
text of groups through a Redis of their own.

A batch of `fifo` ends with its longest sample: so generate static batches, as TRL's `generate` does. An engine that
fills its slots again has no such barrier, and is the second row to compare with.

Acceptance: accepted proposals over verified ones; tokens a verification, the bonus included; accepted a verification.
The planner verifies as many proposals as pay, more of better ones, so the same is also said of all proposals there are
(at most 8), by replaying the answers (benchmarks/suffix.py).

Targets: everything at least 1.4 × as fast as fifo; grouped drafting accepts at least 1.2 × as many proposals a
verification as ungrouped.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter

from benchmarks.common import Spread, Target, fill_in, finish, parser, pick_prompts
from benchmarks.engines import engine_with
from benchmarks.live import trained
from benchmarks.rollout_driver import Rollout, Setting, drive
from benchmarks.suffix import Answer, Replay, replay
from serving.group_text import GroupSharing
from serving.local.config import LocalEngineConfig
from serving.local.engine import LocalEngine
from serving.local.text import LocalTokenizer
from serving.metrics import GroupTextMetrics
from serving.rollout.division import Division
from serving.rollout.order import ContextAware, Fifo
from serving.rollout.scheduler import Policy
from serving.rollout.work import GroupRequest
from slipstream.models import resolve_model
from speculator.embedded_redis import EmbeddedRedis
from speculator.fresh import fresh_draft
from speculator.group_store import GroupTexts
from speculator.model import Eagle3Draft
from speculator.planner import Plan, RoundPlanner
from speculator.redis_client import connect
from speculator.sampling import SamplingParams
from speculator.suffix import SuffixConfig, SuffixDrafter, SuffixRequest
from speculator.trace import Trace

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0)
LONGEST_PROMPT = 300
TAUGHT_TOKENS = 128
NEEDED = ("fifo", "everything", "context_aware", "grouped")
REPEATED = ("fifo", "queue", "everything")


@dataclass(frozen=True, kw_only=True)
class Way:
    policy: Policy
    has_barrier: bool = False
    drafts: bool = True
    copies_prompts: bool = False
    is_grouped: bool = False
    uses_head: bool = False


def ways(chunk_tokens: int) -> dict[str, Way]:
    fifo = Policy(order=Fifo())
    aware = Policy(order=ContextAware(), division=Division(chunk_tokens=chunk_tokens))
    return {
        "plain": Way(policy=fifo, has_barrier=True, drafts=False),
        "fifo": Way(policy=fifo, has_barrier=True),
        "queue": Way(policy=fifo),
        "prompt_once": Way(policy=fifo, copies_prompts=True),
        "context_aware": Way(policy=aware, copies_prompts=True),
        "grouped": Way(policy=aware, copies_prompts=True, is_grouped=True),
        "everything": Way(policy=aware, copies_prompts=True, is_grouped=True, uses_head=True),
    }


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
            engine._suffixes = SuffixDrafter() if way.is_grouped else _OwnText()
            planner.uses_head = way.uses_head

    def counts(self) -> Counts:
        """Of all engines since their start."""
        metrics = [engine.metrics for engine in self.engines.values()]
        return Counts(
            verifications=sum(_total(one.verifications) for one in metrics),
            proposed=sum(_total(one.proposals) for one in metrics),
            accepted=sum(_total(one.accepted) for one in metrics),
            from_head=sum(_total(one.proposals, source="head") for one in metrics),
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


def requests(arguments: argparse.Namespace, tokenizer: Any) -> tuple[list[GroupRequest], list[GroupRequest]]:
    """The groups, and those that the head learns from."""
    asked: list[tuple[int, ...]] = []
    for prompt in pick_prompts(arguments.prompts, 8 * (arguments.groups + arguments.taught)):
        tokens = tuple(tokenizer.encode_chat([{"role": "user", "content": prompt.text}]))
        if len(tokens) <= LONGEST_PROMPT and tokens not in asked:
            asked.append(tokens)
    found = [
        GroupRequest(
            group_id=str(number),
            prompt_token_ids=tokens,
            seeds=tuple(1000 * number + index for index in range(arguments.group_size)),
            max_tokens=arguments.limit,
        )
        for number, tokens in enumerate(asked[: arguments.groups + arguments.taught])
    ]
    return found[: arguments.groups], found[arguments.groups :]


def learnt(model_dir: Path, groups: Sequence[GroupRequest], arguments: argparse.Namespace) -> Eagle3Draft:
    """A head that has learnt one sample of each of these."""
    traces: list[Trace] = []
    most = min(TAUGHT_TOKENS, arguments.limit)
    first, ones = fresh_draft(model_dir, seed=0), [replace(one, seeds=one.seeds[:1], max_tokens=most) for one in groups]
    with machine(model_dir, first, arguments, on_trace=traces.append) as recorder:
        recorder.prepare(ways(arguments.chunk)["plain"])
        drive(recorder.engines, [ones], Policy(order=Fifo()), _setting("taught", arguments, names_groups=False))
    draft, _ = trained(model_dir, traces, arguments.train_steps)
    return draft


def _setting(name: str, arguments: argparse.Namespace, *, names_groups: bool) -> Setting:
    return Setting(sampling=SAMPLING, tenant=name, names_groups=names_groups, slots=arguments.slots)


@dataclass
class Measured:
    rollouts: list[Rollout] = field(default_factory=list)
    counts: list[Counts] = field(default_factory=list)


def measure(machine: Machine, groups: Sequence[GroupRequest], arguments: argparse.Namespace) -> dict[str, Measured]:
    """Every way once, those of the targets first, and those of REPEATED again, in turn from either end.

    What the minutes do not allow for is left out.
    """
    all_ways = ways(arguments.chunk)
    order = sorted(all_ways, key=lambda name: name not in NEEDED)
    order += [name for turn in range(1, arguments.repeats) for name in REPEATED[:: (-1) ** turn]]
    batch = max(1, arguments.slots * arguments.engines // arguments.group_size)
    batches = [groups[first : first + batch] for first in range(0, len(groups), batch)]
    found: dict[str, Measured] = {}
    started_s = time.monotonic()
    for number, name in enumerate(order):
        if time.monotonic() - started_s > 60 * arguments.minutes and found.keys() >= set(NEEDED):
            break
        way, before = all_ways[name], machine.counts()
        machine.prepare(way)
        setting = _setting(f"{name} {number}", arguments, names_groups=way.copies_prompts)
        rollout = drive(machine.engines, batches if way.has_barrier else [groups], way.policy, setting)
        measured = found.setdefault(name, Measured())
        measured.rollouts.append(rollout)
        measured.counts.append(machine.counts().since(before))
        print(f"{name}: {rollout.num_tokens} tokens in {rollout.wall_s:.1f} s, CPU {rollout.cpu_s:.1f} s", flush=True)
    return {name: found[name] for name in all_ways if name in found}


def replays(rollout: Rollout, groups: Sequence[GroupRequest], slots: int) -> dict[str, Replay]:
    """The answers once more, with all proposals of at most 8 tokens."""
    prompts = {group.group_id: group for group in groups}
    answers = [
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
    return {
        "ungrouped": replay(answers, SuffixConfig(), shared=False, at_once=slots)["group"],
        "tenants_window": replay(answers, SuffixConfig(), grouped=False, at_once=slots)["group"],
        "grouped": replay(answers, SuffixConfig(), at_once=slots)["group"],
    }


def options() -> argparse.ArgumentParser:
    found = parser("Groups of rollouts on local engines, by technique")
    found.add_argument("--engines", type=int, default=1, help="several share text through a Redis of their own")
    found.add_argument("--threads", type=int, default=1, help="of each engine")
    found.add_argument("--slots", type=int, help="samples that an engine decodes together; default 16, quick 8")
    found.add_argument("--groups", type=int, help="default 16, quick 4")
    found.add_argument("--group-size", type=int, default=8)
    found.add_argument("--limit", type=int, help="most tokens of a sample; default 256, quick 64")
    found.add_argument("--chunk", type=int, default=128, help="tokens of a chunk")
    found.add_argument("--repeats", type=int, help="of the main ways; default 2, quick 1")
    found.add_argument("--minutes", type=float, help="after which no rollout begins; default 9, quick 2")
    found.add_argument("--taught", type=int, help="prompts that the head learns from; default 16, quick 4")
    found.add_argument("--train-steps", type=int, help="of the head; default 30, quick 4")
    return found


def main() -> None:
    arguments = options().parse_args()
    defaults = {"slots": (8, 16), "groups": (4, 16), "limit": (64, 256), "repeats": (1, 2), "minutes": (2, 9)}
    fill_in(arguments, {**defaults, "taught": (4, 16), "train_steps": (4, 30)})
    torch.set_num_threads(arguments.threads)
    model_dir = resolve_model(arguments.model)
    groups, taught = requests(arguments, LocalTokenizer(model_dir))
    draft = learnt(model_dir, taught, arguments)
    with machine(model_dir, draft, arguments) as ready:
        warm_up = [replace(group, max_tokens=min(64, arguments.limit)) for group in taught[:4]]
        for name in ("plain", "everything"):
            ready.prepare(ways(arguments.chunk)[name])
            drive(
                ready.engines, [warm_up], Policy(order=Fifo()), _setting(f"warm {name}", arguments, names_groups=False)
            )
        found = measure(ready, groups, arguments)
    _finish(found, replays(found["fifo"].rollouts[0], groups, arguments.slots), arguments)


def _finish(found: dict[str, Measured], replayed: dict[str, Replay], arguments: argparse.Namespace) -> None:
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
    everything = document["everything"]["over_fifo"]["median"]
    grouped, ungrouped = (
        document[name]["acceptance"]["accepted_a_verification"] for name in ("grouped", "context_aware")
    )
    targets = [
        Target("everything_over_fifo", everything, 1.4),
        Target("grouped_over_ungrouped_accepted_a_verification", grouped / max(ungrouped, 1e-9), 1.2),
    ]
    finish(rows, targets, document, arguments.json)


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


if __name__ == "__main__":
    main()
