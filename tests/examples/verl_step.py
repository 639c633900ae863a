"""Runs examples/verl with verl's own classes: python verl_step.py URL MODEL TARGETS NEW_WEIGHTS, in verl's environment.

Writes JSON: the batches that verl's agent loop worker made before and after its rollout sent new weights, the logprobs
that transformers computes for them from verl's inputs, and verl's GRPO advantages.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import safetensors.torch
import torch
from hydra import compose, initialize_config_dir
from transformers import AutoModelForCausalLM
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_functional import logprobs_from_logits
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class

PROMPTS = ["what is 1", "hello there", "abc"]
SAMPLES = 4


def configured(url: str, model: str, targets: str) -> Any:
    rollout = "actor_rollout_ref.rollout"
    with initialize_config_dir(str(Path("examples/verl").resolve()), version_base=None):
        return compose(
            "grpo",
            [
                f"actor_rollout_ref.model.path={model}",
                "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
                f"{rollout}.engine_kwargs.slipstream.url={url}",
                f"{rollout}.engine_kwargs.slipstream.targets={targets}",
                f"{rollout}.n={SAMPLES}",
                f"{rollout}.dtype=float32",
                "data.max_prompt_length=40",
                "data.max_response_length=16",
                "trainer.n_gpus_per_node=1",
            ],
        )


def questions() -> DataProto:
    """As verl's trainer gives them to its workers: each prompt SAMPLES times in a row."""
    prompts = np.empty(len(PROMPTS), dtype=object)
    prompts[:] = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    uids = np.array([f"uid-{number}" for number in range(len(PROMPTS))], dtype=object)
    batch = DataProto.from_single_dict({"raw_prompt": prompts, "uid": uids, "index": np.arange(len(PROMPTS))})
    return batch.repeat(SAMPLES, interleave=True)


def described(batch: DataProto, model: Path) -> dict[str, Any]:
    tensors = batch.batch
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = policy(
            **{name: tensors[name] for name in ("input_ids", "attention_mask", "position_ids")}, use_cache=False
        ).logits
    length = tensors["responses"].shape[1]
    rewards = torch.zeros_like(tensors["rollout_log_probs"])
    rewards[:, 0] = torch.arange(len(rewards)) % SAMPLES
    advantages, _ = compute_grpo_outcome_advantage(
        rewards, tensors["response_mask"], index=batch.non_tensor_batch["uid"]
    )
    return {
        **{name: tensor.tolist() for name, tensor in tensors.items()},
        "uid": batch.non_tensor_batch["uid"].tolist(),
        "min_global_steps": batch.non_tensor_batch["min_global_steps"].tolist(),
        "stop_reason": batch.non_tensor_batch["stop_reason"].tolist(),
        "advantages": advantages.tolist(),
        "log_probs": logprobs_from_logits(logits[:, -length - 1 : -1], tensors["responses"]).tolist(),
    }


async def run(url: str, model: str, targets: str, new: str) -> dict[str, Any]:
    config = configured(url, model, targets)
    worker = AgentLoopWorker(config, llm_client=None)
    before = described(await worker.generate_sequences(questions()), Path(model))
    rollout_config = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    replica = get_rollout_replica_class("slipstream")(0, rollout_config, config.actor_rollout_ref.model, 1)
    await replica.init_hybrid(SimpleNamespace(workers=[]))
    await replica.sleep()
    rollout = get_rollout_class("slipstream")(rollout_config, worker.model_config, None)
    weights = safetensors.torch.load_file(Path(new) / "model.safetensors")
    # As the trainer: the head of a model that ties it to the embedding comes along.
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    for step in (0, 3, 3):
        await rollout.update_weights(iter(weights.items()), peft_config=None, base_sync_done=True, global_steps=step)
    after = described(await worker.generate_sequences(questions()), Path(new))
    return {"address": replica.server_address, "before": before, "after": after}


if __name__ == "__main__":
    sys.stdout.write(f"{json.dumps(asyncio.run(run(*sys.argv[1:])))}\n")
