"""Compare our trainer with those of `speculators` and `specforge`, on the same traces, with their own code.

    python -m benchmarks.peers_trainers [--quick] [--json FILE] [--prompts FILE.jsonl] [--traces FILE.rec]
                                        [--runs FILE.jsonl] [--domains code math] [--tokens 15000 60000 …]
                                        [--seeds 1] [--first-seed 0] [--arms speculators specforge …]
                                        [--torch torch==2.13.0+cpu] [--env-speculators DIR] [--env-specforge DIR]
                                        [--verbose]

Both are installed from PyPI, each in an environment of its own, which is removed afterwards; with `--env-…` the one in
that folder is used, or made there and kept. `--torch` should be a build for CPUs, from an index that
`PIP_EXTRA_INDEX_URL` may name.

The local engine answers prompts of each domain, greedily and without a draft, and keeps their whole prompts; or the
traces are those of a recording. A fifth of a domain's traces is held out. Every trainer begins with a fresh head over
the same draft vocabulary and learns the same windows of the others, in the same steps (slipstream/replay.py). So all
learn as many tokens, prompt positions with a known distribution included. Each project runs with its defaults and with
other learning rates (`ARMS`), and its schedule ends with the last step. Its heads are exported by its own code, read as
`slipstream drafts import` reads them, and scored like ours, at depth 4 on the held-out traces.

At equal tokens, ours is compared with the best arm of either project. At equal CPU seconds, ours goes on over the same
traces until it has used as many as any arm did. It is compared with each arm by its last evaluation within that arm's
seconds, and the smallest ratio counts. Everything computes on one thread. Evaluation, and the hidden states that the
projects ask for and traces do not have, are not counted.

Targets, of the geometric mean over domains and seeds: 1.05 times the better accept length at equal tokens, 1.15 times
at equal CPU seconds. With `--runs` each finished run is a line of that file at once, and what the file holds already is
not run again: remove it where the code, the recording or the trainer's settings have changed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.common.paired import KeptRuns, interval
from benchmarks.common.recorded_answers import RECORDING_DEFAULTS, add_recording_options, in_turn, recording
from benchmarks.common.report import Target, fill_in, finish, parser
from benchmarks.peers import trainers
from benchmarks.peers.environments import DEFAULT_TORCH, PROJECTS, environment, run_in
from benchmarks.peers.trainers import Plan
from slipstream.demo.topics import Prompt
from slipstream.models import resolve_model
from slipstream.replay import BatchSampler, held_out_scores, read_split
from speculator.draft.checkpoint import apply_state, draft_state, read_target_tensor
from speculator.draft.eagle3 import Eagle3Draft
from speculator.draft.initialization import fresh_draft
from speculator.draft.public_heads import read_public_head
from speculator.errors import ConfigError
from speculator.target_folder import EMBEDDING
from trainer.config import TrainerConfig, load_config
from trainer.learning.batch import Example, Window, pack
from trainer.learning.optimizer_step import Learner
from trainer.statistics import AcceptanceCounts

DEPTH = 4


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A project, and changes of its default settings."""

    project: str
    changes: Mapping[str, Any]


ARMS = {
    "speculators": Arm(project="speculators", changes={}),
    "specforge": Arm(project="specforge", changes={}),
    "speculators-adamw": Arm(project="speculators", changes={"optimizer": "adamw"}),
    "specforge-1e-3": Arm(project="specforge", changes={"learning_rate": 1e-3}),
    "speculators-3e-3": Arm(project="speculators", changes={"lr": 3e-3}),
    "specforge-3e-4": Arm(project="specforge", changes={"learning_rate": 3e-4}),
    "speculators-adamw-3e-3": Arm(project="speculators", changes={"optimizer": "adamw", "lr": 3e-3}),
    "specforge-3e-3": Arm(project="specforge", changes={"learning_rate": 3e-3}),
}
"""The defaults are Muon at 1e-3 for `speculators`, and AdamW at 1e-4 for `specforge`."""
OURS = "ours"
_LEAST_TRACES = 8
_MORE_CPU = 1.1
"""Factor of CPU seconds from one evaluation of our trainer to the next, after the first quarter."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Training steps and held-out traces, the same for all trainers."""

    domain: str
    seed: int
    tokens: int
    config: TrainerConfig
    examples: Sequence[Example]
    """Training examples."""
    held_out: Sequence[Example]
    steps: Sequence[Sequence[Window]]
    num_tokens: int
    """Of all windows."""

    @property
    def name(self) -> str:
        return f"{self.domain} seed {self.seed}, {self.tokens} tokens"


Runs = dict[str, dict[str, Any]]
"""Of one task: by trainer and arm."""


def main() -> None:
    arguments = _arguments()
    model_dir = resolve_model(arguments.model)
    path = arguments.traces or recording(
        arguments,
        model_dir,
        lambda prompts, count: _of_domains(prompts, arguments.domains, count),
        engine={"context_window": 8192},
    )
    # The engine that recorded has set its own number.
    torch.set_num_threads(1)
    kept = KeptRuns(arguments.runs, path.name)
    found: dict[str, Runs] = {}
    with tempfile.TemporaryDirectory(prefix="peers-trainers-") as scratch:
        seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
        for tokens, seed, domain in itertools.product(arguments.tokens, seeds, arguments.domains):
            task = read_task(path, model_dir, domain=domain, seed=seed, tokens=tokens)
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                peers = _Peers(Path(folder), Path(scratch), model_dir, arguments)
                runs = {
                    arm: kept.run(f"{arm}, {task.name}", partial(peers.train, task, ARMS[arm]))
                    for arm in arguments.arms
                }
            most_s = max(run["cpu_s"] for run in runs.values())
            ours = kept.run(
                f"{OURS}, {task.name}",
                partial(train_ours, task, model_dir, most_s),
                is_enough=partial(_reaches, most_s),
            )
            found[task.name] = {**runs, OURS: ours}
    rows: list[tuple[str, object]] = [("what is learned, by whom", "accept length, CPU s of its steps, ours over it")]
    rows += [row for name, runs in found.items() for row in _rows(name, runs)]
    ratios = {name: ratios_of(runs) for name, runs in found.items()}
    document = {
        "runs": found,
        "ratios": {name: {"tokens": equal, "seconds": timed} for name, (equal, timed) in ratios.items()},
    }
    finish(rows, _targets(ratios, arguments.tokens), document, arguments.json)


def _reaches(cpu_s: float, run: Mapping[str, Any]) -> bool:
    """Whether the run's curve ends after so many CPU seconds."""
    return bool(run["curve"][-1][0] >= cpu_s)


def _of_domains(prompts: Sequence[Prompt], domains: Sequence[str], count: int) -> list[Prompt]:
    """Raises ConfigError where a domain has no prompt."""
    if missing := sorted({*domains} - {prompt.domain for prompt in prompts}):
        raise ConfigError(f"no prompt is of {', '.join(missing)}: pass --prompts, or other --domains")
    return in_turn([prompt for prompt in prompts if prompt.domain in domains], count)


def read_task(path: Path, model_dir: Path, *, domain: str, seed: int, tokens: int) -> Task:
    """Raises ConfigError where the recording has too few traces of the domain with their whole prompt."""
    unused = {"redis_url": "", "model_key": "", "store_dir": Path(), "state_dir": Path()}
    config = load_config(model_dir=model_dir, seed=seed, ttt_steps=DEPTH, **unused)
    draft = fresh_draft(model_dir, draft_vocab_size=config.draft_vocab_size, seed=seed)
    split = read_split([path], model_dir, draft, seed=seed)

    def usable(examples: Sequence[Example]) -> list[Example]:
        # The target's hidden states are computed again, from the first token on.
        return [one for one in examples if one.domain == domain and one.first_position == 0]

    examples, held_out = usable(split.learnt), usable(split.held_out)
    if len(examples) < _LEAST_TRACES or not held_out:
        raise ConfigError(f"{path} has {len(examples)} usable traces of {domain} to learn from: record more answers")
    probe = BatchSampler(examples, config, num_steps=len(examples), seed=seed)
    usual = statistics.fmean(sum(w.num_bases for w in probe.draw(step)) for step in range(len(examples)))
    num_steps = max(round(tokens / usual), 1)
    sampler = BatchSampler(examples, config, num_steps=num_steps, seed=seed)
    steps = [sampler.draw(step) for step in range(num_steps)]
    return Task(
        domain=domain,
        seed=seed,
        tokens=tokens,
        config=config,
        examples=examples,
        held_out=held_out,
        steps=steps,
        num_tokens=sum(window.num_bases for windows in steps for window in windows),
    )


def scored(draft: Eagle3Draft, task: Task) -> AcceptanceCounts:
    """Acceptance of a draft on the held-out traces."""
    rows = held_out_scores(draft, task.held_out, task.config, depths=[DEPTH])
    return sum((row[DEPTH] for row in rows), AcceptanceCounts())


def train_ours(task: Task, model_dir: Path, most_s: float) -> dict[str, Any]:
    """The run of this project's trainer: its length after the task's steps, and a curve of (CPU seconds, trained
    tokens, length) that goes on over the same traces until it has used `most_s`.
    """
    config = task.config
    learner = Learner(fresh_draft(model_dir, draft_vocab_size=config.draft_vocab_size, seed=task.seed), config)
    used_s, tokens, curve = 0.0, 0, [(0.0, 0, round(scored(learner.averaged, task).length, 4))]
    run: dict[str, Any] = {}
    for number, windows in enumerate(_endless(task), 1):
        started_s = time.process_time()
        learner.step(pack(windows, max_context=config.max_context))
        used_s += time.process_time() - started_s
        tokens += sum(window.num_bases for window in windows)
        is_last, is_over = number == len(task.steps), number >= len(task.steps) and used_s >= most_s
        if is_last or is_over or used_s >= max(_MORE_CPU * curve[-1][0], most_s / 4):
            length = round(scored(learner.averaged, task).length, 4)
            curve.append((round(used_s, 2), tokens, length))
        if is_last:
            run = {"accept_length": length, "cpu_s": round(used_s, 2), "steps": number, "trained_tokens": tokens}
        if is_over:
            break
    return {**run, "curve": curve}


def _endless(task: Task) -> Iterator[Sequence[Window]]:
    """The task's steps, then endless further ones over the same traces."""
    yield from task.steps
    sampler = BatchSampler(task.examples, task.config, num_steps=1, seed=task.seed + 1)
    while True:
        yield sampler.draw(0)


class _Peers:
    """The projects in their environments, and the folder with their input and output."""

    def __init__(self, folder: Path, environments: Path, model_dir: Path, arguments: argparse.Namespace) -> None:
        self._folder, self._environments, self._model_dir = folder, environments, model_dir
        self._arguments = arguments

    def write(self, task: Task) -> None:
        """Write the task for `benchmarks/peers/trainers.py`."""
        places = {id(example): number for number, example in enumerate(task.examples)}
        used = {id(window.example) for windows in task.steps for window in windows}
        (self._folder / "traces").mkdir()
        for example in task.examples:
            if id(example) in used:
                tensors = {"token_ids": example.token_ids, "aux": example.aux.contiguous()}
                save_file(tensors, self._folder / "traces" / f"{places[id(example)]}.safetensors")
        state = draft_state(fresh_draft(self._model_dir, draft_vocab_size=task.config.draft_vocab_size, seed=task.seed))
        save_file({name: state[name] for name in ("d2t", "t2d")}, self._folder / "vocabulary.safetensors")
        steps = [
            [(places[id(w.example)], w.example.first_base + w.start, w.num_bases) for w in windows]
            for windows in task.steps
        ]
        plan = Plan(target=str(self._model_dir), seed=task.seed, steps=steps)
        (self._folder / "plan.json").write_text(json.dumps(asdict(plan)))

    def train(self, task: Task, arm: Arm) -> dict[str, Any]:
        """The run of one arm."""
        if not (self._folder / "plan.json").exists():
            self.write(task)
        folder: Path = getattr(self._arguments, f"env_{arm.project}") or self._environments / arm.project
        python = environment(folder, arm.project, self._arguments.torch)
        (self._folder / "arm.json").write_text(json.dumps(arm.changes))
        verbose: bool = self._arguments.verbose
        run_in(python, Path(trainers.__file__), arm.project, self._folder, verbose=verbose)
        answer = json.loads((self._folder / "answer.json").read_text())
        read = read_public_head(self._folder / "head", self._model_dir)
        draft = Eagle3Draft(read.config, read_target_tensor(self._model_dir, EMBEDDING).float(), read.state["d2t"])
        apply_state(draft, read.state)
        length = round(scored(draft, task).length, 4)
        return {"accept_length": length, **answer, "steps": len(task.steps), "trained_tokens": task.num_tokens}


def ours_after(run: Mapping[str, Any], cpu_s: float) -> float:
    """Our accept length at the last evaluation within so many CPU seconds."""
    lengths: list[float] = [length for at_s, _, length in run["curve"] if at_s <= cpu_s]
    return lengths[-1]


def ratios_of(runs: Runs) -> tuple[float, float]:
    """Ours over the best other run: at equal tokens, and at equal CPU seconds."""
    others = {name: run for name, run in runs.items() if name != OURS}
    equal = runs[OURS]["accept_length"] / max(run["accept_length"] for run in others.values())
    timed = min(ours_after(runs[OURS], run["cpu_s"]) / run["accept_length"] for run in others.values())
    return equal, timed


def _rows(task: str, runs: Runs) -> Iterator[tuple[str, object]]:
    ours = runs[OURS]
    yield f"{task}, {OURS}", f"{ours['accept_length']:.4f}  {ours['cpu_s']:.1f} s for {ours['trained_tokens']} tokens"
    for name, run in runs.items():
        if name == OURS:
            continue
        after = ours_after(ours, run["cpu_s"])
        yield (
            f"{task}, {name}",
            f"{run['accept_length']:.4f}  {run['cpu_s']:.1f} s;  equal tokens "
            f"{ours['accept_length'] / run['accept_length']:.3f} ×;  equal seconds "
            f"{after / run['accept_length']:.3f} × ({after:.4f})",
        )
    equal, timed = ratios_of(runs)
    yield f"{task}: ours over the best", f"equal tokens {equal:.3f} ×, equal seconds {timed:.3f} ×"


def _targets(ratios: Mapping[str, tuple[float, float]], tokens: Sequence[int]) -> list[Target]:
    targets = []
    for count in tokens:
        of_count = [pair for name, pair in ratios.items() if name.endswith(f" {count} tokens")]
        for place, (what, bound) in enumerate((("tokens", 1.05), ("CPU seconds", 1.15))):
            values = [pair[place] for pair in of_count]
            if len(values) > 1:
                print(f"{count} tokens, equal {what}: {interval([value - 1 for value in values])}")
            targets.append(Target(f"{count} tokens, equal {what}", statistics.geometric_mean(values), bound))
    return targets


def _arguments() -> argparse.Namespace:
    options = parser("This project's trainer beside those of speculators and specforge")
    add_recording_options(options)
    options.add_argument("--runs", type=Path, metavar="FILE.jsonl", help="keep every run here, and go on from it")
    options.add_argument("--domains", nargs="+", help="default: code and math, quick code")
    options.add_argument("--tokens", nargs="+", type=int, help="trained tokens; default 15000 60000, quick 1500")
    options.add_argument("--seeds", type=int, help="how many; default 3, quick 1")
    options.add_argument("--first-seed", type=int, default=0, help="the seeds are this one and those behind it")
    options.add_argument("--arms", nargs="+", choices=ARMS, help="default: all, quick the defaults of both")
    options.add_argument("--torch", default=DEFAULT_TORCH, help="what pip installs as PyTorch")
    options.add_argument("--verbose", action="store_true", help="show what the projects print")
    for project in PROJECTS:
        options.add_argument(f"--env-{project}", type=Path, metavar="DIR", help=f"an environment with {project}")
    arguments = options.parse_args()
    own = {"seeds": (1, 3), "domains": (["code"], ["code", "math"]), "tokens": ([1500], [15000, 60000])}
    fill_in(arguments, {**RECORDING_DEFAULTS, **own, "arms": (list(PROJECTS), list(ARMS))})
    return arguments


if __name__ == "__main__":
    main()
