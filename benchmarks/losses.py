"""Compare the trainer's losses: accept length after equal trained tokens, against the default loss.

    python -m benchmarks.losses [--quick] [--json FILE] [--prompts FILE.jsonl] [--traces FILE.rec] [--runs FILE.jsonl]
                                [--arms default null margin …] [--steps 150] [--seeds 3] [--first-seed 0]
                                [--temperature 0.8] [--drafts FOLDER] [--branch-share 0.1] [--store FOLDER]

The local engine answers real prompts, one domain after the other: without a draft, or with `--drafts` at whole chains
of the last good draft of that store. Or the traces are those of a recording (`slipstream traces record`). A draft of
every arm then learns from them in as many steps (slipstream/replay.py): a fresh one, or with `--store` the newest of
that store, which may have learnt for long. With the same seed all arms begin with the same weights, learn from the same
traces in the same order, and are scored on the same held-out answers.

So arms are compared in pairs, each with a 90% interval: seed by seed, by the accept length after the last step and by
its mean over the later half, which varies less; and trace by trace, as the gate compares two drafts. The first interval
is about other seeds, the second about other traces for these seeds. A gain is sure where both leave out 0.

The arm `null` is the default with its traces in another order: what it gains or loses is noise. Arms with `recorded` in
their names judge proposals of the drafts that served, and are refused where a recording has none; those with `fresh`
judge the likeliest proposals of the draft that learns. Arms of `branches` learn from rows behind rejections, and are
refused where a recording has none; with `--drafts`, `--branch-share` records those of a share of the rejected
proposals.

Target: the null arm's 90% interval by seed contains 0. With `--runs` each finished run is a line of that file at once,
and what the file holds already is not run again: remove it where the code or the trainer's settings have changed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.common.paired import (
    KeptRuns,
    Length,
    Runs,
    by_trace,
    gains,
    interval,
    last_length,
    later_length,
    lower_end,
)
from benchmarks.common.recorded_answers import RECORDING_DEFAULTS, add_recording_options, in_turn, recording
from benchmarks.common.report import Target, fill_in, finish, parser
from slipstream.models import resolve_model
from slipstream.replay import ReplayOptions, replay
from speculator.errors import ConfigError
from speculator.recording import RecordingReader
from speculator.trace import NO_DRAFT
from trainer.learning.losses.mix import DEFAULT_LOSS

DEFAULT, NULL = "default", "null"
_ENTROPY = "cross_entropy=1,step_discount=1"
ARMS = {
    DEFAULT: DEFAULT_LOSS,
    NULL: DEFAULT_LOSS,
    "cross_entropy": _ENTROPY,
    "forward_kl": "forward_kl=1,step_discount=1",
    "aurora_recorded": "aurora",
    "margin_fresh": f"{DEFAULT_LOSS},margin=0.3,verdicts=fresh",
    "margin_recorded": f"{DEFAULT_LOSS},margin=0.3",
    "discard_fresh": f"{DEFAULT_LOSS},discard=0.3,verdicts=fresh",
    "discard_recorded": f"{DEFAULT_LOSS},discard=0.3",
    "policy_gradient_fresh": f"{DEFAULT_LOSS},policy_gradient=0.3,verdicts=fresh",
    "policy_gradient_recorded": f"{DEFAULT_LOSS},policy_gradient=0.3",
    "lk_hybrid": "lk_hybrid=1,step_discount=1",
    "entropy_lk_hybrid": f"{_ENTROPY},lk_hybrid=1",
    "expected_length": f"{_ENTROPY},expected_length=1",
    "default_expected_length": f"{DEFAULT_LOSS},expected_length=0.5",
    "coupled": f"{_ENTROPY},coupled_acceptance=1",
    "branches_forward": f"{DEFAULT_LOSS},branch_forward_kl=1",
    "branches_reverse": "branches",
}
DEPTH = 4


def main() -> None:
    arguments = _arguments()
    model_dir = resolve_model(arguments.model)
    path = arguments.traces or _recorded(arguments, model_dir)
    arms = _usable(arguments.arms, path)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    # The engine that recorded has set its own number.
    torch.set_num_threads(1)
    began = "" if arguments.store is None else f" from {arguments.store.name}"

    def run(arm: str, seed: int) -> dict[str, Any]:
        options = ReplayOptions(
            recordings=[path],
            model_dir=model_dir,
            depths=range(1, DEPTH + 1),
            loss=ARMS[arm],
            num_steps=arguments.steps,
            seed=seed,
            order_seed=1000 + seed if arm == NULL else None,
            store=arguments.store,
        )
        return _kept(replay(options))

    about = f"{arguments.steps} steps{began}, {path.name}"
    kept = KeptRuns(arguments.runs, about)
    # Seeds are the outer loop, so that complete tables of fewer seeds exist early.
    runs = {(arm, seed): kept.run(f"{arm} seed {seed}", partial(run, arm, seed)) for seed in seeds for arm in arms}
    rows: list[tuple[str, object]] = [
        ("arm", f"last length by seed; gain over {DEFAULT}: by seed, by trace, of the later half by seed"),
        *((arm, _row(arm, runs, seeds)) for arm in arms),
    ]
    document = {
        "steps": arguments.steps,
        "seeds": list(seeds),
        "trained_tokens": runs[DEFAULT, seeds[0]]["trained_tokens"],
        "gains": {arm: _gains(arm, runs, seeds) for arm in arms if arm != DEFAULT},
        "runs": [{"arm": arm, "seed": seed, **each} for (arm, seed), each in runs.items()],
    }
    finish(rows, _targets(runs, arms, seeds), document, arguments.json)


def _kept(run: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a replay's document that the comparison reads, with trace ids cut to eight digits."""
    return {
        "accept_length": run["accept_length"],
        "trained_tokens": run["trained_tokens"],
        "curve": [{name: point[name] for name in ("step", "accept_length")} for point in run["curve"]],
        "held_out": {trace_id[:8]: scores for trace_id, scores in run["held_out"].items()},
        "seconds": run["seconds"],
    }


def _recorded(arguments: argparse.Namespace, model_dir: Path) -> Path:
    if not arguments.branch_share:
        return recording(arguments, model_dir, in_turn)
    if arguments.drafts is None:
        raise ConfigError("--branch-share needs a draft that proposes: give --drafts")
    return recording(arguments, model_dir, in_turn, engine={"branch_share": arguments.branch_share})


def _usable(arms: list[str], path: Path) -> list[str]:
    """The arms, `default` first. Raises ConfigError where the recording lacks data that an arm learns from."""
    judges = [arm for arm in arms if arm.endswith("_recorded")]
    branches = [arm for arm in arms if arm.startswith("branches_")]
    if judges or branches:
        with RecordingReader(path) as reader:
            found = [(bool((one.rounds.draft_version != NO_DRAFT).any()), one.num_branches) for one in reader.traces()]
        if judges and not any(of_draft for of_draft, _ in found):
            raise ConfigError(f"{path} has no proposals of a draft: leave out {', '.join(judges)}")
        if branches and not any(num for _, num in found):
            raise ConfigError(f"{path} has no rows behind rejections: leave out {', '.join(branches)}")
    return list(dict.fromkeys([DEFAULT, *arms]))


def _row(arm: str, runs: Runs, seeds: Sequence[int]) -> str:
    lengths = "  ".join(f"{last_length(runs[arm, seed]):.4f}" for seed in seeds)
    last, later = (interval(gains(arm, DEFAULT, runs, seeds, length)) for length in (last_length, later_length))
    found = by_trace(arm, DEFAULT, runs, seeds)
    bounds = "" if found.lower is None or found.upper is None else f" ({found.lower:+.2%} … {found.upper:+.2%})"
    return f"{lengths};  {last};  {found.change:+.2%}{bounds};  {later}"


def _gains(arm: str, runs: Runs, seeds: Sequence[int]) -> Mapping[str, Any]:
    lengths: dict[str, Length] = {"last": last_length, "later": later_length}
    by_seed = {
        name: [round(gain, 4) for gain in gains(arm, DEFAULT, runs, seeds, length)] for name, length in lengths.items()
    }
    return {**by_seed, "by_trace": msgspec.to_builtins(by_trace(arm, DEFAULT, runs, seeds))}


def _targets(runs: Runs, arms: list[str], seeds: Sequence[int]) -> list[Target]:
    if NULL not in arms or len(seeds) < 2:
        return []
    gained = gains(NULL, DEFAULT, runs, seeds, last_length)
    lost = [-gain for gain in gained]
    return [
        Target("surest gain of the null arm", lower_end(gained), 0.0, at_least=False),
        Target("surest loss of the null arm", lower_end(lost), 0.0, at_least=False),
    ]


def _arguments() -> argparse.Namespace:
    options = parser("Losses of the trainer on the same recorded traces")
    add_recording_options(options)
    options.add_argument("--temperature", type=float, default=0.0, help="of the answers that are recorded")
    options.add_argument("--runs", type=Path, metavar="FILE.jsonl", help="keep every run here, and go on from it")
    of_any = [arm for arm in ARMS if not arm.endswith("_recorded") and not arm.startswith("branches_")]
    options.add_argument("--arms", nargs="+", choices=ARMS, default=of_any)
    options.add_argument("--drafts", type=Path, metavar="FOLDER", help="a store whose draft serves while it records")
    options.add_argument("--store", type=Path, metavar="FOLDER", help="begin with its newest draft")
    options.add_argument("--branch-share", type=float, default=0.0, help="of the rejected rows, that are recorded")
    options.add_argument("--steps", type=int, help="optimiser steps of a run; default 150, quick 12")
    options.add_argument("--seeds", type=int, help="how many; default 3, quick 1")
    options.add_argument("--first-seed", type=int, default=0, help="the seeds are this one and those behind it")
    arguments = options.parse_args()
    fill_in(arguments, {**RECORDING_DEFAULTS, "steps": (12, 150), "seeds": (1, 3)})
    return arguments


if __name__ == "__main__":
    main()
