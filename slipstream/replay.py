"""`slipstream replay`: train on a recording as the trainer would, and predict the acceptance, without any server.

    recording ──▶ held out | learnt from ──▶ revealed in their order, step by step ──▶ Learner ──▶ predicted acceptance

The traces are revealed evenly over the steps, in the order in which they were recorded, as live traffic would bring
them. Each step learns from a new trace and from random earlier ones. Which ones depends on the seed and never on the
loss or the draft, so runs with different losses see the same data in the same steps. (The trainer itself draws by
priority, domain and tenant: trainer/replay/buffer.py.)
"""

from __future__ import annotations

import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from speculator.draft.checkpoint import read_target_tensor, target_fingerprint
from speculator.draft.eagle3 import Eagle3Draft, autocast
from speculator.draft.initialization import fresh_draft
from speculator.errors import ConfigError, TraceError
from speculator.recording import RecordingReader
from speculator.versions.lineage import check_lineage, load_draft
from speculator.versions.store import DraftStore
from trainer.config import TrainerConfig, load_config
from trainer.learning.batch import Example, Window, cut, make_example, pack
from trainer.learning.labels import draft_ids_by_target_id
from trainer.learning.losses.mix import LossMix
from trainer.learning.optimizer_step import Learner
from trainer.release.gate import predict_acceptance, recorded_rounds
from trainer.replay.reservoirs import provenance_of
from trainer.statistics import AcceptanceCounts

HELD_OUT_SHARE = 0.2
PASSES = 4
_DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Options of a run. `depths` are evaluated; the deepest is the main one and the number of training-time-test steps.

    `loss` None is the trainer's own setting. `num_steps` None learns from every trace PASSES times on average; 0 learns
    nothing and evaluates the draft on all traces. `store` begins with its newest draft instead of a fresh one.
    """

    recordings: Sequence[Path]
    model_dir: Path
    depths: Sequence[int]
    loss: str | None = None
    num_steps: int | None = None
    seed: int = 0
    order_seed: int | None = None
    """Seed of the order of learning, where it must differ from `seed`."""
    num_points: int = 8
    """Points of the curve after the one before the first step."""
    draft_vocab_size: int | None = None
    store: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Split:
    """Examples in recorded order, and the acceptance that the held-out ones had in service (`recorded`)."""

    learnt: list[Example]
    held_out: list[Example]
    recorded: AcceptanceCounts
    num_unusable: int
    num_repeated: int
    """Traces whose text came before; they are left out, so that no held-out text is learned from."""

    @property
    def num_learnt_tokens(self) -> int:
        return sum(example.num_bases for example in self.learnt)


def replay(
    options: ReplayOptions,
    *,
    progress: Callable[[str], object] = lambda _: None,
    on_step: Callable[[int, int], object] = lambda _, __: None,
) -> dict[str, Any]:
    """Learn from recordings and return the results as a document.

    It is the same for the same recordings, options and settings, except for `seconds`. `progress` gets a line at every
    point of the curve, `on_step` (steps done, steps in all).

    Raises ConfigError where a recording is of another target or has too few traces, or the loss is finite in no step;
    StoreError or DraftError where the store has no usable draft.
    """
    started_s = time.perf_counter()
    config = _config(options)
    draft = _first_draft(options, config)
    split = read_split(options.recordings, options.model_dir, draft, seed=options.seed, learn=options.num_steps != 0)
    learner = Learner(draft, config)
    num_steps = options.num_steps
    if num_steps is None:
        num_steps = max(PASSES * split.num_learnt_tokens // config.batch_tokens, 1)
    scores = held_out_scores(learner.averaged, split.held_out, config, depths=options.depths)
    curve = [_point(split, scores, options.depths, step=0, trained_tokens=0)]
    trained_tokens = trained_branches = num_skipped = 0
    losses: list[float] = []
    order_seed = options.seed if options.order_seed is None else options.order_seed
    sampler = BatchSampler(split.learnt, config, num_steps=num_steps, seed=order_seed)
    for step in range(num_steps):
        windows = sampler.draw(step)
        report = learner.step(pack(windows, max_context=config.max_context))
        num_skipped += not report.applied and report.num_labels > 0
        trained_tokens += sum(window.num_bases for window in windows) if report.applied else 0
        trained_branches += report.num_branches if report.applied else 0
        losses.append(report.loss)
        on_step(step + 1, num_steps)
        if (step + 1) * options.num_points // num_steps > step * options.num_points // num_steps:
            scores = held_out_scores(learner.averaged, split.held_out, config, depths=options.depths)
            point = _point(split, scores, options.depths, step=step + 1, trained_tokens=trained_tokens, losses=losses)
            curve.append(point)
            progress(f"step {step + 1} of {num_steps}: {curve[-1]['accept_length']} tokens a verification")
            losses.clear()
    if num_skipped == num_steps > 0:
        raise ConfigError(f"the loss was not finite in any of {num_steps} steps: correct {config.loss}")
    return {
        "recordings": [str(path) for path in options.recordings],
        "loss": str(LossMix.parse(config.loss)),
        "seed": options.seed,
        "depth": max(options.depths),
        "steps": num_steps,
        "skipped_steps": num_skipped,
        "learnt_traces": len(split.learnt),
        "learnt_tokens": split.num_learnt_tokens,
        "held_out_traces": len(split.held_out),
        "unusable_traces": split.num_unusable,
        "repeated_traces": split.num_repeated,
        "trained_tokens": trained_tokens,
        "trained_branches": trained_branches,
        "accept_length": curve[-1]["accept_length"],
        "recorded_accept_length": round(split.recorded.length, _DIGITS),
        "curve": curve,
        "held_out": _by_trace(split.held_out, [own[max(options.depths)] for own in scores]),
        "seconds": round(time.perf_counter() - started_s, 1),
    }


def _config(options: ReplayOptions) -> TrainerConfig:
    """The trainer's settings of this process's environment; those about Redis and folders are never used."""
    values: dict[str, Any] = {"redis_url": "", "model_key": "", "store_dir": Path(), "state_dir": Path()}
    if options.loss is not None:
        values["loss"] = str(LossMix.parse(options.loss))
    if options.draft_vocab_size is not None:
        values["draft_vocab_size"] = options.draft_vocab_size
    return load_config(model_dir=options.model_dir, seed=options.seed, ttt_steps=max(options.depths), **values)


def _first_draft(options: ReplayOptions, config: TrainerConfig) -> Eagle3Draft:
    if options.store is None:
        return fresh_draft(options.model_dir, draft_vocab_size=config.draft_vocab_size, seed=options.seed)
    store = DraftStore(options.store)
    version = store.lifecycle.newest_servable()
    if version is None:
        hint = (
            "`slipstream drafts list` says why" if store.latest() else "set --store to one that serve or train has used"
        )
        raise ConfigError(f"{options.store} holds no draft that may serve: {hint}")
    check_lineage(store, version, options.model_dir, draft_vocab_size=options.draft_vocab_size)
    embed_Vd = read_target_tensor(options.model_dir, "model.embed_tokens.weight")
    return load_draft(store, version, embed=embed_Vd, target_fingerprint=target_fingerprint(options.model_dir))


def read_split(
    recordings: Iterable[Path], model_dir: Path, draft: Eagle3Draft, *, seed: int, learn: bool = True
) -> Split:
    """Read the recordings and split them: a fifth of every domain, at least one of two traces, is held out; all without
    `learn`. Each text counts once, as in the trainer: recordings may overlap. Raises ConfigError where a recording is
    of another target or has too few traces.
    """
    fingerprint = target_fingerprint(model_dir)
    to_example = partial(
        make_example,
        draft_ids_V=draft_ids_by_target_id(draft.d2t, draft.config.vocab_size),
        feature_width=draft.fc.in_features,
        window=draft.config.max_position_embeddings,
    )
    examples: list[Example] = []
    recorded: list[AcceptanceCounts] = []
    texts: set[bytes] = set()
    num_unusable = num_repeated = 0
    for path in recordings:
        with RecordingReader(path) as reader:
            if reader.header.target_fingerprint != fingerprint:
                raise ConfigError(f"{path} was recorded from {reader.header.model}, another target: set --model to it")
            for trace in reader.traces():
                if (text_hash := provenance_of(trace).text_hash) in texts:
                    num_repeated += 1
                    continue
                try:
                    examples.append(to_example(trace))
                    recorded.append(recorded_rounds(trace))
                except TraceError:
                    num_unusable += 1
                    continue
                texts.add(text_hash)
            num_unusable += reader.num_damaged
    held_out = _held_out(examples, seed) if learn else set(range(len(examples)))
    if not held_out:
        raise ConfigError("the recordings hold too few traces: give at least two of one domain")
    return Split(
        learnt=[example for index, example in enumerate(examples) if learn and index not in held_out],
        held_out=[examples[index] for index in sorted(held_out)],
        recorded=sum((recorded[index] for index in held_out), AcceptanceCounts()),
        num_unusable=num_unusable,
        num_repeated=num_repeated,
    )


def _held_out(examples: Sequence[Example], seed: int) -> set[int]:
    """Indices of the examples that are held out."""
    by_domain: dict[str, list[int]] = defaultdict(list)
    for index, example in enumerate(examples):
        by_domain[example.domain].append(index)
    rng = random.Random(seed)
    chosen: set[int] = set()
    for indices in by_domain.values():
        count = max(round(HELD_OUT_SHARE * len(indices)), 1) if len(indices) > 1 else 0
        chosen.update(rng.sample(indices, count))
    return chosen


class BatchSampler:
    """Chooses the windows that each step learns from."""

    def __init__(self, examples: Sequence[Example], config: TrainerConfig, *, num_steps: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._examples, self._num_steps = examples, num_steps
        self._batch_tokens, self._max_bases = config.batch_tokens, config.max_bases
        self._num_known = 0
        self._unlearnt: deque[int] = deque()

    def draw(self, step: int) -> list[Window]:
        """Windows of different traces, of about `batch_tokens` bases together: one new trace, then random known ones.
        Where more than one new trace waits, all but the last of them are taken before known ones.
        """
        num_known = -(-(step + 1) * len(self._examples) // self._num_steps)
        self._unlearnt.extend(range(self._num_known, num_known))
        self._num_known = num_known
        drawn: dict[int, None] = {self._unlearnt.popleft(): None} if self._unlearnt else {}
        tokens = sum(self._examples[index].num_bases for index in drawn)
        while tokens < self._batch_tokens and len(drawn) < num_known:
            index = self._unlearnt.popleft() if len(self._unlearnt) > 1 else self._rng.randrange(num_known)
            if index not in drawn:
                drawn[index] = None
                tokens += self._examples[index].num_bases
        return [cut(self._examples[index], max_bases=self._max_bases, rng=self._rng) for index in drawn]


@contextmanager
def _gate_precision(draft: Eagle3Draft, config: TrainerConfig) -> Iterator[None]:
    """Multiply matrices as the gate does (trainer/release/gate.py): by default in bfloat16 where that is fast."""
    # Autocast caches the converted weights only of parameters that require a gradient.
    draft.requires_grad_(True)
    try:
        with autocast(draft.embed.device, is_wanted=config.autocast):
            yield
    finally:
        draft.requires_grad_(False)


def held_out_scores(
    draft: Eagle3Draft, examples: Sequence[Example], config: TrainerConfig, *, depths: Sequence[int]
) -> list[dict[int, AcceptanceCounts]]:
    """What the draft would commit on each of these traces, by depth, computed as the gate does."""
    with _gate_precision(draft, config):
        return [predict_acceptance(draft, [example], depths=depths) for example in examples]


def _by_trace(examples: Sequence[Example], scores: Sequence[AcceptanceCounts]) -> dict[str, list[float]]:
    """By trace id [tokens that the draft would commit, number of verifications]."""
    return {
        example.trace_id: [round(own.num_committed, _DIGITS), round(own.num_rounds, _DIGITS)]
        for example, own in zip(examples, scores, strict=True)
    }


def _point(
    split: Split,
    scores: Sequence[dict[int, AcceptanceCounts]],
    depths: Sequence[int],
    *,
    step: int,
    trained_tokens: int,
    losses: Sequence[float] = (),
) -> dict[str, Any]:
    """A point of the curve: acceptance on the held-out traces, and the mean loss since the point before."""
    by_domain: dict[str, list[dict[int, AcceptanceCounts]]] = defaultdict(list)
    for example, own in zip(split.held_out, scores, strict=True):
        by_domain[example.domain].append(own)
    found = {
        domain: {depth: sum((own[depth] for own in rows), AcceptanceCounts()) for depth in depths}
        for domain, rows in by_domain.items()
    }
    total = {depth: sum((row[depth] for row in found.values()), AcceptanceCounts()) for depth in depths}
    deepest = max(depths)
    return {
        "step": step,
        "trained_tokens": trained_tokens,
        "loss": round(sum(losses) / len(losses), _DIGITS) if losses else None,
        "accept_length": round(total[deepest].length, _DIGITS),
        "accept_length_by_depth": {str(depth): round(each.length, _DIGITS) for depth, each in total.items()},
        "accept_length_by_domain": {domain: round(row[deepest].length, _DIGITS) for domain, row in found.items()},
        "accept_rate_by_position": [round(rate, _DIGITS) for rate in total[deepest].rates],
    }
