"""Runs examples/verl with verl's own classes: python verl_step.py URL MODEL TARGETS NEW_WEIGHTS, in verl's environment.

Writes JSON: the batches that verl's agent loop worker made before and after its rollout sent new weights, the logprobs
that transformers computes for them from verl's inputs, and verl's GRPO advantages. Then what the worker of verl's v1
trainers puts into TransferQueue; the queue itself, and Ray, are left out.
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
from tensordict import NonTensorData
from transformers import AutoModelForCausalLM
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.utils import tensordict_utils
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


class Queue:
    """Keeps what is put into TransferQueue."""

    def __init__(self) -> None:
        self.status: dict[str, str] = {}
        self.samples: dict[str, dict[str, Any]] = {}

    def init(self) -> None:
        """Nothing to connect to."""

    async def async_kv_put(self, key: str, partition_id: str, tag: dict[str, str]) -> None:
        self.status[key] = f"{partition_id} {tag['status']}"

    async def async_kv_batch_put(self, keys: list[str], fields: Any, tags: list[Any], partition_id: str) -> None:
        names = ("prompts", "responses", "response_mask", "rollout_log_probs")
        for number, (key, tag) in enumerate(zip(keys, tags, strict=True)):
            self.samples[key] = tag | {name: fields[name][number].tolist() for name in names}


async def queued(config: Any) -> dict[str, Any]:
    """What the worker of the v1 trainers makes of the prompts; its actor class is used without Ray."""
    queue = agent_loop_tq.tq = Queue()
    worker = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class(config, llm_client=None)
    rows = questions()[::SAMPLES].non_tensor_batch
    batch = tensordict_utils.get_tensordict({name: values.tolist() for name, values in rows.items()})
    batch["global_steps"] = NonTensorData(4)
    await worker.generate_sequences(batch)
    await asyncio.gather(*worker.background_tasks)
    return {"status": queue.status, "samples": queue.samples}


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
    return {"address": replica.server_address, "before": before, "after": after, "queued": await queued(config)}


if __name__ == "__main__":
    sys.stdout.write(f"{json.dumps(asyncio.run(run(*sys.argv[1:])))}\n")
