"""The whole loop in one process, turn by turn: the engine serves, then the trainer learns, then a draft is swapped in.

The parts are those that run as services, with a real Redis between them. Only the turns are ours: on two cores,
learning while answers are sampled would gain nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from prometheus_client import CollectorRegistry

from benchmarks.engines import engine_with
from serving.engine import CapturePolicy, GenerateRequest
from serving.hotswap import DraftFollower
from serving.local.engine import LocalEngine
from speculator.checkpoint import draft_config_json, draft_state, expected_shapes, model_key, target_fingerprint
from speculator.codec import encode_trace
from speculator.embedded_redis import EmbeddedRedis
from speculator.lineage import FIRST, ensure_lineage, load_draft
from speculator.model import Eagle3Draft
from speculator.pointer import DraftPointer
from speculator.redis_client import connect
from speculator.sampling import SamplingParams
from speculator.store import DraftStore
from speculator.stream import TraceStream
from speculator.trace import Trace
from trainer.config import load_config
from trainer.service import Trainer

_STREAM_BYTES = 512 * 1024 * 1024


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    """Of the tokens, under the distribution that they were sampled from."""


class Loop:
    """One engine and one trainer around a store; see `loop`."""

    def __init__(
        self,
        engine: LocalEngine,
        trainer: Trainer,
        follower: DraftFollower,
        stream: TraceStream,
        traces: list[Trace],
        load: Callable[[int], Eagle3Draft],
    ) -> None:
        self.engine, self.trainer, self.draft = engine, trainer, load
        """`draft` loads a version beside the one in service."""
        self._follower, self._stream = follower, stream
        self.traces = traces
        """Of the answers that were sampled last, as they were recorded."""

    def sample(self, requests: Sequence[GenerateRequest]) -> list[Answer]:
        """The answers; their traces go to the stream."""
        answers = self._answers(requests)
        for trace in self.traces:
            self._stream.append(encode_trace(trace), trace_id=trace.header.trace_id)
        return answers

    def examine(self, requests: Sequence[GenerateRequest]) -> list[Trace]:
        """Traces of answers from which nobody learns."""
        self._answers(requests)
        return list(self.traces)

    def _answers(self, requests: Sequence[GenerateRequest]) -> list[Answer]:
        async def one(request: GenerateRequest) -> Answer:
            answer = Answer([], [])
            async for chunk in self.engine.generate(request):
                answer.tokens.extend(chunk.token_ids)
                answer.logprobs.extend(chunk.logprobs)
            return answer

        async def every() -> list[Answer]:
            return await asyncio.gather(*map(one, requests))

        self.traces.clear()
        answers = asyncio.run(every())
        # The last chunk of an answer is delivered before its trace is handed over.
        while self.engine.health().num_running:
            time.sleep(0.01)
        self.engine.flush_traces()
        return answers

    def learn(self) -> None:
        """What the trainer makes of what came, and a better draft into the engine where the gate finds one."""
        trainer = self.trainer
        trainer.read(block_ms=0)
        while trainer.has_work:
            trainer.step()
            trainer.read(block_ms=0)
        trainer.checkpoint()
        trainer.ack()
        if trainer.publish_due:
            trainer.publish()
        self._follower.follow()


@contextlib.contextmanager
def loop(
    model_dir: Path, folder: Path, *, draft: Eagle3Draft, threads: int, engine: dict[str, Any], trainer: dict[str, Any]
) -> Iterator[Loop]:
    """`draft` becomes version 1; `engine` and `trainer` are settings of `LocalEngineConfig` and `TrainerConfig`."""
    fingerprint = target_fingerprint(model_dir)
    key, store = model_key(model_dir, fingerprint), DraftStore(folder / "drafts")
    config = draft_config_json(draft.config)
    store.write(draft_state(draft), config, parent=None, target_fingerprint=fingerprint, info={}, number=FIRST)
    ensure_lineage(store, model_dir, fingerprint)
    load_whole = partial(load_draft, store, embed=draft.embed, target_fingerprint=fingerprint)
    served = load_whole(FIRST)
    load = partial(
        store.load,
        expected_fingerprint=fingerprint,
        expected_d2t=served.d2t.cpu(),
        expected_shapes=expected_shapes(served.config),
    )
    with EmbeddedRedis(folder / "redis") as redis, connect(redis.url) as client:
        settings = load_config(
            model_dir=model_dir,
            redis_url=redis.url,
            model_key=key,
            store_dir=store.root,
            state_dir=folder / "state",
            **{"publish_interval_s": 0.0, "checkpoint_interval_s": 0.0, "max_waiting_traces": 4096, **trainer},
        )
        learner = Trainer(settings, CollectorRegistry())
        recorded: list[Trace] = []
        with engine_with(
            model_dir, served, threads, settings=engine, load_draft=load, on_trace=recorded.append
        ) as running:
            # After the engine's own: what computes here now has the cores for itself.
            torch.set_num_threads(threads)
            follower = DraftFollower(
                running, DraftPointer(client, key), engine_id="in-process", lifecycle=store.lifecycle
            )
            stream = TraceStream(client, key, max_bytes=_STREAM_BYTES)
            whole = Loop(running, learner, follower, stream, recorded, load_whole)
            try:
                yield whole
            finally:
                learner.close()


def request_for(
    engine: LocalEngine, request_id: str, text: str, *, max_tokens: int, seed: int, domain: str, group_id: str
) -> GenerateRequest:
    """A sample at temperature 1 of a chat's first answer, with its log-probabilities."""
    tokens = engine.tokenizer.encode_chat([{"role": "user", "content": text}])
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=tuple(tokens[-(engine.info.context_length - max_tokens) :]),
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=1.0),
        seed=seed,
        logprobs=True,
        policy=CapturePolicy(domain=domain, group_id=group_id),
    )
