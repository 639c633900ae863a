"""Which norms of EAGLE-3.1 a fresh draft should have: acceptance after equal trained tokens, and what they cost.

    python -m benchmarks.eagle31 [--quick] [--json FILE] [--prompts FILE.jsonl] [--traces FILE.rec] [--runs FILE.jsonl]
                                 [--arms none fc_norm fc_norm+norm_output …] [--steps 150] [--seeds 3] …

The local engine answers real prompts, one domain after the other, greedily and without a draft. A fresh draft of every
arm then learns from that recording in the same steps (slipstream/replay.py). With the same seed all arms begin with the
same random weights, see the same traces in the same steps, and are scored on the same held-out answers, so they are
compared seed by seed: by the accept length after the last step, and by its mean over the later half of the steps, which
varies less.

What an arm costs is the time of one round of the draft in service: two pairs read, and a chain of four proposals behind
them. The arms take turns, round by round, and each round is compared with that of `none` in the same turn.

Targets: after the last step no arm is better than a fresh draft of `slipstream drafts init` by more than the seeds
differ (the lower end of the mean gain's 90% interval, by Student's t), and no arm's round takes more than 10% longer
than that of `none`.

With `--runs` each finished run is a line of that file at once, and what the file holds already is not run again: remove
it where the code, the recording or the trainer's settings have changed.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.answers import RECORDING_DEFAULTS, add_recording_options, in_turn, recording
from benchmarks.common.paired import Length, Runs, all_runs, gains, interval, last_length, later_length, lower_end
from benchmarks.common.report import Median, Target, fill_in, finish, parser
from serving.local.draft import Pairs, PairSpan, ServingDraft
from serving.local.request import DraftSource
from slipstream.models import resolve_model
from slipstream.replay import ReplayOptions, replay
from speculator.draft.checkpoint import SWITCHES, target_fingerprint
from speculator.draft.initialization import fresh_draft
from speculator.draft.sampling_params import SamplingParams
from speculator.proposals.planner import ChainRule
from speculator.versions.lineage import ensure_lineage
from speculator.versions.store import DraftStore

NONE = "none"
ARMS = tuple(
    "+".join(chosen) or NONE for count in range(len(SWITCHES) + 1) for chosen in itertools.combinations(SWITCHES, count)
)
DEPTH = 4
_CONTEXT = 300
"""Pairs that a timed round has before it."""


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    model_dir = resolve_model(arguments.model)
    path = arguments.traces or recording(arguments, model_dir, in_turn)
    runs = all_runs(
        arguments.runs,
        arguments.arms,
        range(arguments.seeds),
        about=f"{arguments.steps} steps, {path.name}",
        run=lambda arm, seed: learnt(arm, seed, path, model_dir, arguments.steps),
    )
    costs = round_costs(arguments.arms, model_dir, num_rounds=arguments.rounds)
    rows: list[tuple[str, object]] = [
        ("arm", f"last length by seed, its gain over {NONE}, that of the later half, a round's cost")
    ]
    rows += [(arm, _row(arm, runs, costs, arguments.seeds)) for arm in arguments.arms]
    finish(rows, _targets(runs, costs, model_dir, arguments), _document(runs, costs, arguments), arguments.json)


def learnt(arm: str, seed: int, path: Path, model_dir: Path, num_steps: int) -> dict[str, Any]:
    """The document of one replay that begins with a fresh draft of this arm."""
    with tempfile.TemporaryDirectory() as root:
        ensure_lineage(
            DraftStore(Path(root)), model_dir, target_fingerprint(model_dir), seed=seed, switches=switches_of(arm)
        )
        options = ReplayOptions(
            recordings=[path],
            model_dir=model_dir,
            depths=range(1, DEPTH + 1),
            num_steps=num_steps,
            seed=seed,
            store=Path(root),
        )
        return replay(options)


def switches_of(arm: str) -> list[str]:
    return [] if arm == NONE else arm.split("+")


@torch.inference_mode()
def round_costs(arms: Sequence[str], model_dir: Path, *, num_rounds: int) -> dict[str, Median]:
    """By arm, a round's time over that of `none` in the same turn."""
    drafts = {}
    for arm in arms:
        draft = fresh_draft(model_dir, seed=0, switches=switches_of(arm)).to(torch.bfloat16)
        drafts[arm] = ServingDraft(draft, 1, num_slots=1, length=_CONTEXT + 2 + DEPTH)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, _CONTEXT + 2, draft.fc.in_features, generator=generator).bfloat16()
    tokens = torch.randint(draft.config.vocab_size, (_CONTEXT + 2,), generator=generator).tolist()
    source = DraftSource(SamplingParams(temperature=0), 0)
    for serving in drafts.values():
        serving.read(Pairs(tokens[:_CONTEXT], [PairSpan(0, 0, _CONTEXT)], features))
    newest, rule = (
        Pairs(tokens[_CONTEXT:], [PairSpan(0, _CONTEXT, 2)], features),
        ChainRule([1.0] * DEPTH, [0.0] * DEPTH),
    )
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for number in range(num_rounds):
        # Whoever comes first in a turn finds the caches as another process has left them.
        first = number % len(arms)
        for arm in (*arms[first:], *arms[:first]):
            started_s = time.perf_counter()
            drafts[arm].propose(newest, [1.0], [source], rule)
            times[arm].append(time.perf_counter() - started_s)
    return {
        arm: Median.of([own / base for own, base in zip(times[arm], times[NONE], strict=True)], resamples=400)
        for arm in arms
    }


def _row(arm: str, runs: Runs, costs: Mapping[str, Median], num_seeds: int) -> str:
    lengths = "  ".join(f"{last_length(runs[arm, seed]):.4f}" for seed in range(num_seeds))
    gained = (gains(arm, NONE, runs, range(num_seeds), length) for length in (last_length, later_length))
    return "  ".join([lengths, *map(interval, gained), str(costs[arm])])


def _targets(runs: Runs, costs: Mapping[str, Median], model_dir: Path, arguments: argparse.Namespace) -> list[Target]:
    config = fresh_draft(model_dir).config
    default = "+".join(name for name in SWITCHES if getattr(config, name)) or NONE
    slowest = max(cost.value for cost in costs.values())
    targets = [Target("slowest round over that of none", slowest, 1.1, at_least=False)]
    others = [arm for arm in arguments.arms if arm != default]
    if default in arguments.arms and others and arguments.seeds > 1:
        ahead = max(lower_end(gains(arm, default, runs, range(arguments.seeds), last_length)) for arm in others)
        targets.append(Target(f"surest gain over {default}, the default", ahead, 0.0, at_least=False))
    return targets


def _document(runs: Runs, costs: Mapping[str, Median], arguments: argparse.Namespace) -> dict[str, Any]:
    lengths: dict[str, Length] = {"gain_last": last_length, "gain_later": later_length}
    return {
        "steps": arguments.steps,
        **{
            name: {
                arm: [round(gain, 4) for gain in gains(arm, NONE, runs, range(arguments.seeds), length)]
                for arm in arguments.arms
            }
            for name, length in lengths.items()
        },
        "round_cost": {arm: cost.to_dict() for arm, cost in costs.items()},
        "runs": [{"arm": arm, **run} for (arm, _), run in runs.items()],
    }


def _arguments() -> argparse.Namespace:
    options = parser("The norms of EAGLE-3.1 on the same recorded traces")
    add_recording_options(options)
    options.add_argument("--runs", type=Path, metavar="FILE.jsonl", help="keep every run here, and go on from it")
    options.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, help=f"{NONE} is always among them")
    options.add_argument("--steps", type=int, help="optimiser steps of a run; default 150, quick 12")
    options.add_argument("--seeds", type=int, help="seeds 0, 1, …; default 3, quick 1")
    options.add_argument("--rounds", type=int, help="timed rounds of each arm; default 2000, quick 200")
    arguments = options.parse_args()
    fill_in(arguments, {**RECORDING_DEFAULTS, "steps": (12, 150), "seeds": (1, 3), "rounds": (200, 2000)})
    arguments.arms = list(dict.fromkeys([NONE, *arguments.arms]))
    return arguments


if __name__ == "__main__":
    main()
