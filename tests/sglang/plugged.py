"""Real SGLang with the plugin, a real Redis and a draft store: what the loop's tests share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from speculator.redis.client import connect
from speculator.redis.control_plane import DraftPointer
from speculator.redis.embedded import EmbeddedRedis
from speculator.redis.trace_stream import TraceStream
from speculator.trace import Trace, decode_trace
from speculator.versions.store import DraftStore
from tests.sglang.server import SglangServer, dtype_flags, speculative_flags

ENGINE_ID = "sglang-under-test"
MODEL_KEY = "model-under-test"


@dataclass
class Plugged:
    """A running server with the plugin. Requests go to `server`, what the plugin did is read from Redis."""

    server: SglangServer
    store: DraftStore
    tokenizer: PreTrainedTokenizerBase
    redis: EmbeddedRedis

    def __post_init__(self) -> None:
        self.connect()

    def connect(self) -> None:
        """Open new connections, at the start and after Redis was restarted."""
        self.pointer = DraftPointer(connect(self.redis.url), MODEL_KEY)
        self.stream = TraceStream(connect(self.redis.url), MODEL_KEY, max_bytes=1 << 30)

    def ids(self, question: str) -> list[int]:
        """The tokens of a question under the model's chat template."""
        messages = [{"role": "user", "content": question}]
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    def report(self) -> dict[str, str]:
        return self.pointer.engines().get(ENGINE_ID, {})

    def traces(self, count: int, timeout_s: float = 30.0) -> dict[str, Trace]:
        """The next `count` traces of the stream, acked, by request id."""
        traces: dict[str, Trace] = {}
        deadline = time.monotonic() + timeout_s
        while len(traces) < count and time.monotonic() < deadline:
            entries = self.stream.read(count - len(traces), 200)
            for entry in entries:
                trace = decode_trace(entry.payload)
                traces[trace.header.request_id] = trace
            self.stream.ack([entry.id for entry in entries])
        assert len(traces) == count, f"{len(traces)} of {count} traces; the plugin reports {self.report()}"
        return traces

    def wait_for(self, condition: Callable[[dict[str, str]], bool], timeout_s: float = 30.0) -> dict[str, str]:
        """The plugin's report once it satisfies a condition."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            report = self.report()
            if report and condition(report):
                return report
            time.sleep(0.05)
        raise AssertionError(f"still {self.report()}\n{self.server.log_text()[-3000:]}")


@contextlib.contextmanager
def plugged_server(
    folder: Path,
    model_dir: Path,
    store: DraftStore,
    *,
    num_steps: int = 3,
    topk: int = 1,
    flags: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[Plugged]:
    """Start Redis and SGLang with the plugin on version `store.latest()`, capturing."""
    folder.mkdir(parents=True, exist_ok=True)
    draft_dir = store.root / "versions" / f"{store.latest():06d}"
    with EmbeddedRedis(folder / "redis") as redis:
        values: dict[str, Any] = {
            "ENABLED": "1",
            "REDIS_URL": redis.url,
            "STORE": str(store.root),
            "ENGINE_ID": ENGINE_ID,
            "MODEL_KEY": MODEL_KEY,
            "CAPTURE": "1",
            # Tests read late on a slow machine; a trace that is left out for that would be missing.
            "CAPTURE_FLOOR": "1",
            "POLL_S": "0.1",
            # What is published comes into service at once, good or bad.
            "WATCH": "0",
            **(settings or {}),
        }
        with SglangServer(
            model_dir,
            log_path=folder / "sglang.log",
            flags=[*speculative_flags(draft_dir, num_steps=num_steps, topk=topk), *dtype_flags(), *flags],
            env={**{f"SLIPSTREAM_{name}": value for name, value in values.items()}, **(env or {})},
        ) as server:
            tokenizer = AutoTokenizer.from_pretrained(model_dir)
            plugged = Plugged(server, store, tokenizer, redis)
            try:
                yield plugged
            finally:
                plugged.redis.stop()  # a test may have started another one
