"""Groups of rollouts on real local engines: what each technique of serving/rollout/ and of grouped drafting earns.

    python -m benchmarks.rollouts [--quick] [--json FILE] [--prompts FILE.jsonl] [--slots 16] [--engines 1] …

16 prompts with 8 samples each, at `--temperature` and top-p 1, to a limit that some of them reach. The real scheduler
says what runs where; the same engine, with the same weights and the same warm cost model, answers in all ways in turn:

    plain            batches of groups that fill the slots, in order, each as long as its longest sample; no drafting
    fifo             the same, with suffix drafts from each sample's own text
    queue            … without the barrier: a slot that is free takes the next sample
    prompt_once      … and samples of a group copy what another has read of their prompt
    context_aware    … and one probe of each group first, then the longest expected; samples in chunks
    grouped          … and suffix drafts from the whole group
    everything       … and the learned head, as the planner decides; trained here on other prompts (`--head`)

`fifo`, `queue` and `everything` are repeated after all the others while there is time. Wall clock is of the whole
rollout; CPU time is of this process, in which nothing else runs. Several engines, one thread each, share the text of
groups through a Redis of their own; batches are dealt to them in turn. They are threads of one process, and wait for
its interpreter: to use all cores, give one engine more `--threads`.

A batch of `plain` or `fifo` ends with its longest sample: so generate static batches, as TRL's `generate` does. An
engine that fills its slots again has no such barrier, and is the second row to compare with. `plain` is the baseline of
the papers, which does not draft; `fifo` drafts already, though not from the group, and is the stricter one.

Acceptance: accepted proposals over verified ones; tokens a verification, the bonus included; accepted a verification.
The planner verifies as many proposals as pay, more of better ones, so the same is also said of all proposals there are
(at most 8), by replaying the answers (benchmarks/suffix.py).

Targets: everything at least 1.4 × as fast as fifo, and as plain; grouped drafting accepts at least 1.2 × as many
proposals a verification as ungrouped.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from benchmarks.common import fill_in, parser, pick_prompts
from benchmarks.live import trained
from benchmarks.rollout_driver import Setting, Share, drive
from benchmarks.rollout_model import Costs
from benchmarks.rollout_report import Measured, answers_of, replays, report
from benchmarks.rollout_sim import TABLE
from benchmarks.rollout_ways import LONGEST_PROMPT, Machine, dealt_batches, machine, ways
from serving.local.text import LocalTokenizer
from serving.rollout.order import Fifo
from serving.rollout.scheduler import Policy
from serving.rollout.work import GroupRequest
from slipstream.models import resolve_model
from speculator.checkpoint import apply_state, draft_state
from speculator.errors import ConfigError
from speculator.fresh import fresh_draft
from speculator.model import Eagle3Draft
from speculator.sampling import SamplingParams
from speculator.trace import Trace

TAUGHT_TOKENS = 256
NEEDED = ("fifo", "everything", "context_aware", "grouped")
REPEATED = ("fifo", "queue", "everything")


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
    """A head that has learnt one sample of each of these, or that of `--head`."""
    draft, path = fresh_draft(model_dir, seed=0), arguments.head
    if path is not None and path.exists():
        apply_state(draft, safetensors.torch.load_file(path))
        return draft
    traces: list[Trace] = []
    most = min(TAUGHT_TOKENS, arguments.limit)
    ones = [replace(one, seeds=one.seeds[:1], max_tokens=most) for one in groups]
    with machine(model_dir, draft, arguments, on_trace=traces.append) as recorder:
        recorder.prepare(ways(arguments.chunk, Costs.read(TABLE))["plain"])
        share = Share(engines=recorder.engines, batches=[ones])
        drive([share], Policy(order=Fifo()), _setting("taught", arguments, names_groups=False))
    draft, _ = trained(model_dir, traces, arguments.train_steps)
    if path is not None:
        safetensors.torch.save_file(draft_state(draft), path)
    return draft


def _setting(name: str, arguments: argparse.Namespace, *, names_groups: bool) -> Setting:
    sampling = SamplingParams(temperature=arguments.temperature, top_p=1.0)
    return Setting(sampling=sampling, tenant=name, names_groups=names_groups, slots=arguments.slots)


def measure(machine: Machine, groups: Sequence[GroupRequest], arguments: argparse.Namespace) -> dict[str, Measured]:
    """Every way once, those of the targets first, and those of REPEATED again, in turn from either end; with `--ways`
    these alone, in their order. What the minutes do not allow for is left out, but not NEEDED, or fifo of `--ways`.
    """
    all_ways = ways(arguments.chunk, Costs.read(TABLE))
    names = arguments.ways or [*NEEDED, *(name for name in all_ways if name not in NEEDED)]
    repeated = arguments.ways or REPEATED
    order = [*names, *(name for turn in range(1, arguments.repeats) for name in repeated[:: (-1) ** turn])]
    needed = {"fifo"} if arguments.ways else set(NEEDED)
    dealt = dealt_batches(groups, arguments.engines, arguments.slots)
    apart = [
        Share(engines={name: engine}, batches=batches)
        for (name, engine), batches in zip(machine.engines.items(), dealt, strict=True)
    ]
    together = [Share(engines=machine.engines, batches=[groups])]
    found: dict[str, Measured] = {}
    started_s = time.monotonic()
    for number, name in enumerate(order):
        if time.monotonic() - started_s > 60 * arguments.minutes and found.keys() >= needed:
            break
        way, before = all_ways[name], machine.counts()
        machine.prepare(way)
        setting = _setting(f"{name} {number}", arguments, names_groups=way.copies_prompts)
        rollout = drive(apart if way.has_barrier else together, way.policy, setting)
        measured = found.setdefault(name, Measured())
        measured.rollouts.append(rollout)
        measured.counts.append(machine.counts().since(before))
        accepted = measured.counts[-1].to_dict()["accepted_a_verification"]
        times = f"{rollout.wall_s:.1f} s, CPU {rollout.cpu_s:.1f} s, tail {rollout.tail_s:.1f} s"
        print(f"{name}: {rollout.num_tokens} tokens in {times}, {accepted:.3f} accepted a verification", flush=True)
    return {name: found[name] for name in all_ways if name in found}


def options() -> argparse.ArgumentParser:
    found = parser("Groups of rollouts on local engines, by technique")
    found.add_argument("--engines", type=int, default=1, help="several share text through a Redis of their own")
    found.add_argument("--threads", type=int, default=1, help="of each engine")
    found.add_argument("--ways", nargs="+", metavar="WAY", choices=list(ways(1, Costs.read(TABLE))), help="these alone")
    found.add_argument("--slots", type=int, help="samples that an engine decodes together; default 16, quick 8")
    found.add_argument("--groups", type=int, help="default 16, quick 4")
    found.add_argument("--group-size", type=int, default=8)
    found.add_argument("--temperature", type=float, default=1.0, help="above 0; top-p is 1")
    found.add_argument("--limit", type=int, help="most tokens of a sample; default 256, quick 64")
    found.add_argument("--chunk", type=int, default=128, help="tokens of a chunk")
    found.add_argument("--repeats", type=int, help="of the main ways; default 2, quick 1")
    found.add_argument("--minutes", type=float, help="after which no rollout begins; default 9, quick 2")
    found.add_argument("--taught", type=int, help="prompts that the head learns from; default 16, quick 4")
    found.add_argument(
        "--answers", type=Path, metavar="FILE.jsonl", help="keep those of fifo (benchmarks.rollout_bounds)"
    )
    found.add_argument("--head", type=Path, metavar="FILE.safetensors", help="read the head from here, or keep it here")
    found.add_argument("--train-steps", type=int, help="of the head; default 30, quick 4")
    return found


def main() -> None:
    arguments = options().parse_args()
    if arguments.ways is not None and "fifo" not in arguments.ways:
        raise ConfigError("--ways are compared with fifo: name it too")
    defaults = {"slots": (8, 16), "groups": (4, 16), "limit": (64, 256), "repeats": (1, 2), "minutes": (2, 9)}
    fill_in(arguments, {**defaults, "taught": (4, 16), "train_steps": (4, 30)})
    torch.set_num_threads(arguments.threads)
    model_dir = resolve_model(arguments.model)
    all_ways = ways(arguments.chunk, Costs.read(TABLE))
    groups, taught = requests(arguments, LocalTokenizer(model_dir))
    draft = learnt(model_dir, taught, arguments)
    with machine(model_dir, draft, arguments) as ready:
        warm_up = [replace(group, max_tokens=min(64, arguments.limit)) for group in taught[:4]]
        for name in ("plain", "everything"):
            ready.prepare(all_ways[name])
            setting = _setting(f"warm {name}", arguments, names_groups=False)
            drive([Share(engines=ready.engines, batches=[warm_up])], Policy(order=Fifo()), setting)
        found = measure(ready, groups, arguments)
    answers = answers_of(found["fifo"].rollouts[0], groups)
    if arguments.answers is not None:
        arguments.answers.write_text("".join(json.dumps(asdict(answer)) + "\n" for answer in answers))
    report(found, replays(answers, arguments.slots), arguments)


if __name__ == "__main__":
    main()
