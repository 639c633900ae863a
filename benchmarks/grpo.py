"""RL on a toy task with a target that really moves: a minimal GRPO loop around the local engine.

    python -m benchmarks.grpo [--quick] [--json FILE] [--prompts FILE.jsonl] [--steps N] …

    sample n answers to each prompt ─▶ reward ─▶ advantage within the group ─▶ a few optimiser steps on the policy
      ▲         │ traces                                                                       │ safetensors
      │         ▼                                                                              ▼
      └── live draft ◀── trainer                             engine ◀── the target is of version t + 1

The reward is the share of an answer's words that begin with a capital letter: whoever reads the answers sees it rise.
The policy is a Hugging Face model of which the last layers learn; the engine serves copies of it, announced version by
version as `POST /v1/target-version` does, and the live draft learns from what was sampled (trainer/).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.common import Target, fill_in, finish, parser, pick_prompts
from benchmarks.in_process import Loop, loop, request_for
from slipstream.models import resolve_model
from slipstream.topics import Prompt
from speculator.bfloat16 import autocast
from speculator.checkpoint import weight_files
from speculator.fresh import fresh_draft

CLIP = 0.2
BATCH = 8
"""Samples of one optimiser step."""
MEASURED = 16
"""Samples from which the policy's distance is measured."""
ENGINE: dict[str, Any] = {"num_slots": 16, "max_waiting": 4096, "suffix_depth": 0, "context_length": 512}
# One step for each new answer, beside older ones, and none without: a step of the policy does not wait for more.
TRAINER: dict[str, Any] = {"publish_min_tokens": 200, "max_passes": 0.01, "max_tenant_share": 1.0}


@dataclass(frozen=True, kw_only=True)
class Sample:
    prompt: tuple[int, ...]
    answer: list[int]
    logprobs: list[float]
    """Of the answer's tokens, as the engine sampled them: the behaviour policy's."""
    reward: float
    advantage: float
    """The reward, less the mean of its group, over the group's standard deviation."""


def capitals(text: str) -> float:
    """The share of words that begin with a capital letter."""
    words = [word for word in text.split() if word[0].isalpha()]
    return sum(word[0].isupper() for word in words) / max(len(words), 1)


class Policy:
    """The target in training: float32 weights, of which those of the last layers learn."""

    def __init__(self, model_dir: Path, *, num_layers: int, learning_rate: float) -> None:
        self._model_dir = model_dir
        self.model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).requires_grad_(False)
        layers = list(self.model.model.layers)[-num_layers:]
        self._learning = [weight for layer in layers for weight in layer.requires_grad_(True).parameters()]
        self._start = [weight.detach().clone() for weight in self._learning]
        self._optimizer = torch.optim.AdamW(self._learning, lr=learning_rate, weight_decay=0.0)

    def update(self, samples: Sequence[Sample]) -> None:
        """One pass over the samples: the clipped objective of GRPO (arXiv 2402.03300), without its term for the
        distance.
        """
        for part in _batches(len(samples)):
            losses = []
            for sample, now_T in zip(samples[part], self.logprobs(samples[part]), strict=True):
                ratio_T = (now_T - torch.tensor(sample.logprobs)).exp()
                clipped_T = ratio_T.clamp(1 - CLIP, 1 + CLIP)
                losses.append(-torch.minimum(ratio_T * sample.advantage, clipped_T * sample.advantage).mean())
            self._optimizer.zero_grad()
            torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self._learning, 1.0)
            self._optimizer.step()

    def logprobs(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Of each answer's tokens [T]. Answers are padded at their end, where nothing before them looks."""
        rows = [[*sample.prompt, *sample.answer] for sample in samples]
        longest = max(map(len, rows))
        tokens_BL = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        with autocast(self.model.device, is_wanted=True):
            hidden_BLd = self.model.model(tokens_BL).last_hidden_state
        found = []
        for sample, row, hidden_Ld in zip(samples, rows, hidden_BLd, strict=True):
            start = len(sample.prompt)
            with autocast(self.model.device, is_wanted=True):
                logits_TV = self.model.lm_head(hidden_Ld[start - 1 : len(row) - 1])
            found.append(logits_TV.float().log_softmax(-1).gather(-1, torch.tensor(row[start:])[:, None])[:, 0])
        return found

    @torch.no_grad()
    def distance(self, samples: Sequence[Sample]) -> float:
        """KL(policy ‖ policy of the start) in nats a token, from samples of the policy."""
        now = [one for part in _batches(len(samples)) for one in self.logprobs(samples[part])]
        newest = [weight.clone() for weight in self._learning]
        self._put(self._start)
        start = [one for part in _batches(len(samples)) for one in self.logprobs(samples[part])]
        self._put(newest)
        return float((torch.cat(now) - torch.cat(start)).mean())

    def save(self, folder: Path) -> Path:
        """As an RL library would hand it over: safetensors in bfloat16, under the names of the base model."""
        names = weight_files(self._model_dir)
        folder.mkdir(parents=True)
        shutil.copy(self._model_dir / "config.json", folder)
        state = {name: tensor.bfloat16() for name, tensor in self.model.state_dict().items() if name in names}
        safetensors.torch.save_file(state, folder / "model.safetensors", {"format": "pt"})
        return folder

    def _put(self, weights: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for place, weight in zip(self._learning, weights, strict=True):
                place.copy_(weight)


def _batches(count: int) -> list[slice]:
    return [slice(first, first + BATCH) for first in range(0, count, BATCH)]


def sample_groups(
    served: Loop, prompts: Sequence[Prompt], *, size: int, max_tokens: int, seed: int, reward: Callable[[str], float]
) -> list[Sample]:
    """`size` answers to each prompt, with the rewards that the group makes of them."""
    requests = [
        request_for(
            served.engine,
            f"{seed}-{row}-{number}",
            prompt.text,
            max_tokens=max_tokens,
            seed=1000 * (seed * len(prompts) + row) + number,
            domain=prompt.domain,
            group_id=f"{seed}-{row}",
        )
        for row, prompt in enumerate(prompts)
        for number in range(size)
    ]
    answers = served.sample(requests)
    rewards = [reward(served.engine.tokenizer.decode(answer.tokens)) for answer in answers]
    samples = []
    for first in range(0, len(requests), size):
        group = rewards[first : first + size]
        mean, deviation = statistics.fmean(group), statistics.pstdev(group)
        for index in range(first, first + size):
            samples.append(
                Sample(
                    prompt=requests[index].prompt_token_ids,
                    answer=answers[index].tokens,
                    logprobs=answers[index].logprobs,
                    reward=rewards[index],
                    advantage=(rewards[index] - mean) / (deviation + 1e-4),
                )
            )
    return samples


def train(
    served: Loop,
    policy: Policy,
    prompts: Callable[[int], Sequence[Prompt]],
    folder: Path,
    *,
    steps: int,
    size: int,
    max_tokens: int,
    reward: Callable[[str], float] = capitals,
) -> Iterator[dict[str, Any]]:
    """The loop: what each step sampled, before the policy and the draft have learnt from it."""
    stall_ms = 0.0
    for step in range(steps):
        started_s = time.perf_counter()
        samples = sample_groups(served, prompts(step), size=size, max_tokens=max_tokens, seed=step, reward=reward)
        sampled_s = time.perf_counter() - started_s
        distance = policy.distance(samples[:: max(1, len(samples) // MEASURED)])
        yield {
            "step": step,
            "target_version": served.engine.target_version,
            "draft_version": served.engine.draft_version,
            "reward": round(statistics.fmean(sample.reward for sample in samples), 4),
            "kl_from_start": round(distance, 4),
            "sampling_s": round(sampled_s, 1),
            "tokens": sum(len(sample.answer) for sample in samples),
            "stall_ms": round(stall_ms, 1),
        }
        served.learn()
        policy.update(samples)
        written = policy.save(folder / f"step-{step + 1}")
        stall_ms = served.engine.move_target(step + 1, written).stall_ms
        shutil.rmtree(written)


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, help="of the policy; default 8, quick 3")
    options.add_argument("--groups", type=int, help="prompts a step; default 4, quick 3")
    options.add_argument("--size", type=int, default=8, help="answers to a prompt")
    options.add_argument("--max-tokens", type=int, default=32)
    options.add_argument("--learning-rate", type=float, default=1.5e-4)
    options.add_argument("--layers", type=int, default=8, help="of the policy that learn, from the last one on")
    options.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = options.parse_args()
    fill_in(arguments, {"steps": (3, 8), "groups": (3, 4)})
    report(arguments)


def report(arguments: argparse.Namespace) -> None:
    model_dir = resolve_model(arguments.model)
    prompts = pick_prompts(arguments.prompts, arguments.steps * arguments.groups)
    policy = Policy(model_dir, num_layers=arguments.layers, learning_rate=arguments.learning_rate)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        draft = fresh_draft(model_dir, seed=0)
        with loop(model_dir, folder, draft=draft, threads=arguments.threads, engine=ENGINE, trainer=TRAINER) as served:
            for row in train(
                served,
                policy,
                lambda step: prompts[step * arguments.groups : (step + 1) * arguments.groups],
                folder,
                steps=arguments.steps,
                size=arguments.size,
                max_tokens=arguments.max_tokens,
            ):
                rows.append(row)
                print(row, flush=True)
    gain = rows[-1]["reward"] - rows[0]["reward"]
    table = [(f"step {row['step']}", ", ".join(f"{key} {row[key]}" for key in list(row)[1:])) for row in rows]
    finish(table, [Target("reward gained", gain, 0.0)], {"steps": rows}, arguments.json)


if __name__ == "__main__":
    main()
