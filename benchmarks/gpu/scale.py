"""Cost of the plugin, drafting, capture and a swap at scale, in SGLang with a large target of random weights.

Weights are never read from a disk: SGLang makes them up (`--load-format dummy`), so nothing can be said of acceptance.
How many proposals are accepted is SGLang's own simulation (`SGLANG_SIMULATE_ACC_LEN`).

Servers are started in pairs that are asked in turns. A decode step's time is the difference between a long and a short
answer to the same batch, over the steps between them: reading the prompts and starting is in neither.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.common.report import Spread, in_order, percentile
from speculator.draft.checkpoint import draft_config_json, expected_shapes
from speculator.draft.eagle3 import DraftConfig
from speculator.redis.client import connect
from speculator.redis.control_plane import DraftPointer
from speculator.redis.embedded import EmbeddedRedis
from speculator.versions.lineage import admit, begin
from speculator.versions.store import DraftStore
from tests.sglang.server import IS_ON_GPU, SglangServer, speculative_flags

FINGERPRINT = "0" * 64
ENGINE_ID, MODEL_KEY = "scale", "scale"
DEPTH, ACCEPT_LENGTH = 3, 2
PROMPT_TOKENS, SHORT, LONG = 32, 16, 144


@dataclass(frozen=True)
class Shape:
    """Shape of a Llama-like target."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


LARGE = Shape("8b", 4096, 14336, 32, 32, 8, 128, 151_936, 32_000)
SMALL = Shape("small", 256, 512, 8, 4, 2, 64, 4096, 512)
"""For a machine without a GPU: the same steps."""


@dataclass
class Scene:
    """A target of one shape, a store with two random drafts for it, and Redis."""

    folder: Path
    shape: Shape
    store: DraftStore
    redis_url: str
    pointer: DraftPointer
    batches: tuple[int, ...]
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def model_dir(self) -> Path:
        return self.folder / "target"

    def server(
        self, name: str, *, drafts: bool, plugin: bool, asleep: bool = False, accept_length: int = ACCEPT_LENGTH
    ) -> SglangServer:
        """An SGLang server. With `drafts` it drafts chains of `DEPTH`, and SGLang simulates that a verification commits
        `accept_length` tokens; or the draft is `asleep`.
        """
        flags = ["--skip-tokenizer-init", "--load-format", "dummy", "--dtype", "bfloat16"]
        flags += ["--max-running-requests", str(max(self.batches))]
        flags += ["--max-total-tokens", str(max(self.batches) * (PROMPT_TOKENS + LONG + 4 * DEPTH))]
        if IS_ON_GPU:
            flags += [
                "--cuda-graph-max-bs-decode",
                str(max(self.batches)),
                "--cuda-graph-bs-decode",
                *map(str, self.batches),
            ]
        env = {}
        if drafts:
            flags += [*speculative_flags(self.store.root / "versions" / "000001", num_steps=DEPTH)]
            flags += ["--speculative-draft-load-format", "safetensors"]
            if not asleep:
                env["SGLANG_SIMULATE_ACC_LEN"] = str(accept_length)
        if asleep:
            config = self.folder / "adaptive.json"
            config.write_text('{"1": {"candidate_steps": [0, 2, 3]}}')
            flags += ["--speculative-adaptive", "--speculative-adaptive-config", str(config)]
        if plugin:
            settings = {
                "ENABLED": "1",
                "REDIS_URL": self.redis_url,
                "STORE": str(self.store.root),
                "ENGINE_ID": ENGINE_ID,
                "MODEL_KEY": MODEL_KEY,
                "TARGET_FINGERPRINT": FINGERPRINT,
                "CAPTURE": "1",
                "CAPTURE_FLOOR": "1",
                "WATCH": "0",
                "POLL_S": "0.1",
                "STREAM_MAX_BYTES": str(8 << 30),
            }
            env |= {f"SLIPSTREAM_{key}": value for key, value in settings.items()}
        return SglangServer(
            self.model_dir, log_path=self.folder / f"{name}.log", flags=flags, env=env, ready_timeout_s=400
        )


@contextlib.contextmanager
def prepared(folder: Path, shape: Shape, batches: tuple[int, ...]) -> Iterator[Scene]:
    """Write the target's configuration, and two random drafts; start Redis."""
    target = folder / "target"
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(shape.config()))
    store = DraftStore(folder / "drafts")
    config = DraftConfig.for_target(shape.config(), draft_vocab_size=shape.draft_vocab_size)
    for number in (1, 2):
        store.write(
            _random_draft(config, number),
            draft_config_json(config),
            parent=number - 1 or None,
            target_fingerprint=FINGERPRINT,
            info={"origin": "fresh"},
        )
    begin(store, 1, target_fingerprint=FINGERPRINT)
    admit(store, 2, target_fingerprint=FINGERPRINT, actor="benchmark", reason="benchmark")
    with EmbeddedRedis(folder / "redis") as redis:
        yield Scene(folder, shape, store, redis.url, DraftPointer(connect(redis.url), MODEL_KEY), batches)


def _random_draft(config: DraftConfig, seed: int) -> dict[str, torch.Tensor]:
    device = torch.device("cuda" if IS_ON_GPU else "cpu")
    generator = torch.Generator(device).manual_seed(seed)
    state = {}
    for name, shape in expected_shapes(config).items():
        if name in ("d2t", "t2d"):
            continue
        weights = torch.randn(shape, generator=generator, device=device) * 0.02 if len(shape) > 1 else torch.ones(shape)
        state[name] = weights.to("cpu", torch.bfloat16)
    in_vocabulary = torch.arange(config.vocab_size) < config.draft_vocab_size
    return {**state, "d2t": torch.zeros(config.draft_vocab_size, dtype=torch.int64), "t2d": in_vocabulary}


def ask(scene: Scene, server: SglangServer, batch: int, num_tokens: int, captured: int) -> float:
    """Seconds of a batch of fresh prompts, of which the first `captured` may be captured."""
    ids = [[scene.rng.randrange(3, scene.shape.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
    params = [
        {
            "temperature": 0,
            "max_new_tokens": num_tokens,
            "ignore_eos": True,
            "custom_params": {"slipstream": {"capture": number < captured}},
        }
        for number in range(batch)
    ]
    begin_s = time.perf_counter()
    response = httpx.post(
        f"{server.url}/generate", json={"input_ids": ids, "sampling_params": params}, timeout=300, trust_env=False
    )
    seconds = time.perf_counter() - begin_s
    assert response.is_success, response.text[:2000]
    return seconds


def token_ms(scene: Scene, server: SglangServer, batch: int, captured: int) -> float:
    """Milliseconds of decoding a token of each request of a batch."""
    short, long = (ask(scene, server, batch, num_tokens, captured) for num_tokens in (SHORT, LONG))
    return 1000 * (long - short) / (LONG - SHORT)


Cell = tuple[SglangServer, Callable[[int], int]]
"""(server, how many of a batch are captured)."""


def in_turns(scene: Scene, cells: dict[str, Cell], repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds a token by cell and batch, as medians of turns, each of which begins with another cell."""
    found = {}
    for batch in scene.batches:
        times: dict[str, list[float]] = {name: [] for name in cells}
        for server, _ in cells.values():
            ask(scene, server, batch, SHORT, 0)
        for repeat in range(repeats):
            for name in in_order(cells, repeat):
                server, captured = cells[name]
                times[name].append(token_ms(scene, server, batch, captured(batch)))
        for name, values in times.items():
            found[f"{name}_{batch}"] = Spread.of(values).to_dict()
            print(f"{name:<28} batch {batch:<4} {Spread.of(values)} ms a token", flush=True)
    return found


def swap_gaps(scene: Scene, server: SglangServer, batch: int, num_swaps: int) -> dict[str, Any]:
    """Swap between two versions under load; returns the plugin's report and the token gaps of one request."""
    stop, gaps_ms, stalls_ms = threading.Event(), dict[str, list[float]](calm=[], swapping=[]), list[float]()
    phase = "calm"

    def load() -> None:
        while not stop.is_set():
            ask(scene, server, max(batch - 1, 1), LONG, 0)

    def watch() -> None:
        while not stop.is_set():
            ids = [scene.rng.randrange(3, scene.shape.vocab_size) for _ in range(PROMPT_TOKENS)]
            before_s = None
            for _ in server.stream(ids, max_new_tokens=LONG, ignore_eos=True):
                now_s = time.perf_counter()
                if before_s is not None:
                    gaps_ms[phase].append(1000 * (now_s - before_s))
                before_s = now_s

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        clients = [pool.submit(load), pool.submit(watch)]
        time.sleep(4)
        phase = "swapping"
        for number in range(num_swaps):
            version = 2 - number % 2
            scene.pointer.publish(version)
            deadline_s = time.monotonic() + 10
            while time.monotonic() < deadline_s:
                report = scene.pointer.engines().get(ENGINE_ID, {})
                if report.get("version") == str(version):
                    stalls_ms.append(float(report["last_stall_ms"]))
                    break
                time.sleep(0.02)
        stop.set()
        for client in clients:
            client.result()
    found: dict[str, Any] = {"stall_ms": stalls_ms}
    for name, values in gaps_ms.items():
        if values:
            p50, p99 = (percentile(values, percent) for percent in (50, 99))
            found[f"{name}_ms"] = {"p50": p50, "p99": p99, "max": max(values), "count": len(values)}
    return found


def report_of(scene: Scene) -> dict[str, str]:
    """The plugin's report, once it has written all captured traces."""
    report: dict[str, str] = {}
    for _ in range(50):
        time.sleep(0.3)
        report = scene.pointer.engines().get(ENGINE_ID, {})
        if report.get("pending") == "0":
            break
    return report


@contextlib.contextmanager
def started(*servers: SglangServer) -> Iterator[None]:
    """Start all servers at once."""
    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(len(servers)) as pool:
        for _ in pool.map(stack.enter_context, servers):
            pass
        yield


def asleep(scene: Scene, repeats: int) -> dict[str, Any]:
    """A server without drafts and without the plugin, beside one whose draft has learnt nothing and sleeps."""
    plain = scene.server("plain", drafts=False, plugin=False)
    sleeping = scene.server("asleep", drafts=True, plugin=True, asleep=True)
    with started(plain, sleeping):
        cells: dict[str, Cell] = {
            "plain": (plain, lambda batch: 0),
            "asleep": (sleeping, lambda batch: 0),
            "asleep_captured": (sleeping, lambda batch: batch),
        }
        return {"ms_a_token": in_turns(scene, cells, repeats), "report": report_of(scene)}


def drafting(scene: Scene, repeats: int, num_swaps: int, accept_lengths: tuple[int, ...]) -> dict[str, Any]:
    """SGLang's own EAGLE-3, beside it with the plugin: nobody captured, half, all; and swaps under load. The same for
    the plugin at other accept lengths.
    """
    alone = scene.server("alone", drafts=True, plugin=False)
    live = scene.server("live", drafts=True, plugin=True)
    with started(alone, live):
        cells: dict[str, Cell] = {
            "eagle_alone": (alone, lambda batch: 0),
            "plugin": (live, lambda batch: 0),
            "plugin_half_captured": (live, lambda batch: (batch + 1) // 2),
            "plugin_captured": (live, lambda batch: batch),
        }
        found: dict[str, Any] = {"ms_a_token": in_turns(scene, cells, repeats), "report": report_of(scene)}
        found["swaps"] = swap_gaps(scene, live, min(64, max(scene.batches)), num_swaps)
    for length in accept_lengths:
        simulated = scene.server(f"live{length}", drafts=True, plugin=True, accept_length=length)
        with started(simulated):
            cells = {
                f"plugin_accepts_{length}": (simulated, lambda batch: 0),
                f"plugin_accepts_{length}_captured": (simulated, lambda batch: batch),
            }
            found["ms_a_token"] |= in_turns(scene, cells, repeats)
            report = report_of(scene)
            found[f"accepts_{length}"] = {
                "accept_length": report["accept_length"],
                "captured": report["captured"],
                "swaps": swap_gaps(scene, simulated, min(64, max(scene.batches)), num_swaps),
            }
    return found
