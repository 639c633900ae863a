"""The trainer's settings, each read from the environment as `SLIPSTREAM_TRAINER_<NAME>`.

The defaults were chosen on one CPU core with SmolLM2-135M and real answers (mathematics, code, questions) that arrive
at 90 completion tokens a second, by the acceptance on held-out prompts after equal CPU time. They suit small models.

Under `torchrun`, sizes and limits hold for each process: two processes make a step of twice `batch_tokens`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from speculator.errors import ConfigError
from speculator.host import unusable
from trainer.learning.losses.mix import DEFAULT_LOSS, LossMix
from trainer.statistics import MIN_TRACES

DeviceSetting = Literal["auto", "cpu", "cuda"]


def local_rank() -> int:
    """This process's number among those that `torchrun` started on this machine; 0 without it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def choose_device(setting: DeviceSetting) -> torch.device:
    """The GPU with this process's `local_rank`, or the CPU; "auto" takes a GPU where there is one.

    CUDA_VISIBLE_DEVICES limits the GPUs. Raises ConfigError where there are too few for this process.
    """
    num_gpus = torch.cuda.device_count() if setting != "cpu" else 0
    if setting == "cpu" or (setting == "auto" and not num_gpus):
        return torch.device("cpu")
    if local_rank() >= num_gpus:
        raise ConfigError(
            f"process {local_rank()} of this machine has no GPU of its own: set torchrun --nproc-per-node to at most "
            f"{num_gpus}, the number of GPUs here, or set SLIPSTREAM_TRAINER_DEVICE=cpu"
        )
    return torch.device("cuda", local_rank())


ENV_PREFIX = "SLIPSTREAM_TRAINER_"
LOWEST = 19
"""The niceness of the lowest priority."""
_MIB = 1024 * 1024


class TrainerConfig(BaseSettings):
    """Raises pydantic's ValidationError; `load_config` turns it into a ConfigError that names the variable."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid", use_attribute_docstrings=True)

    model_dir: Path
    """The target, a Hugging Face folder; only its embedding, output rows and final norm are read."""
    redis_url: str
    model_key: str
    """Names the stream; the engines of this target use the same."""
    store_dir: Path
    """The draft store that the engines read."""
    state_dir: Path
    """Where the trainer keeps its own checkpoint; several processes share one."""

    stream_max_bytes: int = Field(default=0, ge=0)
    """Byte cap of the stream in Redis; the engines keep to their own. 0 allows 160,000 tokens of the target's width,
    and at least 512 MiB."""
    trace_ttl_hours: float = Field(default=0, ge=0)
    """Traces older than this are removed from the stream, the replay, the disk and the sets that judge drafts; 0 sets
    no limit. SLIPSTREAM_TRACE_TTL_HOURS says it for every service."""
    replay_max_bytes: int = Field(default=384 * _MIB, ge=_MIB)
    """Memory for traces; one completion token of a 576-wide target takes about 4 KiB."""
    max_waiting_traces: int = Field(default=16, ge=1)
    """Traces that were read and not yet learnt from; more wait in Redis."""
    max_known_traces: int = Field(default=20_000, ge=1)
    """Trace ids that are remembered, some 250 bytes each, to know one that comes again: more than the stream holds."""
    replay_recent_share: float = Field(default=0.5, ge=0, le=1)
    """Of the replay's memory, for the newest traces; the rest holds an even sample of every domain's past."""
    max_domains: int = Field(default=64, ge=1)
    """Domain labels that get a reservoir, a drift alarm and metrics of their own, half of them one tenant's at most;
    later ones share one."""
    max_tenant_share: float = Field(default=0.6, gt=0, le=1)
    """Of memory and of the training mix, for one tenant where there are others; 1 sets no cap."""
    max_priority: float = Field(default=2.0, ge=1)
    """How much more often a badly accepted trace is drawn, and how much less a well accepted one; 1: all alike."""
    max_reward_weight: float = Field(default=2.0, ge=1)
    """The same of the samples of a rollout by their rewards, within their group; 1: rewards have no effect."""
    max_draft_lag: int = Field(default=4, ge=0)
    """Versions behind the published one up to which proposals count fully (α); nothing counts from twice that on."""
    max_target_lag: int = Field(default=4, ge=0)
    """Target versions behind the newest up to which a trace counts fully; then it is drawn less often, and it is
    forgotten at twice that."""

    draft_vocab_size: int | None = Field(default=None, ge=1)
    """Of a new lineage, 8192 where unset; where an existing one has another, the trainer does not start."""
    seed: int = 0
    """Of the order of learning and of a fresh draft."""

    batch_tokens: int = Field(default=192, ge=1)
    """Completion tokens a step. Small batches learn faster here: the optimiser is cheap beside the matrices."""
    max_bases: int = Field(default=512, ge=1)
    """Completion tokens of one trace in one step; longer answers are learnt in random windows."""
    max_context: int = Field(default=512, ge=0)
    """Positions before them that serve as keys."""
    ttt_steps: int = Field(default=4, ge=1)
    """Proposals deep that a chain is unrolled in training (training-time test)."""
    loss: str = DEFAULT_LOSS
    """What a step minimises, as `trainer.learning.losses.mix.LossMix` reads it:
    `forward_kl=1,discard=0.5,correction=topr`; MODULE:FUNCTION is a loss of your own (examples/own_loss.py)."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Of AdamW; constant after the warm-up."""
    warmup_steps: int = Field(default=20, ge=1)
    """Steps over which it rises to that."""
    max_gradient_norm: float = Field(default=1.0, gt=0)
    """Longer gradients are shortened to it."""
    autocast: bool = True
    """Multiply matrices in bfloat16, on a CPU where oneDNN has it; weights and optimiser stay in float32."""
    max_passes: float = Field(default=10.0, gt=0)
    """How often the replay is learnt from, on average, without a new trace; then the trainer sleeps. Less often where
    training changes nothing any more (trainer/drift.py)."""

    holdout_share: float = Field(default=0.125, gt=0, le=0.5)
    """Of all texts, held out for a while before they are learnt from: what the gate judges candidates by. The held-out
    traces, and the golden ones, may each take this share of `replay_max_bytes` more."""
    holdout_traces: int = Field(default=24, ge=MIN_TRACES)
    """Held out at the same time; then the oldest is learnt from."""
    golden_traces: int = Field(default=16, ge=0)
    """Of the first traffic, set aside for good against drafts that serve it badly."""
    golden: Path | None = None
    """A recording (`slipstream traces record`) whose first `golden_traces` traces take their place."""
    gate_depth: int = Field(default=4, ge=1)
    """Proposals a round at which drafts are compared."""
    gate_epsilon: float = Field(default=0.02, gt=0)
    """Relative loss of acceptance length on held-out traces that the gate must exclude."""
    moved_epsilon: float = Field(default=0.05, gt=0)
    """The same where the target has moved since the incumbent was published."""
    golden_epsilon: float = Field(default=0.05, gt=0)
    """Relative loss on golden traces, above which the gate refuses."""
    golden_patience_s: float = Field(default=24 * 3600.0, ge=0)
    """Without a version because of the golden set alone, after which it is filled anew; a recording is not."""
    review_traces: int = Field(default=100, ge=0)
    """Most traces, answers to one prompt being one, on which a version in service is compared once more; 0: none."""

    checkpoint_interval_s: float = Field(default=30.0, ge=0)
    """Least time between two checkpoints of its own; traces are settled in Redis by them."""
    publish_interval_s: float = Field(default=30.0, ge=0)
    """Least time between two candidates."""
    publish_min_tokens: int = Field(default=2000, ge=1)
    """Completion tokens to learn from between two versions."""
    publish_pause_s: float = Field(default=300.0, ge=0)
    """Without a new version after engines rolled back two in a row; it doubles with each further one."""
    keep_versions: int = Field(default=20, ge=2)
    """Versions kept in the store; older ones are removed, last-good excepted."""

    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Serves Prometheus metrics on this port; none where unset. A further process of this machine takes the port as
    many above it as its number: what it says about traces and the replay is its own share."""
    metrics_host: str = "127.0.0.1"
    """Address on which it does so; 0.0.0.0 inside a container, where only its network can reach it."""
    device: DeviceSetting = "auto"
    """`auto` is a GPU where there is one; under `torchrun` each process has its own."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads; more than one beside an engine on the same cores slows both."""
    nice: int = Field(default=LOWEST, ge=0, le=LOWEST)
    """Added to the process's niceness: serving goes first. At 19 one process runs only where nobody else wants the core
    (SCHED_IDLE)."""

    busy_share: float = Field(default=1.0, gt=0, le=1)
    """Share of its time in which the trainer computes while an engine of its machine is always busy; the less busy the
    engine, the larger the share. At 1 the trainer never rests."""
    card_share: float = Field(default=0.01, gt=0, le=1)
    """The same on a GPU that an engine has, too, whenever requests run there. At 0.01 fewer than one in a hundred of
    their tokens wait for it."""

    @field_validator("loss")
    @classmethod
    def _check_loss(cls, loss: str) -> str:
        LossMix.parse(loss)
        return loss


def load_config(**values: Any) -> TrainerConfig:
    """The settings of this process's environment under explicit values; raises ConfigError with the fix."""
    try:
        return TrainerConfig(**values)
    except ValidationError as invalid:
        raise unusable(ENV_PREFIX, invalid) from None
