"""Servers, shared Redis and store, and prompts of benchmarks/sglang_cpu.py."""

from __future__ import annotations

import contextlib
import itertools
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.common.drafts import add_version
from benchmarks.common.report import shuffled_prompts
from serving.sglang.outside.launcher import adaptive_config
from slipstream.children import running_child
from slipstream.demo.servers import wait_until_ready
from slipstream.demo.topics import Prompt
from slipstream.models import resolve_model
from speculator.draft.checkpoint import draft_state, model_key, target_fingerprint
from speculator.draft.initialization import fresh_draft
from speculator.errors import ConfigError
from speculator.host import free_port
from speculator.redis.client import connect
from speculator.redis.control_plane import DraftPointer
from speculator.redis.embedded import EmbeddedRedis
from speculator.versions.lineage import ensure_lineage
from speculator.versions.store import DraftStore
from tests.sglang.server import SglangServer, dtype_flags, speculative_flags

DEPTH, SUFFIX_DEPTH = 3, 16
LIVE_ID, FIXED_ID = "benchmark", "fixed"
"""Engine ids of the servers with the plugin."""
IN_TURNS, UNSEEN, LEARNT_FROM = slice(96), slice(100, 148), slice(200, 2000)
"""Slices of the prompts: for turns, for unseen prompts, and for live traffic, from which the draft learns. Nothing
before the last one is learnt from.
"""
_READY_S = 120.0


@dataclass(frozen=True)
class Scene:
    """Redis and a store, and context managers that start the servers."""

    folder: Path
    model_dir: Path
    fingerprint: str
    store: DraftStore
    redis_url: str
    pointer: DraftPointer
    prompts: list[Prompt]
    tokenizer: Any

    def ids(self, text: str) -> list[int]:
        """Token ids of the question in the model's chat template; the last 1024."""
        messages = [{"role": "user", "content": text}]
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))[-1024:]

    def numbered(self, prompts: Sequence[Prompt], longest: int) -> Iterator[list[int]]:
        """These prompts again and again, cut to so many characters, each with a new number in front, so that no prefix
        cache has it.
        """
        for number in itertools.count():
            yield self.ids(f"Question {number:05d}: {prompts[number % len(prompts)].text}"[:longest])

    def report(self, engine_id: str = LIVE_ID) -> dict[str, str]:
        """The server's last report in Redis; empty before the first."""
        return self.pointer.engines().get(engine_id, {})

    def settled_report(self, engine_id: str) -> dict[str, str]:
        """The report, once two in a row, some seconds apart, have equal capture counts."""
        before: dict[str, str] = {}
        for _ in range(20):
            report = self.report(engine_id)
            if before and all(report[name] == before[name] for name in ("captured", "appended", "dropped", "pending")):
                break
            before = report
            time.sleep(3)
        return report

    def add_random(self) -> int:
        """Another version of random weights, with the vocabulary of the first."""
        draft, first = fresh_draft(self.model_dir, seed=1), self.store.load(1)
        state = {**draft_state(draft), "d2t": first["d2t"], "t2d": first["t2d"]}
        return add_version(self.store, state, draft, self.fingerprint)

    # -- servers

    def plain_server(self, *flags: str, env: Mapping[str, str] | None = None, name: str = "plain") -> SglangServer:
        """A server without the plugin."""
        return SglangServer(
            self.model_dir, log_path=self.folder / f"{name}.log", flags=[*dtype_flags(), *flags], env=env
        )

    def live_server(
        self,
        version: int = 1,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        *,
        name: str = "live",
        suffix_depth: int = 0,
    ) -> SglangServer:
        """A server with the plugin and adaptive depth."""
        config = self.folder / f"{name}.json"
        config.write_text(json.dumps(adaptive_config(DEPTH, suffix_depth)))
        adaptive = ["--speculative-adaptive", "--speculative-adaptive-config", str(config)]
        own = {"SLIPSTREAM_SUFFIX_DEPTH": str(suffix_depth), **(env or {})}
        engine_id = LIVE_ID if name == "live" else name
        return self._drafting_server(name, engine_id, version, [*adaptive, *flags], own)

    def fixed_server(
        self, version: int, env: Mapping[str, str] | None = None, *, flags: Sequence[str] = (), name: str = FIXED_ID
    ) -> SglangServer:
        """A server with the plugin and fixed depth."""
        return self._drafting_server(name, name, version, flags, env)

    @contextlib.contextmanager
    def gateway(self, sglang_url: str, *flags: str, **settings: str) -> Iterator[str]:
        """The URL of a gateway whose rollouts may use all slots: there are no other requests."""
        url = f"http://127.0.0.1:{(port := free_port())}"
        words = [*flags, "--sglang", sglang_url, "--model", str(self.model_dir), "--port", str(port)]
        words += ["--store", str(self.store.root), "--redis-url", self.redis_url]
        settings = {"SLIPSTREAM_GATEWAY_ROLLOUT_SLOTS_SHARE": "1", **settings}
        with running_child("gateway", words, self.folder, **settings) as child:
            wait_until_ready(url, [child], timeout_s=_READY_S)
            yield url

    def _drafting_server(
        self, name: str, engine_id: str, version: int, flags: Sequence[str], env: Mapping[str, str] | None = None
    ) -> SglangServer:
        draft_dir = self.store.root / "versions" / f"{version:06d}"
        return SglangServer(
            self.model_dir,
            log_path=self.folder / f"{name}.log",
            flags=[*speculative_flags(draft_dir, num_steps=DEPTH), *dtype_flags(), *flags],
            env={
                "SLIPSTREAM_ENABLED": "1",
                "SLIPSTREAM_REDIS_URL": self.redis_url,
                "SLIPSTREAM_STORE": str(self.store.root),
                "SLIPSTREAM_ENGINE_ID": engine_id,
                "SLIPSTREAM_CAPTURE": "1",
                # Capture all traces, also where no trainer reads them.
                "SLIPSTREAM_CAPTURE_FLOOR": "1",
                # No watch: swaps are measured here, and come in quick succession.
                "SLIPSTREAM_WATCH": "0",
                # As `slipstream serve` sets it: else a gateway's health checks generate a token each.
                "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
                **(env or {}),
            },
        )


def _parted(prompts: Sequence[Prompt], held_out: int) -> list[Prompt]:
    """Prompts for all slices, from prompts that differ. None before LEARNT_FROM is in it; either part is repeated where
    it is too short. Raises ConfigError where there are fewer than `held_out` different ones before it.
    """
    middle, asked = min(LEARNT_FROM.start, len(prompts) // 2), max(held_out, 1)
    if middle < asked:
        raise ConfigError(
            f"{asked} prompts are to be asked that are not learnt from, and of {len(prompts)} only {middle} are: half "
            f"of all, and at most {LEARNT_FROM.start}"
        )
    parts = (itertools.cycle(part) for part in (prompts[:middle], prompts[middle:]))
    sizes = (LEARNT_FROM.start, LEARNT_FROM.stop - LEARNT_FROM.start)
    return [prompt for part, size in zip(parts, sizes, strict=True) for prompt in itertools.islice(part, size)]


@contextlib.contextmanager
def prepared(model: str, prompts: Path | None, *, held_out: int = 0) -> Iterator[Scene]:
    """Start Redis and make a store whose version in service is a fresh random draft. Raises ConfigError where fewer
    than `held_out` prompts can be kept from the learning.
    """
    chosen = _parted(shuffled_prompts(prompts), held_out)
    model_dir = resolve_model(model)
    fingerprint = target_fingerprint(model_dir)
    with tempfile.TemporaryDirectory() as name, EmbeddedRedis(Path(name) / "redis") as redis:
        folder = Path(name)
        store = DraftStore(folder / "drafts")
        ensure_lineage(store, model_dir, fingerprint, texts=[prompt.text for prompt in chosen[LEARNT_FROM]])
        pointer = DraftPointer(connect(redis.url), model_key(model_dir, fingerprint))
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        yield Scene(folder, model_dir, fingerprint, store, redis.url, pointer, chosen, tokenizer)
