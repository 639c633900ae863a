"""TRL's `rollout_func` on a Slipstream server: sends it the policy's new weights, and returns its samples.

    step t:  weights of step t ──▶ server     groups of steps t … t + α ──▶ server     samples of step t ──▶ TRL

With α = 0 the server waits while TRL trains. With α > 0 it meanwhile samples for the next α steps, with weights that
are at most α steps old (`max_staleness` of the groups). The samples include the logprobs of the policy that drew each
token, which weight the loss (`BehaviourLogprobs`).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
from trl import GRPOTrainer

from slipstream.client import Group, Rollouts, Sample

Chat = list[dict[str, str]]


class ServerRollouts:
    """TRL calls it once a step, with each prompt repeated for every sample of it."""

    def __init__(
        self,
        url: str,
        admin_key: str,
        targets: Path,
        *,
        upcoming: Callable[[int], Sequence[Chat]],
        num_samples: int,
        max_tokens: int,
        temperature: float,
        alpha: int = 0,
        seed: int = 0,
        keep_every: int = 0,
    ) -> None:
        """`targets` is the server's folder for new weights; `upcoming` gives the prompts of a step, each once. Weights
        of every so many steps stay in the folder; 0: none.
        """
        self._url, self._admin_key, self._targets = url, admin_key, targets
        self._upcoming, self._num_samples, self._alpha, self._seed = upcoming, num_samples, alpha, seed
        self._max_tokens, self._temperature, self._keep_every = max_tokens, temperature, keep_every
        self._threads = ThreadPoolExecutor(alpha + 1)
        self._begun: dict[int, Future[dict[tuple[str, int], Sample]]] = {}
        self.log: list[dict[str, Any]] = []
        """A row a step: seconds to send weights, seconds of waiting, tokens, and the samples' greatest age in steps."""

    def __call__(self, prompts: list[Chat], trainer: GRPOTrainer) -> dict[str, Any]:
        step, began_s = trainer.state.global_step, time.monotonic()
        if step:
            self._move(trainer, step)
        moved_s = time.monotonic()
        for ahead in range(step, step + self._alpha + 1):
            if ahead not in self._begun and (chats := self._upcoming(ahead)):
                self._begun[ahead] = self._threads.submit(self._sample, ahead, chats)
        samples = self._begun.pop(step).result()
        chosen = [samples[f"{step}-{at // self._num_samples}", at % self._num_samples] for at in range(len(prompts))]
        lags = [step - (sample.target_version or 0) for sample in chosen]
        self.log.append(
            {
                "step": step,
                "move_s": moved_s - began_s,
                "wait_s": time.monotonic() - moved_s,
                "tokens": sum(len(sample.tokens) for sample in chosen),
                "most_stale": max(lags),
                "unfinished": sum(sample.state != "finished" for sample in chosen),
            }
        )
        template = trainer.processing_class.apply_chat_template
        prompt_ids = [template(chat, add_generation_prompt=True, return_dict=False) for chat in prompts]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [list(sample.tokens) for sample in chosen],
            "logprobs": [list(sample.logprobs or ()) for sample in chosen],
        }

    def close(self) -> None:
        """Wait for the running rollouts."""
        self._threads.shutdown(cancel_futures=True)

    def _sample(self, step: int, chats: Sequence[Chat]) -> dict[tuple[str, int], Sample]:
        """Samples of a step by key. Seeds follow from step, prompt and number, so runs are reproducible."""
        groups = [
            Group(
                id=f"{step}-{at}",
                messages=chat,
                seeds=[self._seed + (step * len(chats) + at) * self._num_samples + n for n in range(self._num_samples)],
                max_staleness=self._alpha,
                max_tokens=self._max_tokens,
                temperature=self._temperature,
            )
            for at, chat in enumerate(chats)
        ]
        with Rollouts(self._url) as rollouts:
            return {sample.key: sample for sample in rollouts.start(groups)}

    def _move(self, trainer: GRPOTrainer, step: int) -> None:
        """Send the weights of this step to the server."""
        folder = self._targets / f"step-{step}"
        model = trainer.accelerator.unwrap_model(trainer.model)
        served: dict[int, torch.Tensor] = {}
        weights = {  # shared tensors stay shared, and are written once
            name: served.setdefault(weight.data_ptr(), weight.to(torch.bfloat16))
            for name, weight in model.state_dict().items()
        }
        model.save_pretrained(folder, state_dict=weights)
        answer = httpx.post(
            f"{self._url}/v1/target-version",
            headers={"authorization": f"Bearer {self._admin_key}"},
            json={"version": step, "path": folder.name},
            timeout=600,
            trust_env=False,
        )
        if not answer.is_success:
            raise RuntimeError(f"the server refused the weights of step {step}: {answer.text}")
        if not self._keep_every or step % self._keep_every:
            shutil.rmtree(folder)


class BehaviourLogprobs(GRPOTrainer):  # type: ignore[misc]  # trl has no types
    """Weights tokens by the policy that drew them: without this, TRL assumes that the newest weights did.

    With the loss `cispo` (arXiv 2506.13585) the gradient of a token is weighted by min(π_now / π_drawn, ε), which is
    truncated importance sampling; ε is `epsilon_high`.
    """

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        scored = super()._generate_and_score_completions(inputs)
        scored["old_per_token_logps"] = scored["sampling_per_token_logps"]
        return scored
