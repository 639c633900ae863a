"""Workloads for experiments on learning: prompts of some domains, answered once by the local engine, whose draft learns
meanwhile, and kept as a recording.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from serving.engine import CapturePolicy, GenerateRequest
from serving.local.config import LocalEngineConfig
from serving.local.engine import LocalEngine
from serving.local.target import Target as TargetModel
from serving.metrics import EngineMetrics
from serving.speedup import SpeedupMeter
from slipstream.topics import Prompt
from speculator.checkpoint import draft_state, target_fingerprint
from speculator.clock import now_ms
from speculator.codec import encode_trace
from speculator.errors import ConfigError
from speculator.fresh import fresh_draft
from speculator.labels import draft_ids_by_target_id
from speculator.recording import RecordingHeader, RecordingWriter
from speculator.sampling import SamplingParams
from speculator.trace import Trace
from trainer.batch import Example, cut, make_example, pack
from trainer.config import load_config
from trainer.shadow import MIN_CONFIDENCE
from trainer.step import Learner

# Answers that are generated at the same time, between two updates of the draft.
GROUP = 8
# What is recorded must not depend on how fast this machine is.
_ENGINE: dict[str, Any] = {"control_share": 0.0, "min_confidence": MIN_CONFIDENCE, "suffix_depth": 0}


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """How a workload is answered and recorded."""

    model_dir: Path
    max_tokens: int
    temperature: float
    num_threads: int
    seed: int = 0
    depth: int = 5
    passes: int = 3
    """Times that the draft learns from new answers' tokens before the next group is answered."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Settings of the engine besides, as `LocalEngineConfig` names them."""

    def key(self, prompts: Sequence[Prompt]) -> str:
        """Names everything that the recording depends on."""
        parts = (
            target_fingerprint(self.model_dir), self.max_tokens, self.temperature, self.seed, self.depth, self.passes,
            sorted(self.engine.items()), [(prompt.domain, prompt.text) for prompt in prompts],
        )  # fmt: skip
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class _LearningEngine:
    """A local engine that keeps its traces, and a learner that puts better drafts into it between groups of answers."""

    def __init__(self, options: RecordOptions) -> None:
        self._options = options
        self.traces: list[Trace] = []
        self._versions: dict[int, dict[str, torch.Tensor]] = {}
        model_dir = options.model_dir
        unused = {"redis_url": "", "model_key": "", "store_dir": Path(), "state_dir": Path()}
        self._config = load_config(model_dir=model_dir, seed=options.seed, **unused)
        draft = fresh_draft(model_dir, draft_vocab_size=self._config.draft_vocab_size, seed=options.seed)
        self._draft_ids_V = draft_ids_by_target_id(draft.d2t, draft.config.vocab_size)
        self._learner = Learner(draft, self._config)
        self._examples: list[Example] = []
        self._rng = random.Random(options.seed)
        self._engine = self._build()

    def _build(self) -> LocalEngine:
        options = self._options
        config = LocalEngineConfig(
            model_dir=options.model_dir,
            model_name=options.model_dir.name,
            depth=options.depth,
            num_slots=GROUP,
            num_threads=options.num_threads,
            **{**_ENGINE, **options.engine},
        )
        target = TargetModel(
            config.model_dir,
            num_slots=config.num_slots,
            context_length=config.context_length,
            cache_margin=config.cache_margin,
        )
        in_service = fresh_draft(
            config.model_dir, draft_vocab_size=self._config.draft_vocab_size, seed=options.seed
        ).to(target.embed.dtype)
        return LocalEngine(
            config,
            target=target,
            draft=in_service,
            draft_version=1,
            target_fingerprint=target_fingerprint(config.model_dir),
            load_draft=self._versions.__getitem__,
            metrics=EngineMetrics(CollectorRegistry()),
            meter=SpeedupMeter(),
            on_trace=self.traces.append,
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        self._engine.start()
        try:
            yield
        finally:
            self._engine.stop()

    def answer(self, prompts: Sequence[Prompt], first_index: int) -> list[Trace]:
        """The traces of one group of answers, in the order of the prompts."""
        asyncio.run(self._ask(prompts, first_index))
        # The last chunk of an answer is delivered before its trace is handed over.
        while len(self.traces) < len(prompts) and self._engine.health().alive:
            time.sleep(0.01)
        found, self.traces[:] = list(self.traces), []
        return sorted(found, key=lambda trace: int(trace.header.request_id))

    async def _ask(self, prompts: Sequence[Prompt], first_index: int) -> None:
        async def one(index: int, prompt: Prompt) -> None:
            tokens = self._engine.tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
            longest = self._engine.info.context_length - self._options.max_tokens
            request = GenerateRequest(
                request_id=str(index),
                prompt_token_ids=tuple(tokens[-longest:]),
                max_tokens=self._options.max_tokens,
                sampling=SamplingParams(temperature=self._options.temperature),
                seed=index,
                policy=CapturePolicy(domain=prompt.domain),
            )
            async for _ in self._engine.generate(request):
                pass

        await asyncio.gather(*(one(first_index + row, prompt) for row, prompt in enumerate(prompts)))

    def learn(self, traces: Sequence[Trace]) -> None:
        """A few steps on the new traces and older ones, then the better draft into the engine."""
        width = self._learner.draft.fc.in_features
        new = [make_example(trace, self._draft_ids_V, feature_width=width) for trace in traces]
        self._examples += new
        batch_tokens = self._config.batch_tokens
        for _ in range(self._options.passes * sum(example.num_bases for example in new) // batch_tokens + 1):
            order = self._rng.sample(self._examples, len(self._examples))
            chosen: list[Example] = []
            while order and sum(example.num_bases for example in chosen) < batch_tokens:
                chosen.append(order.pop())
            windows = [cut(example, max_bases=self._config.max_bases, rng=self._rng) for example in chosen]
            self._learner.step(pack(windows, max_context=self._config.max_context))
        version = self._engine.draft_version + 1
        self._versions[version] = draft_state(self._learner.averaged)
        self._engine.install_draft(version)
        del self._versions[version]


def record_workload(path: Path, prompts: Sequence[Prompt], options: RecordOptions, *, note: str) -> None:
    """Answer the prompts in their order and write the recording, whole or not at all."""
    engine = _LearningEngine(options)
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    header = RecordingHeader(
        target_fingerprint=target_fingerprint(options.model_dir),
        model=options.model_dir.name,
        created_ms=now_ms(),
        note=note,
    )
    with engine.running(), RecordingWriter(temporary, header) as writer:
        for first in range(0, len(prompts), GROUP):
            torch.set_num_threads(options.num_threads)
            traces = [trace for trace in engine.answer(prompts[first : first + GROUP], first) if trace.num_tokens > 8]
            for trace in traces:
                writer.append(encode_trace(trace), trace_id=trace.header.trace_id)
            engine.learn([trace for trace in traces if trace.num_completion_tokens > 2])
    temporary.rename(path)


def workload_prompts(name: str, prompts: Sequence[Prompt], count: int, seed: int) -> list[Prompt]:
    """At most `count` prompts, as many of each phase of a shift, in its order; none comes twice."""
    phases = name.split(">")
    chosen: list[Prompt] = []
    for phase in phases:
        domains = phase.split("+")
        for domain in domains:
            if all(prompt.domain != domain for prompt in prompts):
                raise ConfigError(f"no prompt has the domain {domain}: check --workloads and --prompts")
        of_phase = [prompt for prompt in prompts if prompt.domain in domains]
        share = min(count // len(phases), len(of_phase))
        chosen += random.Random(seed).sample(of_phase, share)
    return chosen


def recorded(name: str, prompts: Sequence[Prompt], count: int, options: RecordOptions, cache: Path) -> Path:
    """The recording of a workload of at most `count` answers, made now where the cache has none."""
    chosen = workload_prompts(name, prompts, count, seed=0)
    path = cache / f"{options.key(chosen)}.rec"
    if not path.exists():
        print(f"recording {name}: {len(chosen)} answers", flush=True)
        cache.mkdir(parents=True, exist_ok=True)
        record_workload(path, chosen, options, note=f"workload {name}")
    return path
