"""What verl needs of a Slipstream server, without verl: samples in groups, and new weights.

verl asks for one sample at a time        GroupedSampling       POST /v1/rollouts: groups of n samples
verl hands over (name, tensor) pairs      WeightSender          safetensors, then POST /v1/target-version
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec
import safetensors.torch
import torch
from torch import Tensor

from slipstream.client import AsyncRollouts, Group, Sample
from speculator.errors import ConfigError, EngineError
from speculator.target_folder import weight_files

_SHARD_BYTES = 4 << 30
_SEND_S = 3600.0
"""The answer comes once every engine has loaded the weights."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`actor_rollout_ref.rollout.engine_kwargs.slipstream` of verl's configuration."""

    url: str
    targets: str
    """The server's SLIPSTREAM_GATEWAY_TARGETS_DIR, as verl's workers see it."""
    job: str | None = None
    deadline_s: float | None = None
    """A sample that takes longer is aborted."""
    max_staleness: int | None = None
    when_stale: Literal["return", "abort"] | None = None
    gather_s: float = 0.05
    """How long a group waits for further samples of its prompt."""
    retry_s: float = 60.0
    """How long the server may be away."""

    @classmethod
    def of(cls, engine_kwargs: Mapping[str, Any]) -> Settings:
        """Raises ConfigError for a missing or unknown field."""
        try:
            return msgspec.convert(dict(engine_kwargs.get("slipstream") or {}), cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"actor_rollout_ref.rollout.engine_kwargs.slipstream: {error}") from None


Answer = tuple[list[int], Sample]
"""A prompt's token ids, and a sample."""
MakePrompt = Callable[[], Awaitable[list[int]]]


@dataclass
class _Waiting:
    """Samples that were asked for and not yet sent."""

    prompt_id: str
    make_prompt: MakePrompt
    sampling: dict[str, Any]
    samples: list[asyncio.Future[Answer]] = field(default_factory=list)


class GroupedSampling:
    """Turns requests for single samples into groups, and the groups of a moment into one rollout. For one event loop.

    verl starts the n samples of a prompt in the same round of the event loop. A sample that comes more than `gather_s`
    later begins a group of its own: nothing but the shared prefill and the length estimate is lost.
    """

    def __init__(self, settings: Settings, *, max_tokens: int, logprobs: bool, api_key: str | None = None) -> None:
        self._settings, self._max_tokens, self._logprobs, self._api_key = settings, max_tokens, logprobs, api_key
        self._waiting: dict[tuple[object, ...], _Waiting] = {}
        self._sending: set[asyncio.Task[None]] = set()

    async def sample(self, prompt_id: str, sampling: Mapping[str, Any], make_prompt: MakePrompt) -> Answer:
        """One sample of a prompt. `make_prompt` is called once a group. `sampling` is as verl gives it.

        Raises EngineError for a sample that was aborted, and for all of the moment where the server stays away;
        ConfigError for all where it never answered or refuses a group, which the message names.
        """
        chosen = _sampling(sampling)
        if not self._waiting:
            task = asyncio.create_task(self._send_soon())
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        group = self._waiting.setdefault((prompt_id, *chosen.items()), _Waiting(prompt_id, make_prompt, chosen))
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        group.samples.append(future)
        prompt, sample = await future
        if sample.state == "aborted":
            detail = f": {sample.detail}" if sample.detail else ""
            raise EngineError(f"a sample of prompt {prompt_id} was aborted ({sample.finish_reason}{detail})")
        return prompt, sample

    async def _send_soon(self) -> None:
        await asyncio.sleep(self._settings.gather_s)
        waiting, self._waiting = [*self._waiting.values()], {}
        try:
            await self._send(waiting)
        except BaseException as error:
            for future in (future for group in waiting for future in group.samples if not future.done()):
                if isinstance(error, Exception):
                    future.set_exception(error)
                else:
                    future.cancel()
            if not isinstance(error, Exception):
                raise

    async def _send(self, waiting: list[_Waiting]) -> None:
        settings = self._settings
        prompts = await asyncio.gather(*(group.make_prompt() for group in waiting))
        groups = [
            Group(
                id=str(number),
                prompt=prompt,
                n=len(group.samples),
                max_tokens=self._max_tokens,
                deadline_s=settings.deadline_s,
                max_staleness=settings.max_staleness,
                when_stale=settings.when_stale,
                **group.sampling,
            )
            for number, (group, prompt) in enumerate(zip(waiting, prompts, strict=True))
        ]
        client = AsyncRollouts(settings.url, api_key=self._api_key, job=settings.job, retry_s=settings.retry_s)
        async with client as rollouts:
            places = [f"prompt {group.prompt_id}" for group in waiting]
            async for sample in rollouts.start(groups, logprobs=self._logprobs, places=places):
                number = int(sample.group_id)
                future = waiting[number].samples[sample.sample]
                if not future.done():  # its caller may have been cancelled
                    future.set_result((list(prompts[number]), sample))


def _sampling(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a group for verl's sampling parameters. Raises ConfigError for what a group has no field for."""
    rest = {name: value for name, value in sampling.items() if name != "logprobs"}
    chosen = {"temperature": float(rest.pop("temperature", 1.0)), "top_p": float(rest.pop("top_p", 1.0))}
    if (top_k := int(rest.pop("top_k", -1))) > 0:
        chosen["top_k"] = top_k
    if rest.pop("repetition_penalty", 1.0) != 1.0 or rest:
        raise ConfigError(f"rollouts have no sampling parameter {', '.join(rest) or 'repetition_penalty'}")
    return chosen


class WeightSender:
    """Writes weights below the server's folder and has the server load them; keeps the newest folder only."""

    def __init__(self, settings: Settings, model: Path, *, dtype: torch.dtype, admin_key: str) -> None:
        """`model` is the folder of the model that the server was started with."""
        self._settings, self._model, self._dtype, self._admin_key = settings, model, dtype, admin_key
        self._names = weight_files(model).keys()
        self._version = 0

    def open(self, version: int) -> WeightFolder | None:
        """A folder for the weights of a version; None for one that the server has: 0 is what it was started with."""
        if version <= 0 or version == self._version:
            return None
        folder = Path(self._settings.targets) / f"verl-{version}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        # The server compares it with its own.
        shutil.copy(self._model / "config.json", folder)
        return WeightFolder(folder, self._names, self._dtype)

    def send(self, version: int, written: WeightFolder) -> None:
        """Returns once the server generates with these weights. Raises EngineError, with the server's reason."""
        written.close()
        settings, folder = self._settings, written.folder
        try:
            answer = httpx.post(
                f"{settings.url}/v1/target-version",
                headers={"authorization": f"Bearer {self._admin_key}"},
                json={"version": version, "path": folder.name},
                timeout=_SEND_S,
                trust_env=False,
            )
        except httpx.TransportError as error:
            raise EngineError(f"{settings.url} did not take the weights of step {version}: {error!r}") from error
        if not answer.is_success:
            raise EngineError(f"{settings.url} refused the weights of step {version}: {answer.text}")
        if answer.json()["previous"] == version:
            raise EngineError(f"{settings.url} has weights of step {version} already: restart it before you resume")
        shutil.rmtree(folder.with_name(f"verl-{self._version}"), ignore_errors=True)
        self._version = version


class WeightFolder:
    """A safetensors model that is written one tensor at a time, in files of some gigabytes."""

    def __init__(self, folder: Path, names: Iterable[str], dtype: torch.dtype) -> None:
        self.folder, self._names, self._dtype = folder, frozenset(names), dtype
        self._tensors: dict[str, Tensor] = {}
        self._files: dict[str, str] = {}
        self._num_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Skips a name that the model's own folder lacks, such as the head of a model that ties it to the embedding."""
        if name not in self._names:
            return
        dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
        # A copy: the caller may write the next weights into the same memory.
        self._tensors[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
        self._num_bytes += self._tensors[name].nbytes
        if self._num_bytes >= _SHARD_BYTES:
            self._flush()

    def close(self) -> None:
        """Write the rest, and the index."""
        self._flush()
        index = json.dumps({"metadata": {}, "weight_map": self._files})
        (self.folder / "model.safetensors.index.json").write_text(index)

    def _flush(self) -> None:
        if self._tensors:
            file = f"model-{len(set(self._files.values())) + 1:05}.safetensors"
            safetensors.torch.save_file(self._tensors, self.folder / file, {"format": "pt"})
            self._files |= dict.fromkeys(self._tensors, file)
            self._tensors, self._num_bytes = {}, 0
