"""What the trainer learns a second beside an ordinary EAGLE-3 trainer, and the memory that its process holds.

    python -m benchmarks.trainer [--quick] [--json FILE] [--prompts FILE.jsonl] [--reference SCRIPT] [--threads 2] …

Throughput, same target, same draft vocabulary, same training-time-test steps, same answers in the same batches:

    own           the trainer's step as it is: packed answers, chains that go on while they are right, K kept targets
    own, all      the same step with `forward_kl,chains=all`: every step from every position, the reference's work
    padded        the ordinary step, written here: answers padded side by side, every step on all positions, the full
                  distribution over the draft vocabulary from the target's final hidden state, bfloat16 autocast, AdamW
    script        with `--reference`: a program of its own, see below

Methods alternate in chunks of a few steps; every chunk begins with the same weights and takes the same batches, so that
chunks are repeats of one measurement. Packing and padding are part of a step; recordings, hidden states and copies of
weights are not. Trained tokens are base positions with a label, the same ones for every method: an answer's tokens but
the first. Answers are at most 256 tokens long with their prompt, because padded trainers cut there.

Part of what is saved belongs to the method and not to its implementation. A chain ends at the first wrong proposal, so
a fresh draft pays for hardly more than the first step and a good one for more. Both are measured, at the fresh draft
and after some learning, and the smaller median is the figure. `own, all` says how much of it is left without that.
Another difference is told without a target: the service also learns the last prompt positions, which a padded step
computes anyway and only needs to count. The rows `with prompts` do so in both.

The script is started as `SCRIPT MODEL TRACES.pt OUT_DIR DRAFT_VOCAB TTT_STEPS MINUTES` and prints lines
`STEP SECONDS tok TOKENS loss …`, with some line of its own right before its first step. It is timed between the
arrivals of that line and of the first such line, then ended: loading counts nothing, and one of its evaluations, on
spans of eight tokens that are put behind the answers for it, counts with the steps. It draws its own random pairs of
the same answers, counts two tokens more for each, and chooses its own number of threads.

Memory: a process with the service's modules, environment and settings holds a replay of 50,000 completion tokens,
decoded from the recording again for every copy (benchmarks/resident.py), learns 300 batches drawn from it, and saves a
checkpoint. The figure is the largest resident size that the kernel saw (VmHWM), above what it is in between (VmRSS).

Freed memory stays in this process, as in the service's (trainer/allocator.py), which helps the padded step, too; the
script's process is as it comes.

Targets: own at least 1.5 times the script, or padded where there is no script; at most 2.5 GB.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Spread, Target, fill_in, finish, parser
from benchmarks.padded import Answer, PaddedTrainer, pad
from benchmarks.resident import SERVICE_ENV, measure_resident
from benchmarks.workloads import RecordOptions, recorded
from slipstream.models import cache_root, resolve_model
from slipstream.topics import built_in_prompts, read_prompts
from speculator.checkpoint import read_target_tensor
from speculator.errors import ConfigError
from speculator.fresh import fresh_draft
from speculator.labels import draft_ids_by_target_id
from speculator.model import Eagle3Draft
from speculator.recording import RecordingReader
from trainer.allocator import keep_freed_memory
from trainer.batch import Batch, Window, make_example, pack
from trainer.config import TrainerConfig, load_config
from trainer.step import Learner

DRAFT_VOCAB = 8192
MAX_SPAN = 256
_STEP_LINE = re.compile(r"\s*(\d+) +\d+ +tok +(\d+) ")


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A few steps: how long, on how many trained tokens, and the acceptance length that they saw (own steps only)."""

    seconds: float
    num_tokens: int
    accept_length: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to take a step. `loss` None is the padded one."""

    name: str
    loss: str | None
    with_prompts: bool = False

    def window(self, answer: Answer) -> Window:
        start = 0 if self.with_prompts else answer.first_base - answer.example.first_base
        return Window(example=answer.example, start=start, num_bases=answer.example.num_bases - start)


class Bench:
    """The draft to begin with, and chunks of any method from it."""

    def __init__(self, draft: Eagle3Draft, config: TrainerConfig) -> None:
        self._fresh, self._config = draft, config
        rows = read_target_tensor(config.model_dir, "lm_head.weight")
        self._head_Dd = rows[draft.target_ids].float()

    def learner(self, loss: str, state: dict[str, Tensor] | None) -> Learner:
        learner = Learner(self._copy(), self._config.model_copy(update={"loss": loss}))
        if state is not None:
            learner.load_state(state)
        return learner

    def learn(self, method: Method, batches: Sequence[Sequence[Answer]]) -> dict[str, Tensor]:
        """The state of a learner after these batches."""
        assert method.loss is not None
        learner = self.learner(method.loss, None)
        for batch in batches:
            learner.step(self._packed(method, batch))
        return learner.state()

    def chunk(self, method: Method, batches: Sequence[Sequence[Answer]], state: dict[str, Tensor] | None) -> Chunk:
        """Steps on these batches from `state`, or from the fresh draft, after an untimed one on the first of them."""
        num_tokens = sum(method.window(answer).num_bases for batch in batches for answer in batch)
        if method.loss is None:
            return Chunk(seconds=self._time_padded(method, batches, state), num_tokens=num_tokens)
        learner = self.learner(method.loss, state)
        learner.step(self._packed(method, batches[0]))
        lengths = []
        start_s = time.perf_counter()
        for batch in batches:
            lengths.append(learner.step(self._packed(method, batch)).accept_length)
        seconds = time.perf_counter() - start_s
        return Chunk(seconds=seconds, num_tokens=num_tokens, accept_length=sum(lengths) / len(lengths))

    def _time_padded(
        self, method: Method, batches: Sequence[Sequence[Answer]], state: dict[str, Tensor] | None
    ) -> float:
        draft = self._copy()
        if state is not None:
            draft.load_state_dict({name: state[f"weight.{name}"] for name, _ in draft.named_parameters()})
        padded = PaddedTrainer(
            draft, self._head_Dd, num_steps=self._config.ttt_steps, learning_rate=self._config.learning_rate
        )
        padded.step(pad(batches[0], with_prompts=method.with_prompts))
        start_s = time.perf_counter()
        for batch in batches:
            padded.step(pad(batch, with_prompts=method.with_prompts))
        return time.perf_counter() - start_s

    def _packed(self, method: Method, batch: Sequence[Answer]) -> Batch:
        return pack([method.window(answer) for answer in batch], max_context=self._config.max_context)

    def _copy(self) -> Eagle3Draft:
        # The embedding is the target's, large and frozen.
        return copy.deepcopy(self._fresh, {id(self._fresh.embed): self._fresh.embed})


def time_script(
    script: Path, model_dir: Path, answers: Sequence[Answer], *, ttt_steps: int, answers_per_step: int
) -> Chunk:
    """The steps up to the script's first step line. Raises ConfigError where it ends before."""
    with tempfile.TemporaryDirectory() as scratch:
        traces = Path(scratch) / "traces.pt"
        torch.save(_script_traces(answers), traces)  # noqa: TID251 - the reference reads nothing else
        command = [script, model_dir, traces, Path(scratch) / "out", DRAFT_VOCAB, ttt_steps, 60]
        with subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        ) as process:
            try:
                return timed_lines(process.stdout or (), answers_per_step=answers_per_step)
            finally:
                process.kill()


def timed_lines(
    lines: Iterable[str], *, answers_per_step: int, clock: Callable[[], float] = time.perf_counter
) -> Chunk:
    """The chunk between the line before the first step line, and that. Raises ConfigError where there is none."""
    start_s = clock()
    last = ""
    for line in lines:
        if found := _STEP_LINE.match(line):
            num_steps, counted = map(int, found.groups())
            return Chunk(seconds=clock() - start_s, num_tokens=counted - 2 * num_steps * answers_per_step)
        start_s, last = clock(), line.strip()
    raise ConfigError(f"the reference ended before a line `STEP SECONDS tok TOKENS`, after {last!r}: check --reference")


def _script_traces(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """The answers, and forty spans of eight tokens behind them, which the script holds out and evaluates."""

    def entry(answer: Answer, tokens: slice, num_prompt_tokens: int) -> dict[str, Any]:
        example = answer.example
        return {
            "ids": example.token_ids[tokens].clone(),
            "pl": num_prompt_tokens,
            "aux": example.aux[tokens].clone(),
            "last": answer.last_hidden[tokens].clone(),
        }

    short = entry(answers[0], slice(answers[0].first_base - 3, answers[0].first_base + 5), 4)
    return [*(entry(answer, slice(None), answer.first_base + 1) for answer in answers), *[short] * 40]


def _config(model_dir: Path, **values: Any) -> TrainerConfig:
    unused = {"redis_url": "", "model_key": "", "store_dir": Path(), "state_dir": Path()}
    return load_config(model_dir=model_dir, draft_vocab_size=DRAFT_VOCAB, **unused, **values)


def _recording(arguments: argparse.Namespace, model_dir: Path) -> Path:
    """The given recording, or one of all domains of the prompts from the cache, made now where it is not there."""
    if arguments.recording:
        return Path(arguments.recording)
    prompts = read_prompts(arguments.prompts) if arguments.prompts else built_in_prompts()
    workload = "+".join(dict.fromkeys(prompt.domain for prompt in prompts))
    options = RecordOptions(
        model_dir=model_dir, max_tokens=arguments.max_tokens, temperature=0.0, num_threads=arguments.threads
    )
    return recorded(workload, prompts, arguments.answers, options, arguments.cache)


@torch.inference_mode()
def _answers(recording: Path, model_dir: Path, draft: Eagle3Draft) -> list[Answer]:
    """The recording's answers of up to MAX_SPAN tokens, with hidden states from one pass of the target each."""
    from transformers import AutoModel

    draft_ids_V = draft_ids_by_target_id(draft.d2t, draft.config.vocab_size)
    target = AutoModel.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    answers = []
    with RecordingReader(recording) as reader:
        for trace in reader.traces():
            header = trace.header
            # Eight tokens of an answer and four before it: enough for a held-out span, too.
            fits = trace.num_tokens <= MAX_SPAN and trace.num_completion_tokens >= 8 and header.num_prompt_tokens >= 4
            if header.first_position or not fits:
                continue
            example = make_example(trace, draft_ids_V, feature_width=draft.fc.in_features)
            last_hidden = target(example.token_ids[None]).last_hidden_state[0].float()
            answers.append(Answer(example=example, last_hidden=last_hidden, first_base=header.num_prompt_tokens - 1))
    if len(answers) < 2:
        raise ConfigError(f"{recording} has {len(answers)} answers of up to {MAX_SPAN} tokens: record more, --answers")
    return answers


def main() -> None:
    arguments = _arguments()
    # Before the first product of matrices, as the service has it: shapes differ in every batch.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", SERVICE_ENV["ONEDNN_PRIMITIVE_CACHE_CAPACITY"])
    keep_freed_memory()
    model_dir = resolve_model(arguments.model)
    traces = _recording(arguments, model_dir)
    torch.set_num_threads(arguments.threads)
    config = _config(model_dir, ttt_steps=arguments.ttt_steps)
    draft = fresh_draft(model_dir, draft_vocab_size=DRAFT_VOCAB, seed=config.seed)
    answers = _answers(traces, model_dir, draft)
    bench = Bench(draft, config)
    own = Method(name="own", loss=config.loss)
    methods = (
        own,
        Method(name="own, all", loss="forward_kl,chains=all"),
        Method(name="padded", loss=None),
        Method(name="own, with prompts", loss=config.loss, with_prompts=True),
        Method(name="padded, with prompts", loss=None, with_prompts=True),
    )
    batches = _batches(answers, arguments.answers_per_step)
    print(f"learning {arguments.learn_steps} steps", flush=True)
    learnt = bench.learn(own, list(itertools.islice(batches, arguments.learn_steps)))
    starts = {"fresh draft": None, f"after {arguments.learn_steps} steps": learnt}
    chunks: dict[tuple[str, str], list[Chunk]] = {(phase, one.name): [] for phase in starts for one in methods}
    scripts: list[Chunk] = []
    for repeat in range(arguments.repeats):
        print(f"repeat {repeat + 1} of {arguments.repeats}", flush=True)
        chosen = list(itertools.islice(batches, arguments.chunk_steps))
        for (phase, state), method in itertools.product(starts.items(), methods):
            chunks[phase, method.name].append(bench.chunk(method, chosen, state))
        if arguments.reference and repeat < arguments.script_runs:
            per_step = arguments.answers_per_step
            scripts.append(
                time_script(
                    arguments.reference, model_dir, answers, ttt_steps=arguments.ttt_steps, answers_per_step=per_step
                )
            )
    memory = measure_resident(traces, model_dir, num_tokens=arguments.memory_tokens, num_steps=arguments.memory_steps)
    _finish(chunks, scripts, memory, arguments)


def _batches(answers: Sequence[Answer], size: int) -> Iterator[list[Answer]]:
    """Random batches without end; every answer comes once before any comes again."""
    rng = random.Random(0)
    while True:
        order = rng.sample(answers, len(answers))
        for start in range(0, len(order) - size + 1, size):
            yield order[start : start + size]


def ratios(mine: Sequence[Chunk], theirs: Sequence[Chunk]) -> Spread:
    """How many times the tokens a second, chunk by chunk of the same repeat."""
    return Spread.of([a.tokens_per_s / b.tokens_per_s for a, b in zip(mine, theirs, strict=False)])


def _finish(
    chunks: dict[tuple[str, str], list[Chunk]],
    scripts: list[Chunk],
    memory: dict[str, float],
    arguments: argparse.Namespace,
) -> None:
    rows: list[tuple[str, object]] = [("", "trained tokens a second, median (min … max)")]
    speeds = {key: Spread.of([chunk.tokens_per_s for chunk in found]) for key, found in chunks.items()}
    for (phase, name), speed in speeds.items():
        lengths = [chunk.accept_length for chunk in chunks[phase, name] if chunk.accept_length is not None]
        told = f"   acceptance length {Spread.of(lengths).median:.2f}" if lengths else ""
        rows.append((f"{phase}, {name}", f"{speed}{told}"))
    compared: dict[tuple[str, str], Spread] = {}
    pairs = [
        ("own", "padded"), ("own, all", "padded"), ("own, with prompts", "padded, with prompts")
    ]  # fmt: skip
    for phase in dict.fromkeys(phase for phase, _ in chunks):
        for name, other in pairs:
            compared[phase, f"{name} ÷ {other}"] = ratios(chunks[phase, name], chunks[phase, other])
        if scripts:
            compared[phase, "own ÷ script"] = ratios(chunks[phase, "own"], scripts)
            compared[phase, "padded ÷ script"] = ratios(chunks[phase, "padded"], scripts)
    if scripts:
        rows.append(("script", Spread.of([chunk.tokens_per_s for chunk in scripts])))
    rows += [(f"{phase}, {name}", f"{spread} ×") for (phase, name), spread in compared.items()]
    rows += [(f"memory with {arguments.memory_tokens} tokens, {name}", f"{gb:8.2f}") for name, gb in memory.items()]

    def least(pair: str) -> float:
        return min(spread.median for (_, name), spread in compared.items() if name == pair)

    name, pair = ("own_over_script", "own ÷ script") if scripts else ("own_over_padded", "own ÷ padded")
    targets = [Target(name, least(pair), arguments.target)]
    targets.append(Target("peak_gb", memory["peak_gb"], arguments.memory_target, at_least=False))
    document = {
        "threads": arguments.threads,
        "draft_vocab": DRAFT_VOCAB,
        "ttt_steps": arguments.ttt_steps,
        "answers_per_step": arguments.answers_per_step,
        "chunk_steps": arguments.chunk_steps,
        "tokens_per_s": _nested(speeds),
        "script_tokens_per_s": Spread.of([chunk.tokens_per_s for chunk in scripts]).to_dict() if scripts else None,
        "ratios": _nested(compared),
        "memory_tokens": arguments.memory_tokens,
        "memory": {name: round(gb, 3) for name, gb in memory.items()},
    }
    finish(rows, targets, document, arguments.json)


def _nested(spreads: dict[tuple[str, str], Spread]) -> dict[str, dict[str, dict[str, float]]]:
    nested: dict[str, dict[str, dict[str, float]]] = {}
    for (phase, name), spread in spreads.items():
        nested.setdefault(phase, {})[name] = spread.to_dict()
    return nested


def _arguments() -> argparse.Namespace:
    options = parser("The trainer's throughput and memory")
    options.add_argument("--cache", type=Path, default=cache_root() / "recordings", metavar="DIR")
    options.add_argument("--recording", type=Path, metavar="FILE", help="instead of answering the prompts")
    options.add_argument("--reference", type=Path, metavar="SCRIPT", help="another trainer to compare with, see above")
    options.add_argument("--script-runs", type=int, help="of the reference")
    options.add_argument("--answers", type=int, help="answers to record")
    options.add_argument("--max-tokens", type=int, help="completion tokens an answer")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--ttt-steps", type=int, default=3)
    options.add_argument("--answers-per-step", type=int, default=2)
    options.add_argument("--chunk-steps", type=int)
    options.add_argument("--repeats", type=int)
    options.add_argument("--learn-steps", type=int)
    options.add_argument("--memory-tokens", type=int, default=50_000)
    options.add_argument("--memory-steps", type=int, default=300)
    options.add_argument("--target", type=float, default=1.5)
    options.add_argument("--memory-target", type=float, default=2.5, metavar="GB")
    arguments = options.parse_args()
    fill_in(arguments, {"answers": (24, 160), "max_tokens": (48, 128), "chunk_steps": (5, 20), "repeats": (2, 5)})
    fill_in(arguments, {"learn_steps": (40, 150), "script_runs": (1, 3)})
    return arguments


if __name__ == "__main__":
    main()
