"""Delay of a client's tokens by a trainer on the GPU that serves.

SGLang serves SmolLM2 with the plugin and captures, a trainer learns from it. A trainer that is stopped (SIGSTOP) keeps
its memory and computes nothing, so both come in turns within one server: some seconds with it, some without.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.common.report import percentile
from benchmarks.sglang_scene.phases import training
from benchmarks.sglang_scene.servers import Scene, prepared
from slipstream.models import BUNDLED_MODEL
from tests.sglang.server import SglangServer

_TOKENS = 128


def measure(*, clients: int, learning_s: float, turns: int, turn_s: float) -> dict[str, Any]:
    """Milliseconds between a client's tokens with and without a trainer beside it, and the ratio of each turn's p99.

    First the trainer learns from live traffic, for `learning_s` or until a trained version is in service.
    """
    with contextlib.ExitStack() as stack:
        scene = stack.enter_context(prepared(BUNDLED_MODEL, None))
        server = stack.enter_context(scene.live_server())
        trainer = stack.enter_context(training(scene))
        load = _Load(scene, server, clients)
        with load.running():
            deadline_s = time.monotonic() + learning_s
            while scene.report().get("version") == "1" and time.monotonic() < deadline_s:
                trainer.check()
                time.sleep(0.5)
            gaps_ms: dict[str, list[list[float]]] = {"with": [], "without": []}
            for turn in range(2 * turns):
                (trainer.resume if turn % 2 else trainer.pause)()
                gaps_ms["with" if turn % 2 else "without"].append(load.gaps_ms(turn_s))
        report = scene.report()
    p99s = {name: [percentile(turn, 99) for turn in lists] for name, lists in gaps_ms.items()}
    p50s = {name: statistics.median(itertools.chain(*lists)) for name, lists in gaps_ms.items()}
    ratios = [ours / alone for ours, alone in zip(p99s["with"], p99s["without"], strict=True)]
    return {
        "clients": clients,
        "version": int(report["version"]),
        "p50_ms": p50s,
        "p99_ms": {name: statistics.median(values) for name, values in p99s.items()},
        "p99_ratio": statistics.median(ratios),
        "p99_ratios": ratios,
    }


class _Load:
    """Clients that each request one answer after another, with a different prompt each time."""

    def __init__(self, scene: Scene, server: SglangServer, clients: int) -> None:
        self._server, self._clients = server, clients
        self._prompts = scene.numbered(scene.prompts, 800)
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._gaps_ms: list[float] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(self._clients) as pool:
            clients = [pool.submit(self._ask) for _ in range(self._clients)]
            try:
                yield
            finally:
                self._stop.set()
            for client in clients:
                client.result()

    def gaps_ms(self, seconds: float) -> list[float]:
        """Gaps between the tokens of an answer in the next seconds, in milliseconds."""
        time.sleep(1)
        with self._lock:
            self._gaps_ms = []
        time.sleep(seconds)
        with self._lock:
            return self._gaps_ms

    def _ask(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                prompt = next(self._prompts)
            before_s, before = 0.0, 0
            for event in self._server.stream(prompt, max_new_tokens=_TOKENS, ignore_eos=True):
                now_s, now = time.perf_counter(), int(event["meta_info"]["completion_tokens"])
                if before and now > before:
                    with self._lock:
                        # Tokens of one event share its gap evenly.
                        self._gaps_ms += [1000 * (now_s - before_s) / (now - before)] * (now - before)
                before_s, before = now_s, now
