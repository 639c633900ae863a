"""verl's classes for a Slipstream server: an agent loop, and the rollout `slipstream`.

verl imports this module where it reads the model's configuration (`actor_rollout_ref.model.external_lib`).

    TaskRunner          SlipstreamReplica      starts nothing: the server runs already
    agent loop workers  SlipstreamAgentLoop    one sample a run; GroupedSampling makes groups of them
    actor workers       SlipstreamRollout      takes the weights of a step; rank 0 sends them
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from verl.utils.profiler import simple_timer
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.rollout import base
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from examples.verl.rollouts import GroupedSampling, Settings, WeightSender
from speculator.errors import ConfigError

NAME = "slipstream"
"""Of the agent loop and of the rollout."""
_sampling: WeakKeyDictionary[asyncio.AbstractEventLoop, GroupedSampling] = WeakKeyDictionary()


@register(NAME)
class SlipstreamAgentLoop(AgentLoopBase):  # type: ignore[misc]  # verl has no types
    """One turn of text. verl makes an instance a sample."""

    async def run(self, sampling_params: Mapping[str, Any], **row: Any) -> AgentLoopOutput:
        """A sample of the row's `raw_prompt`. Rows with the same `uid` are one group."""
        messages = list(row["raw_prompt"])

        async def make_prompt() -> list[int]:
            if await self.process_multi_modal_info(messages):
                raise ConfigError("rollouts take text alone, no images, videos or audio")
            return list(await self.ct_build_initial_tokens(messages))

        took: dict[str, float] = {}
        with simple_timer("generate_sequences", took):
            # Nothing may be awaited before: the samples of a group come together.
            prompt, sample = await self._grouped().sample(str(row.get("uid", messages)), sampling_params, make_prompt)
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=list(sample.tokens),
            response_mask=[1] * len(sample.tokens),
            response_logprobs=None if sample.logprobs is None else list(sample.logprobs),
            num_turns=2,
            metrics=AgentLoopMetrics(**took),
            extra_fields={
                "global_steps": sample.target_version,
                "min_global_steps": sample.target_version,
                "max_global_steps": sample.target_version,
                "stop_reason": sample.finish_reason,
                # As verl's own loops.
                "turn_scores": [],
                "tool_rewards": [],
            },
        )

    def _grouped(self) -> GroupedSampling:
        loop, config = asyncio.get_running_loop(), self.rollout_config
        if loop not in _sampling:
            _sampling[loop] = GroupedSampling(
                Settings.of(config.engine_kwargs),
                max_tokens=config.response_length,
                logprobs=config.calculate_log_probs,
                api_key=os.environ.get("SLIPSTREAM_API_KEY"),
            )
        return _sampling[loop]


class SlipstreamRollout(BaseRollout):  # type: ignore[misc]
    """Sends the actor's weights to the server. It holds no memory of an accelerator."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sender: WeightSender | None = None
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            self._sender = WeightSender(
                Settings.of(self.config.engine_kwargs),
                Path(self.model_config.local_path),
                dtype=PrecisionType.to_dtype(self.config.dtype),
                admin_key=os.environ.get("SLIPSTREAM_GATEWAY_ADMIN_KEY", ""),
            )

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """There is nothing to release."""

    async def update_weights(
        self, weights: Any, wire_format: str = "named_tensors", *, global_steps: int | None = None, **kwargs: Any
    ) -> None:
        """Have the server load `weights` as target version `global_steps`. Raises EngineError where it refuses them."""
        if wire_format != "named_tensors" or kwargs.get("peft_config") is not None:
            raise ConfigError("the server loads whole weights: merge adapters (actor_rollout_ref.model.lora.merge)")
        version = global_steps or 0
        written = self._sender.open(version) if self._sender is not None else None
        # All ranks iterate, because they gather each tensor together.
        async for name, tensor in ensure_async_iterator(weights):
            if written is not None:
                written.add(name, tensor)
        if self._sender is not None and written is not None:
            await asyncio.to_thread(self._sender.send, version, written)


class SlipstreamReplica(RolloutReplica):  # type: ignore[misc]
    """Stands for the server, which is started and ended elsewhere."""

    async def launch_servers(self) -> None:
        """Start nothing."""
        self._server_address = Settings.of(self.config.engine_kwargs).url


RolloutReplicaRegistry.register(NAME, lambda: SlipstreamReplica)
base._ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.{SlipstreamRollout.__name__}"
