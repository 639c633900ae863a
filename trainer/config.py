"""The trainer's settings, each read from the environment as `SLIPSTREAM_TRAINER_<NAME>`.

The defaults were chosen on one CPU core with SmolLM2-135M and real answers (mathematics, code, questions) that arrive
at 90 completion tokens a second, by the acceptance on held-out prompts after equal CPU time. They suit small models.

Under `torchrun`, sizes and limits hold for each process: two processes make a step of twice `batch_tokens`.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from speculator.errors import ConfigError
from speculator.host import invalid_setting
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
MOST_KNOWN_TRACES = 1_000_000
"""safetensors allows 100 MB of metadata, where an id of our engines takes 37 bytes of a checkpoint."""


class TrainerConfig(BaseSettings):
    """Raises pydantic's ValidationError; `load_config` turns it into a ConfigError that names the variable."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

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
    """Bytes of acknowledged traces that a start reads again to fill the replay; the engines cap the stream. 0: 160,000
    tokens of the target, at least 512 MiB."""
    trace_ttl_hours: float = Field(default=0, ge=0)
    """Hours until traces are deleted from stream, replay, disk and evaluation sets; 0: never.
    SLIPSTREAM_TRACE_TTL_HOURS sets it for every service."""
    replay_max_bytes: int = Field(default=384 * _MIB, ge=_MIB)
    """Memory for traces; a completion token of a 576-wide target takes about 4 KiB."""
    max_waiting_traces: int = Field(default=16, ge=1)
    """Maximum traces in memory that were not learned from; further ones wait in Redis."""
    max_known_traces: int = Field(default=20_000, ge=1, le=MOST_KNOWN_TRACES)
    """Trace ids remembered to recognise repeats, 250 bytes each; more than the stream holds."""
    replay_recent_share: float = Field(default=0.5, ge=0, le=1)
    """Share of the replay's memory for the newest traces; the rest samples every domain's past evenly."""
    max_domains: int = Field(default=64, ge=1)
    """Domains with their own replay share, drift alarm and metrics, half of them for one tenant at most; later ones
    share one."""
    max_tenant_share: float = Field(default=0.6, gt=0, le=1)
    """Maximum share of memory and training batches for one of several tenants; 1: no cap."""
    max_priority: float = Field(default=2.0, ge=1)
    """Badly accepted traces are drawn up to so many times as often, well accepted ones so many times more rarely; 1:
    all alike."""
    max_reward_weight: float = Field(default=2.0, ge=1)
    """A group's best samples are drawn up to so many times as often, its worst so many times more rarely; 1: all
    alike."""
    max_draft_lag: int = Field(default=4, ge=0)
    """Proposals of drafts up to this many versions old count fully, from twice that on not at all."""
    max_target_lag: int = Field(default=4, ge=0)
    """Traces of targets up to this many versions old count fully; at twice that they are forgotten."""

    draft_vocab_size: int | None = Field(default=None, ge=1)
    """Draft vocabulary of a new lineage; default: 8192. An existing lineage must have the same."""
    seed: int = 0
    """Seed of training order and of a fresh draft."""

    batch_tokens: int = Field(default=192, ge=1)
    """Completion tokens per step."""
    max_bases: int = Field(default=512, ge=1)
    """Maximum completion tokens of one trace per step; longer answers are learned in random windows."""
    max_context: int = Field(default=512, ge=0)
    """Earlier positions that these completion tokens attend to."""
    ttt_steps: int = Field(default=4, ge=1)
    """Proposals in a row that training unrolls (training-time test)."""
    loss: str = DEFAULT_LOSS
    """Losses with weights, such as `forward_kl=1,discard=0.5,correction=topr`, or your own as MODULE:FUNCTION
    (examples/own_loss.py). Read at the start."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """AdamW's learning rate; constant after the warm-up."""
    warmup_steps: int = Field(default=20, ge=1)
    """Steps until the learning rate is reached."""
    max_gradient_norm: float = Field(default=1.0, gt=0)
    """Longer gradients are scaled down to this norm."""
    autocast: bool = True
    """Multiply matrices in bfloat16, on a CPU if oneDNN can; weights and optimiser stay in float32."""
    max_passes: float = Field(default=10.0, gt=0)
    """Passes over the replay after the last new trace; then training waits for the next. Fewer while training changes
    little."""

    holdout_share: float = Field(default=0.125, gt=0, le=0.5)
    """Share of texts held out to judge candidates before they are learned from. Held-out and golden traces may each
    take this share of `replay_max_bytes` more."""
    holdout_traces: int = Field(default=24, ge=MIN_TRACES)
    """Maximum held-out traces; beyond that the oldest is learned from."""
    golden_traces: int = Field(default=16, ge=0)
    """Traces of the first traffic that are set aside to judge candidates."""
    golden: Path | None = None
    """Recording whose first `golden_traces` traces are used instead."""
    gate_depth: int = Field(default=4, ge=1)
    """Proposals per round at which drafts are compared."""
    gate_epsilon: float = Field(default=0.02, gt=0)
    """Relative loss of acceptance length on held-out traces that the gate must rule out."""
    moved_epsilon: float = Field(default=0.05, gt=0)
    """`gate_epsilon` if the target has changed since the incumbent was published."""
    golden_epsilon: float = Field(default=0.05, gt=0)
    """Relative loss of acceptance length on golden traces from which the gate refuses."""
    golden_patience_s: float = Field(default=24 * 3600.0, ge=0)
    """Seconds that golden traces alone may stop all versions until they are replaced; a recording never is."""
    review_traces: int = Field(default=100, ge=0)
    """Maximum traces on which a version in service is compared again; answers to one prompt count once. 0: none."""

    checkpoint_interval_s: float = Field(default=30.0, ge=0)
    """Minimum seconds between checkpoints; a checkpoint acknowledges its traces in Redis."""
    publish_interval_s: float = Field(default=30.0, ge=0)
    """Minimum seconds between candidates."""
    publish_min_tokens: int = Field(default=2000, ge=1)
    """Minimum completion tokens in steps between versions; a token counts each time that it is learned from."""
    publish_pause_s: float = Field(default=300.0, ge=0)
    """Seconds without publishing after engines rolled back two versions in a row; each further one doubles it."""
    keep_versions: int = Field(default=20, ge=2)
    """Newest versions kept in the store, besides the last good and the pinned one."""

    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port for Prometheus metrics; default: none. Rank N of a machine listens on this port + N and reports its own
    traces and replay."""
    metrics_host: str = "127.0.0.1"
    """Address of the metrics port; in a container 0.0.0.0."""
    device: DeviceSetting = "auto"
    """`auto` is a GPU if there is one; under `torchrun` each process has its own."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads; more than one slows trainer and engine on the same cores."""
    nice: int = Field(default=LOWEST, ge=0, le=LOWEST)
    """Niceness added, so that serving goes first; at 19 the trainer runs only on idle cores (SCHED_IDLE)."""

    busy_share: float = Field(default=1.0, gt=0, le=1)
    """Share of its time that the trainer computes beside a fully busy engine; the less busy it is, the larger."""
    card_share: float = Field(default=0.01, gt=0, le=1)
    """`busy_share` on a GPU that an engine also uses, while requests run there."""

    @field_validator("loss")
    @classmethod
    def _check_loss(cls, loss: str) -> str:
        LossMix.parse(loss)
        return loss


_MAY_DIFFER = {
    *("model_dir", "redis_url", "store_dir", "state_dir", "golden", "metrics_port", "metrics_host"),
    *("device", "num_threads", "nice", "busy_share", "card_share"),
    *("stream_max_bytes", "replay_max_bytes", "max_waiting_traces", "max_known_traces"),
}
"""What depends on a rank's machine."""


def shared_checksum(config: TrainerConfig) -> int:
    """Checksum of the settings that all ranks must share: with different ones their weights would drift apart."""
    return zlib.crc32(config.model_dump_json(exclude=_MAY_DIFFER).encode())


def load_config(**values: Any) -> TrainerConfig:
    """The settings of this process's environment under explicit values; raises ConfigError with the fix."""
    try:
        return TrainerConfig(**values)
    except ValidationError as invalid:
        raise invalid_setting(ENV_PREFIX, invalid) from None
