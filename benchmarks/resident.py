"""The memory that the trainer's process holds with a full replay.

python -m benchmarks.resident RECORDING MODEL_DIR TOKENS STEPS      is that process, and prints JSON
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from speculator.errors import TraceError
from speculator.fresh import fresh_draft
from speculator.labels import draft_ids_by_target_id
from speculator.model import Eagle3Draft
from speculator.recording import RecordingReader
from trainer.allocator import keep_freed_memory
from trainer.batch import cut, make_example, pack
from trainer.checkpoint import Progress, save_checkpoint
from trainer.config import load_config
from trainer.provenance import Stored, provenance_of
from trainer.replay import Replay
from trainer.run import run_trainer  # noqa: F401 - the service's own modules take memory too
from trainer.step import Learner

# What the launcher and trainer/run.py set for the service.
SERVICE_ENV = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256"}

_GB = 1e9


def measure_resident(recording: Path, model_dir: Path, *, num_tokens: int, num_steps: int) -> dict[str, float]:
    """GB that a process like the trainer's holds at the end and held at most, and of that the replay's.

    It has the service's environment, and a replay of `num_tokens` completion tokens, and takes `num_steps` steps.
    """
    command = [sys.executable, "-m", "benchmarks.resident", recording, model_dir, num_tokens, num_steps]
    done = subprocess.run(
        [str(part) for part in command], env={**os.environ, **SERVICE_ENV}, check=True, stdout=subprocess.PIPE
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _be_like_the_trainer(recording: Path, model_dir: Path, num_tokens: int, num_steps: int) -> dict[str, float]:
    unused = {"redis_url": "", "model_key": "", "store_dir": Path(), "state_dir": Path()}
    config = load_config(model_dir=model_dir, **unused)
    keep_freed_memory()
    torch.set_num_threads(config.num_threads)
    draft = fresh_draft(model_dir, draft_vocab_size=config.draft_vocab_size, seed=config.seed)
    rng = random.Random(config.seed)
    replay = Replay(
        max_bytes=1 << 40,  # whatever the tokens take: how many there are is the question here
        max_waiting=config.max_waiting_traces,
        recent_share=config.replay_recent_share,
        max_tenant_share=config.max_tenant_share,
        max_draft_lag=config.max_draft_lag,
        rng=rng,
    )
    for number, stored in enumerate(_copies(recording, draft)):
        provenance = dataclasses.replace(stored.provenance, text_hash=number.to_bytes(16))
        replay.restore(Stored(example=stored.example, provenance=provenance), domain=provenance.domain)
        num_tokens -= provenance.num_completion_tokens
        if num_tokens <= 0:
            break
    learner = Learner(draft, config)
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(num_steps):
            draw = replay.draw(config.batch_tokens, published=1)
            windows = [cut(one.stored.example, max_bases=config.max_bases, rng=rng) for one in draw.batch]
            learner.step(pack(windows, max_context=config.max_context))
        progress = Progress(target_fingerprint="", learnt_tokens=0, new_tokens=0, num_traces=0, used_trace_ids=[])
        save_checkpoint(Path(scratch), {**learner.state(), "d2t": draft.d2t}, progress)
    sizes = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if line[:2] == "Vm")
    resident, peak = (1024 * int(sizes[name].split()[0]) / _GB for name in ("VmRSS", "VmHWM"))
    return {"resident_gb": resident, "peak_gb": peak, "replay_gb": replay.num_bytes / _GB}


def _copies(recording: Path, draft: Eagle3Draft) -> Iterator[Stored]:
    """The recording's traces, again and again, each decoded anew as it would arrive."""
    draft_ids_V = draft_ids_by_target_id(draft.d2t, draft.config.vocab_size)
    while True:
        with RecordingReader(recording) as reader:
            for trace in reader.traces():
                try:
                    example = make_example(trace, draft_ids_V, feature_width=draft.fc.in_features)
                except TraceError:
                    continue
                yield Stored(example=example, provenance=provenance_of(trace))


if __name__ == "__main__":
    _recording, _model_dir, _num_tokens, _num_steps = sys.argv[1:]
    _found = _be_like_the_trainer(Path(_recording), Path(_model_dir), int(_num_tokens), int(_num_steps))
    print(json.dumps(_found))
