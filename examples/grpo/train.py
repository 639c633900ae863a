"""Run GRPO on this machine: a Slipstream server, its trainer of the draft head, and TRL.

    python -m examples.grpo.train --steps 30
    python -m examples.grpo.train --steps 30 --alpha 1 --out runs/late
    python -m examples.grpo.train --engine sglang --out runs/sglang -- --sglang-python .venv-sglang/bin/python

What follows `--` goes to `slipstream serve`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig

from examples.grpo.rollouts import BehaviourLogprobs, Chat, ServerRollouts
from examples.grpo.sums import make_sums, reward
from slipstream.children import running_child
from slipstream.demo.servers import Scrape, wait_until_ready
from slipstream.models import BUNDLED_MODEL, resolve_model
from speculator.draft.eagle3 import is_fast
from speculator.host import free_port
from speculator.redis.embedded import EmbeddedRedis

_ADMIN_KEY = "of-this-run-alone"
_READY_TIMEOUT_S = 600


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--engine", choices=("local", "sglang"), default="local")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=4, help="a step")
    parser.add_argument("--samples", type=int, default=8, help="a prompt")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--alpha", type=int, default=0, help="steps that a sample may be old; 0 is synchronous")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--frozen-draft", action="store_true", help="let nothing learn to draft")
    parser.add_argument("--drafts", type=Path, help="begin with a copy of this folder of drafts; default: a fresh one")
    parser.add_argument("--keep-every", type=int, default=0, metavar="N", help="keep the weights of every N-th step")
    parser.add_argument("--out", type=Path, default=Path("runs/grpo"), help="folder of logs, drafts and steps.jsonl")
    parser.add_argument("serve", nargs="*", help="further arguments of `slipstream serve`")
    return parser.parse_args(arguments)


@contextlib.contextmanager
def serving(args: argparse.Namespace, model: Path) -> Iterator[str]:
    """Run a server and its trainer; yields the server's address."""
    folder: Path = args.out
    url = f"http://127.0.0.1:{(port := free_port())}"
    settings = {
        "SLIPSTREAM_GATEWAY_ADMIN_KEY": _ADMIN_KEY,
        "SLIPSTREAM_GATEWAY_TARGETS_DIR": str((folder / "targets").resolve()),
    }
    with contextlib.ExitStack() as opened:
        redis = opened.enter_context(EmbeddedRedis(folder / "redis", ends_with_us=True))
        common = ["--model", str(model), "--redis-url", redis.url, "--store", str(folder / "drafts")]
        serve = [*common, "--engine", args.engine, "--port", str(port), "--capture", *args.serve]
        server = opened.enter_context(running_child("serve", serve, folder, **settings))
        wait_until_ready(url, [server], timeout_s=_READY_TIMEOUT_S)
        if not args.frozen_draft:
            opened.enter_context(running_child("train", [*common, "--state", str(folder / "state")], folder))
        yield url


class Steps(TrainerCallback):  # type: ignore[misc]  # transformers has none
    """Prints each step's figures and appends them to a file."""

    def __init__(self, url: str, rollouts: ServerRollouts, file: Path) -> None:
        self._url, self._rollouts, self._file = url, rollouts, file
        self._before, self._began_s = self._scrape(), time.monotonic()

    def on_log(self, _: Any, state: Any, __: Any, logs: dict[str, float] | None = None, **___: Any) -> None:
        if logs is None or "reward" not in logs:
            return
        now = self._scrape()
        row = {
            **self._rollouts.log[-1],
            "reward": logs["reward"],
            "accept_length": now.since(self._before).accept_length,
            "seconds": time.monotonic() - self._began_s,
        }
        self._before = now
        with self._file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        accepted = row["accept_length"] or 1.0
        print(
            f"step {state.global_step:3}  reward {row['reward']:.3f}  {row['tokens']:4} tokens after "
            f"{row['wait_s']:5.1f} s, {accepted:.2f} a round, {row['most_stale']} steps old at most  "
            f"({row['seconds']:.0f} s in all)",
            flush=True,
        )

    def _scrape(self) -> Scrape:
        return Scrape.parse(0, httpx.get(f"{self._url}/metrics", trust_env=False).text)


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    try:
        args.out.mkdir(parents=True)
    except FileExistsError:
        # Its figures, weights and traces would be mixed with this run's.
        sys.exit(f"{args.out} exists: choose another --out, or remove it")
    (args.out / "targets").mkdir()
    if args.drafts:
        shutil.copytree(args.drafts, args.out / "drafts")
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    disable_progress_bar()
    model = resolve_model(args.model)
    data = make_sums(args.prompts * args.steps, seed=args.seed)

    def upcoming(step: int) -> list[Chat]:
        return data[step * args.prompts : (step + 1) * args.prompts]["prompt"] if step < args.steps else []

    with serving(args, model) as url:
        rollouts = ServerRollouts(
            url,
            _ADMIN_KEY,
            args.out / "targets",
            upcoming=upcoming,
            num_samples=args.samples,
            max_tokens=args.max_tokens,
            temperature=1.0,
            alpha=args.alpha,
            seed=args.seed,
            keep_every=args.keep_every,
        )
        config = GRPOConfig(
            output_dir=str(args.out / "trl"),
            per_device_train_batch_size=args.prompts * args.samples,
            gradient_accumulation_steps=1,
            num_generations=args.samples,
            max_completion_length=args.max_tokens,
            max_steps=args.steps,
            learning_rate=args.learning_rate,
            lr_scheduler_type="constant",
            loss_type="cispo",
            epsilon_high=5.0,
            beta=0.0,
            temperature=1.0,
            shuffle_dataset=False,
            seed=args.seed,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            bf16=is_fast(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
            activation_checkpointing=False,
            gradient_checkpointing=None,
            model_init_kwargs={"dtype": "float32"},
        )
        trainer = BehaviourLogprobs(
            str(model),
            reward_funcs=reward,
            args=config,
            train_dataset=data,
            rollout_func=rollouts,
            callbacks=[Steps(url, rollouts, args.out / "steps.jsonl")],
        )
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.train()
        finally:
            rollouts.close()


if __name__ == "__main__":
    main(sys.argv[1:])
