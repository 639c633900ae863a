"""What each process of `benchmarks.ranks` runs: a rank under `torchrun`, or one process alone.

python -m benchmarks.rank curve OPTIONS.json        learns the given batches; rank 0 writes what it saw
python -m benchmarks.rank train NOTES WORDS…        is `slipstream train WORDS…`, and notes what becomes of traces
"""

from __future__ import annotations

import copy
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch

from benchmarks.faults.witness import watch
from benchmarks.resident import SERVICE_ENV
from slipstream.cli import main as slipstream
from speculator.fresh import fresh_draft
from speculator.labels import draft_ids_by_target_id
from speculator.recording import RecordingReader
from trainer.allocator import keep_freed_memory
from trainer.batch import Example, Window, make_example, pack
from trainer.config import TrainerConfig, load_config
from trainer.distributed import Ranks, join_ranks
from trainer.step import Learner, StepReport


class CurveOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The same for every rank. `answers_per_step` are those of all ranks together."""

    recording: str
    model_dir: str
    num_steps: int
    answers_per_step: int
    draft_vocab_size: int
    sharded: bool
    out: str
    """A JSON file; the weights go beside it."""


def learn_curve(options: CurveOptions) -> None:
    """In float32, where sums in another order are the only difference, and as the service multiplies, in bfloat16."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", SERVICE_ENV["ONEDNN_PRIMITIVE_CACHE_CAPACITY"])
    keep_freed_memory()
    torch.set_num_threads(1)
    ranks = join_ranks(torch.device("cpu"))
    draft = fresh_draft(Path(options.model_dir), draft_vocab_size=options.draft_vocab_size, seed=0)
    draft_ids_V = draft_ids_by_target_id(draft.d2t, draft.config.vocab_size)
    with RecordingReader(Path(options.recording)) as reader:
        examples = [make_example(trace, draft_ids_V, feature_width=draft.fc.in_features) for trace in reader.traces()]
    found, out = {}, Path(options.out)
    for name, autocast in (("float32", False), ("bfloat16", True)):
        config = _config(options, autocast=autocast)
        learner = Learner(copy.deepcopy(draft, {id(draft.embed): draft.embed}), config, ranks)
        found[name] = _learn(learner, examples, options, config, ranks)
        state = learner.state()
        if ranks.leads:
            safetensors.torch.save_file(state, out.with_suffix(f".{name}.safetensors"))
    if ranks.leads:
        out.write_text(json.dumps(found))
    ranks.close()


def _learn(
    learner: Learner, examples: list[Example], options: CurveOptions, config: TrainerConfig, ranks: Ranks
) -> dict[str, Any]:
    rng, reports = random.Random(0), list[StepReport]()
    for step in range(options.num_steps):
        if step == 1:  # the first one prepares kernels, and the optimiser's state
            start_s = time.perf_counter()
        chosen = rng.sample(examples, options.answers_per_step)[ranks.rank :: ranks.size]
        reports.append(learner.step(pack([_window(one, config) for one in chosen], max_context=config.max_context)))
        assert reports[-1].applied, "recorded answers are finite"
    seconds = time.perf_counter() - start_s
    return {
        "loss": [report.loss for report in reports],
        "accept_length": [report.accept_length for report in reports],
        "tokens_per_s": sum(report.num_bases for report in reports[1:]) / seconds,
        "kept_bytes": learner.num_kept_bytes,
    }


def _config(options: CurveOptions, *, autocast: bool) -> TrainerConfig:
    unused: dict[str, Any] = {"redis_url": "", "model_key": "", "store_dir": Path(), "state_dir": Path()}
    return load_config(model_dir=Path(options.model_dir), autocast=autocast, sharded=options.sharded, **unused)


def _window(example: Example, config: TrainerConfig) -> Window:
    return Window(example=example, start=0, num_bases=min(example.num_bases, config.max_bases))


def train(notes_path: str, words: list[str]) -> None:
    notes = os.open(notes_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(notes, f"alive {os.environ.get('RANK', '0')} {os.getpid()}\n".encode())
    watch(notes)
    sys.argv = ["slipstream", "train", *words]
    slipstream()


if __name__ == "__main__":
    if sys.argv[1] == "curve":
        learn_curve(msgspec.json.decode(Path(sys.argv[2]).read_bytes(), type=CurveOptions))
    else:
        train(sys.argv[2], sys.argv[3:])
