"""A `slipstream train` for benchmarks/elasticity.py: it learns while it may, and stands still in others' windows."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import psutil

from slipstream.processes import Child
from slipstream.scrape import Sample
from speculator.checkpoint import model_key, target_fingerprint
from speculator.codec import encode_trace
from speculator.embedded_redis import EmbeddedRedis
from speculator.ports import free_port
from speculator.redis_client import connect
from speculator.stream import TraceStream
from speculator.trace import Trace
from trainer.config import ENV_PREFIX

READY_S = 120.0
ALONE_S = 6.0
ALWAYS_AT_WORK = {f"{ENV_PREFIX}MAX_PASSES": "1000000"}


class Trainer:
    """The process, from outside: what it says of itself, and whether it may run at all."""

    def __init__(self, child: Child, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/metrics"
        self._child = child
        self.process = psutil.Process(child.pid)

    def wait_until_learning(self) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            self._child.check()
            with contextlib.suppress(httpx.TransportError):
                if self._metrics().total("slipstream_trainer_steps_total") >= 3:
                    return
            time.sleep(0.2)
        raise TimeoutError(f"the trainer made no step in {READY_S:.0f} s")

    def progress(self) -> tuple[float, float]:
        """Tokens learnt from, and seconds waited for engines, so far."""
        metrics = self._metrics()
        names = "slipstream_trainer_learnt_tokens_total", "slipstream_trainer_yielded_seconds_total"
        return metrics.total(names[0]), metrics.total(names[1])

    def speed(self) -> float:
        """Tokens learnt from a second while nothing else happens; it stands still again afterwards."""
        self.go_on()
        time.sleep(1.0)
        (before, _), began_s = self.progress(), time.monotonic()
        time.sleep(ALONE_S)
        (after, _), ended_s = self.progress(), time.monotonic()
        self.stand_still()
        return (after - before) / (ended_s - began_s)

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def stand_still(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def _metrics(self) -> Sample:
        return Sample.parse(0.0, httpx.get(self._url, timeout=30, trust_env=False).text)


@contextlib.contextmanager
def running_trainer(
    name: str, model_dir: Path, folder: Path, traces: Sequence[Trace], options: Sequence[str]
) -> Iterator[Trainer]:
    """One with a Redis, a store and a state of its own, which has begun to learn and then stands still."""
    port, fingerprint = free_port(), target_fingerprint(model_dir)
    with EmbeddedRedis(folder / "redis") as redis:
        stream_of = TraceStream(connect(redis.url), model_key(model_dir, fingerprint), max_bytes=512 * 1024 * 1024)
        for trace in traces:
            stream_of.append(encode_trace(trace), trace_id=trace.header.trace_id)
        arguments = ["--model", str(model_dir), "--redis-url", redis.url, "--store", str(folder / "drafts")]
        arguments += ["--state", str(folder / "state"), "--metrics-port", str(port), *options]
        with _environment(ALWAYS_AT_WORK):
            child = Child(name, ["train", *arguments], log_path=folder / "train.log", num_threads=1)
        trainer = Trainer(child, port)
        try:
            trainer.wait_until_learning()
            trainer.stand_still()
            yield trainer
        finally:
            trainer.go_on()
            child.stop()


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
