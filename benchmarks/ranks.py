"""Two trainer processes under `torchrun` beside one, and what becomes of traces where ranks are killed.

    python -m benchmarks.ranks [--quick] [--json FILE] [--prompts FILE.jsonl] [--kills 24] [--seed 0] …

Curves: real answers are recorded once; one process, two, and two of which each keeps half (`sharded`) learn the same
batches in the same order, the two half of each batch by each rank. Losses are those of the whole batch, so the curves
are to be the same: in float32 up to the order of sums, and as the service multiplies, in bfloat16, up to its rounding.

Kills: `slipstream train` on a toy target under `torchrun --max-restarts`, two processes, then one, then two that keep
half each, on one checkpoint, while a producer appends traces, one in twenty of them damaged. Ranks are killed with
SIGKILL: as they start, as a checkpoint is being written, or at any moment. Between two numbers of processes torchrun
itself is killed. Each trace that Redis has confirmed must be in one account in the end (benchmarks/faults/accounts.py),
and none may be used by two durable steps.

Targets: curves within --tolerance, nothing lost, nothing used twice, nothing waiting.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch

from benchmarks.common import Spread, Target, fill_in, finish, parser
from benchmarks.faults.ranks import Outcome, run_kills
from benchmarks.rank import CurveOptions
from benchmarks.resident import SERVICE_ENV
from benchmarks.workloads import RecordOptions, recorded
from slipstream.models import cache_root, resolve_model
from slipstream.topics import built_in_prompts, read_prompts

DRAFT_VOCAB = 8192
SETUPS = {"1 process": (1, False), "2 processes": (2, False), "2 processes, sharded": (2, True)}
PRECISIONS = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """What one setup saw in one precision."""

    loss: list[float]
    accept_length: list[float]
    tokens_per_s: float
    kept_bytes: int

    def difference(self, other: Curve) -> float:
        """Largest of any point, relative to the other's loss there."""
        return max(abs(mine - theirs) / theirs for mine, theirs in zip(self.loss, other.loss, strict=True))


def learn(recording: Path, arguments: argparse.Namespace, folder: Path) -> dict[str, dict[str, Curve]]:
    """By setup and precision."""
    found: dict[str, dict[str, Curve]] = {}
    for index, (name, (num_processes, sharded)) in enumerate(SETUPS.items()):
        print(f"learning {arguments.steps} steps twice: {name}", flush=True)
        options = CurveOptions(
            recording=str(recording),
            model_dir=str(resolve_model(arguments.model)),
            num_steps=arguments.steps,
            answers_per_step=arguments.answers_per_step,
            draft_vocab_size=DRAFT_VOCAB,
            sharded=sharded,
            out=str(folder / f"{index}.json"),
        )
        path = folder / f"{index}.options"
        path.write_bytes(msgspec.json.encode(options))
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if num_processes > 1 else []
        subprocess.run(
            [sys.executable, *launcher, "-m", "benchmarks.rank", "curve", path],
            env={**os.environ, **SERVICE_ENV},
            check=True,
        )
        seen = json.loads(Path(options.out).read_text())
        found[name] = {precision: Curve(**seen[precision]) for precision in PRECISIONS}
    return found


def weight_difference(folder: Path, setup: int) -> float:
    """Of the float32 weights in the end from those of one process: the norm of the difference over the norm."""
    one, other = (safetensors.torch.load_file(folder / f"{index}.float32.safetensors") for index in (0, setup))
    names = [name for name in one if name.startswith("average.")]
    squares = sum(float((other[name] - one[name]).double().square().sum()) for name in names)
    return (squares / sum(float(one[name].double().square().sum()) for name in names)) ** 0.5


def curve_rows(curves: dict[str, dict[str, Curve]]) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = []
    for precision in PRECISIONS:
        alone = curves["1 process"][precision]
        at = sorted({round(share * (len(alone.loss) - 1)) for share in (0, 0.05, 0.1, 0.25, 0.5, 0.75, 1)})
        rows.append((f"{precision}: loss at step", "  ".join(f"{step + 1:>8}" for step in at)))
        for name, by_precision in curves.items():
            curve = by_precision[precision]
            points = "  ".join(f"{curve.loss[step]:8.4f}" for step in at)
            rows.append((f"  {name}", f"{points}   {curve.tokens_per_s:6.0f} token/s"))
            if curve is not alone:
                rows.append(("    differs by at most", f"{curve.difference(alone):.2e}"))
    return rows


def main() -> None:
    arguments = _arguments()
    model_dir = resolve_model(arguments.model)
    prompts = read_prompts(arguments.prompts) if arguments.prompts else built_in_prompts()
    options = RecordOptions(model_dir=model_dir, max_tokens=arguments.max_tokens, temperature=0.0, num_threads=1)
    workload = "+".join(dict.fromkeys(prompt.domain for prompt in prompts))
    recording = arguments.recording or recorded(workload, prompts, arguments.answers, options, arguments.cache)
    with tempfile.TemporaryDirectory(prefix="slipstream-") as scratch:
        folder = Path(scratch)
        curves = learn(recording, arguments, folder)
        differences = {name: weight_difference(folder, index) for index, name in enumerate(SETUPS) if index}
        outcome = run_kills(folder / "kills", num_kills=arguments.kills, seed=arguments.seed)
    _finish(curves, differences, outcome, arguments)


def _finish(
    curves: dict[str, dict[str, Curve]],
    differences: dict[str, float],
    outcome: Outcome,
    arguments: argparse.Namespace,
) -> None:
    accounts, alone = outcome.accounts, curves["1 process"]
    megabytes = {name: by_precision["float32"].kept_bytes / 1e6 for name, by_precision in curves.items()}
    back = Spread.of(outcome.back_s)
    rows = [
        *curve_rows(curves),
        *((f"averaged weights, {name}", f"{value:.2e} from those of 1 process") for name, value in differences.items()),
        *((f"weights, average and moments, {name}", f"{value:.1f} MB a process") for name, value in megabytes.items()),
        ("kills", ", ".join(f"{count} {what}" for what, count in sorted(outcome.kills.items()))),
        ("seconds from a kill until all ranks have resumed", back),
        ("traces", str(accounts)),
        ("traces in the trainer's own count", str(outcome.counted)),
    ]
    targets = [
        Target(
            f"{name.replace(', ', '_').replace(' ', '_')}_{precision}",
            curves[name][precision].difference(alone[precision]),
            tolerance,
            at_least=False,
        )
        for name in differences
        for precision, tolerance in zip(PRECISIONS, arguments.tolerance, strict=True)
    ]
    targets += [
        Target("kills", sum(outcome.kills.values()), arguments.kills),
        Target("lost_silently", accounts.silently_lost, 0, at_least=False),
        Target("used_twice", accounts.used_twice, 0, at_least=False),
        Target("waiting", accounts.waiting, 0, at_least=False),
        Target("counted_by_the_trainer", abs(outcome.counted - accounts.used_in_all), 0, at_least=False),
    ]
    document: dict[str, Any] = {
        "steps": arguments.steps,
        "answers_per_step": arguments.answers_per_step,
        "curves": {
            name: {precision: dataclasses.asdict(curve) for precision, curve in by_precision.items()}
            for name, by_precision in curves.items()
        },
        "weight_difference": differences,
        "kept_megabytes": megabytes,
        "seed": arguments.seed,
        "kills": dict(outcome.kills),
        "back_s": back.to_dict(),
        "traces": dataclasses.asdict(accounts),
        "counted_by_the_trainer": outcome.counted,
    }
    finish(rows, targets, document, arguments.json)


def _arguments() -> argparse.Namespace:
    options = parser("Several trainer processes: the same curve, and no trace lost or used twice")
    options.add_argument("--cache", type=Path, default=cache_root() / "recordings", metavar="DIR")
    options.add_argument("--recording", type=Path, metavar="FILE", help="instead of answering the prompts")
    options.add_argument("--answers", type=int, help="to record")
    options.add_argument("--max-tokens", type=int, default=48, help="completion tokens an answer")
    options.add_argument("--answers-per-step", type=int, default=4)
    options.add_argument("--steps", type=int)
    options.add_argument("--kills", type=int, help="of ranks")
    options.add_argument("--seed", type=int, default=0, help="of the kills")
    options.add_argument(
        "--tolerance", type=float, nargs=2, default=(1e-4, 5e-2), metavar=("FLOAT32", "BFLOAT16"),
        help="relative difference of two curves at any point",
    )  # fmt: skip
    arguments = options.parse_args()
    fill_in(arguments, {"answers": (16, 64), "steps": (20, 80), "kills": (6, 24)})
    return arguments


if __name__ == "__main__":
    main()
