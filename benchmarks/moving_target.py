"""Does a draft that learns along keep up with a target that is updated every step, and does one that stays behind?

    python -m benchmarks.moving_target [--quick] [--json FILE] [--plot FILE.png] [--prompts FILE.jsonl] …

    draft trained on recorded answers ──▶ static: as it is at step 0
                                     └──▶ live: learns from what is sampled (benchmarks/in_process.py)

The target is the policy of benchmarks/grpo.py. Each version of it is given an exam, the same prompts with the same
seeds, before the live draft has learnt from anything that this version said. Nobody ever learns from the exam. Both
drafts decode its answers again: so they are compared on equal text, no noise of the machine has part in it, and no
version has easier prompts than another.

Acceptance is accepted proposals a verification, with chains of four that no confidence ends (trainer/evaluate.py). A
policy in training also changes how predictable its text is, whatever the draft. So a third draft says what can be had:
the fitted one starts where the static one does and learns from other answers of the last target alone.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch

from benchmarks.answers import RECORDING_DEFAULTS, add_recording_options, recording
from benchmarks.common import Target, fill_in, finish, parser, pick_prompts
from benchmarks.grpo import ENGINE, TRAINER, Policy, capitals, sample_groups, train
from benchmarks.in_process import Loop, loop, request_for
from serving.local.text import LocalTokenizer
from slipstream.models import cache_root, resolve_model
from slipstream.topics import Prompt
from speculator.acceptance import Acceptance
from speculator.bfloat16 import autocast
from speculator.checkpoint import apply_state, draft_state
from speculator.errors import ConfigError, TraceError
from speculator.fresh import fresh_draft
from speculator.labels import draft_ids_by_target_id
from speculator.model import Eagle3Draft
from speculator.recording import RecordingReader
from speculator.trace import Trace
from trainer.batch import Example, cut, make_example, pack
from trainer.config import TrainerConfig, load_config
from trainer.evaluate import predict_acceptance
from trainer.step import Learner

DEPTH = 4
_EXAM_SIZE = 2
"""Answers to each of its prompts."""
_EXAM_SEED = 1 << 32
"""No answer that is learnt from has a seed so large."""
HOLDS = 0.9
"""Of its acceptance, what a draft must keep that holds."""


def examples_of(traces: Sequence[Trace], draft: Eagle3Draft) -> list[Example]:
    draft_ids_V = draft_ids_by_target_id(draft.d2t, draft.config.vocab_size)
    found = []
    for trace in traces:
        try:
            found.append(make_example(trace, draft_ids_V, feature_width=draft.fc.in_features))
        except TraceError:
            continue
    return found


def acceptance(draft: Eagle3Draft, examples: Sequence[Example]) -> float:
    """Accepted proposals a verification."""
    with autocast(draft.embed.device, is_wanted=True):
        found: Acceptance = predict_acceptance(draft, examples, depths=[DEPTH])[DEPTH]
    return found.length - 1


def learnt(draft: Eagle3Draft, examples: Sequence[Example], config: TrainerConfig, *, passes: float) -> Eagle3Draft:
    """The draft after so many passes over the examples."""
    learner, rng = Learner(draft, config), random.Random(config.seed)
    tokens = passes * sum(example.num_bases for example in examples)
    while tokens > 0:
        windows, num_bases = [], 0
        for example in rng.sample(examples, len(examples)):
            windows.append(cut(example, max_bases=config.max_bases, rng=rng))
            num_bases += windows[-1].num_bases
            if num_bases >= config.batch_tokens:
                break
        learner.step(pack(windows, max_context=config.max_context))
        tokens -= num_bases
    return learner.averaged


def trained_draft(arguments: argparse.Namespace, model_dir: Path, config: TrainerConfig) -> Eagle3Draft:
    """What both drafts are at step 0: learnt from a recording, once, and kept beside it."""
    path: Path = arguments.traces or recording(arguments, model_dir)
    draft = fresh_draft(model_dir, seed=0)
    kept = cache_root() / "drafts" / f"{path.stem}-{arguments.passes:g}.safetensors"
    if not kept.exists():
        with RecordingReader(path) as reader:
            examples = examples_of(list(reader.traces()), draft)
        print(f"training a draft on {len(examples)} recorded answers", flush=True)
        state = draft_state(learnt(draft, examples, config, passes=arguments.passes))
        kept.parent.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(state, kept.with_suffix(".tmp"))
        kept.with_suffix(".tmp").rename(kept)
    apply_state(draft, safetensors.torch.load_file(kept))
    return draft


class Exam:
    """The same questions to every version of the target."""

    def __init__(self, served: Loop, prompts: Sequence[Prompt], draft: Eagle3Draft, *, max_tokens: int) -> None:
        self._served, self._draft = served, draft
        self._requests = [
            request_for(
                served.engine,
                f"exam-{row}-{number}",
                prompt.text,
                max_tokens=max_tokens,
                seed=_EXAM_SEED + _EXAM_SIZE * row + number,
                domain=prompt.domain,
                group_id=f"exam-{row}",
            )
            for row, prompt in enumerate(prompts)
            for number in range(_EXAM_SIZE)
        ]

    def scores(self, drafts: Mapping[str, Eagle3Draft]) -> dict[str, float]:
        """What the drafts accept of the newest target's answers."""
        examples = examples_of(self._served.examine(self._requests), self._draft)
        return {name: round(acceptance(draft, examples), 4) for name, draft in drafts.items()}


def fitted(
    served: Loop, arguments: argparse.Namespace, static: Eagle3Draft, prompts: Sequence[Prompt], config: TrainerConfig
) -> Eagle3Draft:
    """The static draft after it has learnt the newest target's answers to these prompts."""
    tokens, seed = arguments.sample_tokens, arguments.steps
    sample_groups(served, prompts, size=arguments.size, max_tokens=tokens, seed=seed, reward=capitals)
    draft = fresh_draft(config.model_dir, seed=0)
    apply_state(draft, draft_state(static))
    return learnt(draft, examples_of(served.traces, static), config, passes=arguments.fit_passes)


def short_prompts(arguments: argparse.Namespace, model_dir: Path, count: int) -> list[Prompt]:
    """Different ones, each read by the policy several times. Raises ConfigError where there are too few."""
    tokenizer, found = LocalTokenizer(model_dir), dict[str, Prompt]()
    for prompt in pick_prompts(arguments.prompts, 20 * count):
        if len(tokenizer.encode(prompt.text)) <= arguments.prompt_tokens:
            found.setdefault(prompt.text, prompt)
    if len(found) < count:
        raise ConfigError(f"{count} different prompts of {arguments.prompt_tokens} tokens are needed, not {len(found)}")
    return list(found.values())[:count]


def measure(arguments: argparse.Namespace, model_dir: Path) -> list[dict[str, Any]]:
    """A row for each version of the target; the last one has the fitted draft as well."""
    unused = {"redis_url": "", "model_key": "", "store_dir": Path(), "state_dir": Path()}
    config = load_config(model_dir=model_dir, **unused)
    static = trained_draft(arguments, model_dir, config)
    num_taught = arguments.steps * arguments.groups
    prompts = short_prompts(arguments, model_dir, num_taught + arguments.fit_groups + arguments.exam)
    policy = Policy(model_dir, num_layers=arguments.layers, learning_rate=arguments.learning_rate)
    rows = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        loop(
            model_dir,
            Path(scratch),
            draft=static,
            threads=arguments.threads,
            engine=ENGINE,
            trainer=TRAINER | {"max_passes": arguments.live_passes},
        ) as served,
    ):
        exam = Exam(served, prompts[-arguments.exam :], static, max_tokens=arguments.sample_tokens)
        steps = train(
            served,
            policy,
            lambda step: prompts[step * arguments.groups : (step + 1) * arguments.groups],
            Path(scratch),
            steps=arguments.steps,
            size=arguments.size,
            max_tokens=arguments.sample_tokens,
        )
        for row in steps:
            row |= exam.scores({"live": served.draft(served.engine.draft_version), "static": static})
            rows.append(row)
            print(row, flush=True)
        drafts = {"live": served.draft(served.engine.draft_version), "static": static}
        drafts["fitted"] = fitted(served, arguments, static, prompts[num_taught : -arguments.exam], config)
        versions = {"target_version": served.engine.target_version, "draft_version": served.engine.draft_version}
        return [*rows, versions | exam.scores(drafts)]


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A PNG of both curves, and of how far the target has moved."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 6.2), sharex=True, layout="constrained")
    steps = [row["target_version"] for row in rows]
    curves = ((top, "live", "#1f6feb"), (top, "static", "#8c959f"), (bottom, "kl_from_start", "#1a7f37"))
    for axis, name, color in curves:
        values = [row[name] for row in rows if name in row]
        axis.plot(steps[: len(values)], values, color=color, linewidth=2.2, label=name)
        axis.annotate(
            f"{values[-1]:.2f}",
            (steps[len(values) - 1], values[-1]),
            xytext=(5, 0),
            textcoords="offset points",
            color=color,
            weight="bold",
        )
        axis.grid(axis="y", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    top.set_ylabel("accepted proposals\na verification")
    top.legend(loc="best", frameon=False, fontsize=9)
    bottom.set_ylabel("KL from the start\n(nats a token)")
    bottom.xaxis.get_major_locator().set_params(integer=True)
    bottom.set_xlabel("target version: one policy update each")
    top.set_title("a draft that learns along, and one that does not", loc="left", fontsize=11)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    add_recording_options(options)
    options.add_argument("--plot", type=Path, metavar="FILE.png", help="draw both curves here")
    options.add_argument("--steps", type=int, help="updates of the target; default 8, quick 3")
    options.add_argument("--groups", type=int, help="prompts a step; default 4, quick 3")
    options.add_argument("--size", type=int, default=8, help="answers to a prompt")
    options.add_argument("--prompt-tokens", type=int, default=96, help="of a prompt, at most")
    options.add_argument("--sample-tokens", type=int, default=32, help="of an answer")
    options.add_argument("--learning-rate", type=float, default=1.5e-4)
    options.add_argument("--layers", type=int, default=8, help="of the policy that learn, from the last one on")
    options.add_argument("--passes", type=float, help="over the recording, before step 0; default 1.5, quick 1")
    options.add_argument("--live-passes", type=float, default=0.1, help="of the live draft over its replay, a version")
    options.add_argument("--exam", type=int, help="prompts that every version is asked; default 16, quick 6")
    options.add_argument("--fit-groups", type=int, help="prompts that the fitted draft learns from; default 4, quick 2")
    options.add_argument("--fit-passes", type=float, default=4.0)
    arguments = options.parse_args()
    fill_in(arguments, RECORDING_DEFAULTS)
    defaults = {"steps": (3, 8), "groups": (3, 4), "passes": (1.0, 1.5), "fit_groups": (2, 4), "exam": (6, 16)}
    fill_in(arguments, defaults)
    rows = measure(arguments, resolve_model(arguments.model))
    if arguments.plot is not None:
        draw(rows, arguments.plot)
    first, last = rows[0], rows[-1]
    worst = min(row["live"] for row in rows[1:]) / first["live"]
    table: list[tuple[str, object]] = [
        (
            f"version {row['target_version']}",
            f"live {row['live']:.3f}  static {row['static']:.3f}  reward {row['reward']:.3f}  "
            f"KL {row['kl_from_start']:.3f}  draft {row['draft_version']}",
        )
        for row in rows[:-1]
    ]
    scores = "  ".join(f"{name} {last[name]:.3f}" for name in ("live", "static", "fitted"))
    table.append((f"version {last['target_version']}", f"{scores}  draft {last['draft_version']}"))
    finish(
        table,
        [
            Target("live: least acceptance, of its own at step 0", worst, HOLDS),
            Target("live, of the fitted draft's", last["live"] / last["fitted"], HOLDS),
            Target("static, of its own at step 0", last["static"] / first["static"], HOLDS, at_least=False),
            Target("static, of the fitted draft's", last["static"] / last["fitted"], HOLDS, at_least=False),
        ],
        {"versions": rows, "arguments": {name: str(value) for name, value in vars(arguments).items()}},
        arguments.json,
    )


if __name__ == "__main__":
    main()
