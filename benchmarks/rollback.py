"""Bad drafts under load: how long they serve, and that nobody loses more than speed.

    python -m benchmarks.rollback [--quick] [--json FILE] [--prompts FILE.jsonl] [--store DIR]

Clients ask the same questions again and again; each answer is compared with the one from before. Beside them a version
is published, as the trainer would, and the follower does the rest:

* random weights; NaN weights, whose file says that it is whole; the good draft with noise on its weights, as much as
  takes a tenth of its accept length; and copies of the good draft. With --quick the noise takes three tenths, which
  shows in seconds and not in minutes, and no copies are tried.

The good draft is trained here on the answers, or is the last good one of `--store`. The engine computes in float32,
where text does not depend on how many requests decode together.

Targets: random weights are rolled back within 50 rounds or 5 s, the noisy draft within 2,000 rounds, NaN is refused, no
good copy is rolled back, no request fails, no text changes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from benchmarks.common.report import Spread, Target, fill_in, finish, parser, pick_prompts
from benchmarks.common.engines import answers_of, ask, engine_with
from benchmarks.live import good_draft
from benchmarks.versions import add_first, add_version
from serving.hotswap import DraftFollower
from serving.local.engine import LocalEngine
from serving.watch import LiveWatch
from slipstream.models import resolve_model
from speculator.checkpoint import apply_state, draft_state, target_fingerprint
from speculator.embedded_redis import EmbeddedRedis
from speculator.fresh import fresh_draft
from speculator.lifecycle import State, Transition
from speculator.model import Eagle3Draft
from speculator.pointer import DraftPointer
from speculator.redis_client import connect
from speculator.store import DraftStore
from speculator.trace import Trace
from trainer.batch import Example
from trainer.evaluate import predict_acceptance

DEPTH = 4
# Questions come again and again here: proposals from their earlier answers would leave the drafts nothing to do.
SETTINGS = {"dtype": "float32", "depth": DEPTH, "suffix_depth": 0}
CLIENTS = 8
LONGEST_TRIAL_S = 900.0
SETTLED = (State.PROMOTED, State.QUARANTINED)


@dataclass
class Load:
    """Clients that ask their questions in turn until the block ends; every answer must be the known one."""

    engine: LocalEngine
    prompts: Sequence[Sequence[int]]
    known: Sequence[Sequence[int]]
    max_tokens: int
    answers: int = 0
    failed: int = 0
    changed: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    async def _run(self) -> None:
        await asyncio.gather(*(self._client(number) for number in range(CLIENTS)))

    async def _client(self, number: int) -> None:
        turn = number
        while not self._stop.is_set():
            index = turn % len(self.prompts)
            try:
                tokens = await ask(self.engine, f"{turn}", self.prompts[index], self.max_tokens)
            except Exception:
                self.failed += 1
            else:
                self.answers += 1
                self.changed += tokens != self.known[index]
            turn += CLIENTS


def noisy(draft: Eagle3Draft, share: float, seed: int = 1) -> dict[str, Tensor]:
    """The draft's tensors with noise of `share` of their spread; `share` infinite is noise alone."""
    generator = torch.Generator().manual_seed(seed)
    state = draft_state(draft)
    for name, tensor in state.items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
            mixed = noise if share == float("inf") else tensor.float() + share * noise
            state[name] = mixed.to(tensor.dtype)
    return state


def subtly_worse(
    draft: Eagle3Draft, examples: Sequence[Example], loss: float, *, seed: int = 1
) -> tuple[dict[str, Tensor], float]:
    """Tensors with as much noise as takes `loss` of the accept length on these answers, and what it does take."""

    def length(state: dict[str, Tensor]) -> float:
        copy = Eagle3Draft(draft.config, draft.embed, draft.d2t)
        apply_state(copy, state)
        return predict_acceptance(copy, examples, depths=[DEPTH], min_confidence=0.15)[DEPTH].length

    good = length(draft_state(draft))
    low, high = 0.0, 2.0
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (middle, high) if length(noisy(draft, middle, seed)) > (1 - loss) * good else (low, middle)
    worse = noisy(draft, high, seed)
    return worse, 1 - length(worse) / good


@dataclass
class Scene:
    store: DraftStore
    pointer: DraftPointer
    engine: LocalEngine
    fingerprint: str

    def add(self, state: dict[str, Tensor], draft: Eagle3Draft) -> int:
        """A version that has passed the gate on paper."""
        return add_version(self.store, state, draft, self.fingerprint)

    def add_nan(self, good: int) -> int:
        """A version with NaN weights whose manifest fits them: no writer of ours makes it."""
        version = (self.store.latest() or 0) + 1
        source, folder = (self.store.root / "versions" / f"{number:06d}" for number in (good, version))
        shutil.copytree(source, folder)
        weights = self.store.load(good)
        safetensors.torch.save_file(
            {**weights, "norm.weight": torch.full_like(weights["norm.weight"], float("nan"))},
            folder / "model.safetensors",
        )
        manifest = json.loads((folder / "manifest.json").read_bytes())
        digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        (folder / "manifest.json").write_text(json.dumps({**manifest, "version": version, "weights_sha256": digest}))
        for state in (State.WRITTEN, State.VALIDATED, State.SCORED):
            self.store.lifecycle.move(version, state, actor="benchmark")
        return version

    def try_out(self, version: int) -> Transition:
        """Publish a version and wait for what becomes of it. Raises TimeoutError."""
        self.pointer.publish(version)
        deadline = time.monotonic() + LONGEST_TRIAL_S
        while time.monotonic() < deadline:
            last = self.store.lifecycle.history(version)[-1]
            if last.state in SETTLED and self.engine.health().alive:
                print(f"version {version}: {last.state.value}, {last.reason}, {last.numbers}", flush=True)
                return last
            time.sleep(0.05)
        raise TimeoutError(f"version {version} is {last.state.value} after {LONGEST_TRIAL_S:.0f} s")


def main() -> None:
    options = parser("How long bad drafts serve, and what they cost")
    options.add_argument("--store", type=Path, metavar="DIR", help="take its last good draft instead of training one")
    options.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options.add_argument("--questions", type=int, help="different prompts; default 24, quick 8")
    options.add_argument("--max-tokens", type=int, default=64)
    options.add_argument("--train-steps", type=int, help="default 300, quick 60")
    options.add_argument(
        "--loss", type=float, help="share of the accept length that noise takes; default 0.1, quick 0.3"
    )
    options.add_argument("--repeats", type=int, help="good copies that are tried; default 20, quick none")
    arguments = options.parse_args()
    fill_in(arguments, {"questions": (8, 24), "train_steps": (60, 300), "loss": (0.3, 0.1), "repeats": (0, 20)})
    torch.set_num_threads(arguments.threads)
    model_dir = resolve_model(arguments.model)
    traces: list[Trace] = []
    first = fresh_draft(model_dir, seed=0)
    with engine_with(model_dir, first, arguments.threads, settings=SETTINGS, on_trace=traces.append) as engine:
        prompts = [
            engine.tokenizer.encode_chat([{"role": "user", "content": prompt.text}])[-512:]
            for prompt in pick_prompts(arguments.prompts, arguments.questions)
        ]
        known = asyncio.run(answers_of(engine, prompts, arguments.max_tokens))
    good, examples = good_draft(arguments.store, model_dir, traces, arguments.train_steps)
    worse, loss = subtly_worse(good, examples, arguments.loss)
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(Path(folder) / "redis") as redis:
        _run(arguments, Path(folder) / "drafts", redis.url, model_dir, (prompts, known), good, worse, loss)


def _run(
    arguments: argparse.Namespace,
    root: Path,
    redis_url: str,
    model_dir: Path,
    traffic: tuple[list[list[int]], list[list[int]]],
    good: Eagle3Draft,
    worse: dict[str, Tensor],
    loss: float,
) -> None:
    store, fingerprint, watch = DraftStore(root), target_fingerprint(model_dir), LiveWatch(1)
    load = partial(store.load, expected_fingerprint=fingerprint)
    in_service = Eagle3Draft(good.config, good.embed, good.d2t)
    apply_state(in_service, draft_state(good))
    with (
        connect(redis_url) as client,
        engine_with(
            model_dir,
            in_service,
            arguments.threads,
            settings=SETTINGS,
            load_draft=load,
            on_round=watch.observe,
        ) as engine,
    ):
        pointer = DraftPointer(client, "benchmark")
        scene = Scene(store, pointer, engine, fingerprint)
        add_first(store, good, fingerprint)
        follower = DraftFollower(engine, pointer, engine_id="benchmark", watch=watch, lifecycle=store.lifecycle)
        clients = Load(engine, *traffic, arguments.max_tokens)
        follower.start()
        try:
            with clients.running():
                useless = scene.try_out(scene.add(noisy(good, float("inf")), good))
                nan = scene.try_out(scene.add_nan(1))
                subtle = scene.try_out(scene.add(worse, good))
                copies = [scene.try_out(scene.add(draft_state(good), good)) for _ in range(arguments.repeats)]
        finally:
            follower.stop()
        stalls = [report.stall_ms for _, report in follower.log.installed]
    _finish(arguments, clients, useless, nan, subtle, copies, loss, stalls)


def _finish(
    arguments: argparse.Namespace,
    clients: Load,
    useless: Transition,
    nan: Transition,
    subtle: Transition,
    copies: Sequence[Transition],
    loss: float,
    stalls: Sequence[float],
) -> None:
    is_caught = {name: last.state is State.QUARANTINED for name, last in (("useless", useless), ("subtle", subtle))}
    rounds, seconds = (float(useless.numbers.get(name) or 0) for name in ("rounds", "seconds"))
    subtle_rounds = float(subtle.numbers.get("rounds") or 0)
    rolled_back = sum(last.state is State.QUARANTINED for last in copies)
    overrun = min(rounds / 50, seconds / 5) if is_caught["useless"] else float("inf")
    stall = Spread.of(stalls)
    finish(
        [
            (f"{CLIENTS} clients, float32, depth {DEPTH}", f"{clients.answers} answers"),
            ("random weights: rounds, seconds until rolled back", f"{rounds:.0f}, {seconds:.2f}"),
            ("NaN weights", f"{nan.state.value}: {nan.reason}"),
            ("noise on the weights: accept length lost, offline", f"{loss:.1%}"),
            ("  lost, live", f"{-float(subtle.numbers.get('accept_change') or 0):.1%}"),
            ("  became, after rounds", f"{subtle.state.value}, {subtle_rounds:.0f}"),
            ("good copies rolled back", f"{rolled_back} of {len(copies)}"),
            ("failed requests, changed answers", f"{clients.failed}, {clients.changed}"),
            ("stall of a swap, ms", stall),
        ],
        [
            Target("random_rounds_over_50_or_seconds_over_5", overrun, 1.0, at_least=False),
            Target("nan_refused", float(nan.state is State.QUARANTINED), 1.0),
            Target("subtle_rounds", subtle_rounds if is_caught["subtle"] else float("inf"), 2000, at_least=False),
            *([Target("good_rolled_back", rolled_back, 0, at_least=False)] if copies else []),
            Target("failed_requests", clients.failed, 0, at_least=False),
            Target("changed_answers", clients.changed, 0, at_least=False),
        ],
        {
            "clients": CLIENTS,
            "answers": clients.answers,
            "failed_requests": clients.failed,
            "changed_answers": clients.changed,
            "random": {"state": useless.state.value, **useless.numbers},
            "nan": {"state": nan.state.value, "reason": nan.reason},
            "subtle": {"state": subtle.state.value, "offline_loss": round(loss, 4), **subtle.numbers},
            "good": [{"state": last.state.value, **last.numbers} for last in copies],
            "swap_stall_ms": stall.to_dict(),
        },
        arguments.json,
    )


if __name__ == "__main__":
    main()
