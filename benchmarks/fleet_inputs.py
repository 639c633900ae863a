"""What the fleet simulation goes by: each figure with its unit and where it is from.

Measured when the benchmark starts, on this machine: the size of a trace, what Redis's one thread takes for the commands
that an engine sends, what verifying a stored version takes. Measured before: the page that has the figure is named. The
rest is assumed, and says so.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import redis
import torch

from speculator.checkpoint import expected_shapes
from speculator.codec import encode_trace
from speculator.embedded_redis import EmbeddedRedis
from speculator.erasures import Erasures
from speculator.fleet import Fleet, Views
from speculator.keys import RedisKeys
from speculator.model import DraftConfig
from speculator.pointer import DraftPointer
from speculator.redis_client import connect
from speculator.store import DraftStore
from speculator.stream import TraceStream
from speculator.waves import Member, Spread, Standing
from tests.traces import make_trace

KEY = "simulated"
EIGHT_B = DraftConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128_256,
    draft_vocab_size=32_000,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
)
"""A draft for a target of 8B, with the published EAGLE-3's vocabulary."""
_SMALL = DraftConfig(
    hidden_size=512,
    intermediate_size=2048,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=32_000,
    draft_vocab_size=8192,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
)
PROMPT_TOKENS, ANSWER_TOKENS, TOP_K, PROPOSALS, ACCEPT_LENGTH = 200, 300, 64, 5, 2.0


@dataclass(frozen=True, kw_only=True)
class Input:
    value: float
    unit: str
    source: str

    def __str__(self) -> str:
        return f"{self.value:14,.4g} {self.unit:<22} {self.source}"


def assumed(value: float, unit: str, why: str) -> Input:
    return Input(value=value, unit=unit, source=f"assumed: {why}")


def measured(value: float, unit: str, what: str) -> Input:
    return Input(value=value, unit=unit, source=f"measured now: {what}")


def version_bytes() -> int:
    """A stored version for a target of 8B: bfloat16, but for the two maps of the draft's vocabulary."""
    sizes = {"d2t": 8, "t2d": 1}
    shapes = expected_shapes(EIGHT_B)
    return sum(sizes.get(name, 2) * torch.Size(shape).numel() for name, shape in shapes.items())


def trace_of_8b() -> bytes:
    """One encoded trace of the shape of an 8B target's; its values are random, which its size does not depend on."""
    trace = make_trace(
        T=PROMPT_TOKENS + ANSWER_TOKENS,
        d=EIGHT_B.hidden_size,
        K=TOP_K,
        R=round(ANSWER_TOKENS / ACCEPT_LENGTH),
        P=PROPOSALS,
        labelled_from=PROMPT_TOKENS - 1,
        num_prompt_tokens=PROMPT_TOKENS,
    )
    return encode_trace(trace)


def measure_store() -> float:
    """Bytes a second at which a version is read, hashed and checked, from the page cache."""
    with tempfile.TemporaryDirectory() as folder:
        store, weights = DraftStore(Path(folder)), _weights(_SMALL)
        store.write(weights, {}, parent=None, target_fingerprint="f" * 64, info={})
        num_bytes = sum(tensor.nbytes for tensor in weights.values())
        seconds = min(_seconds(lambda: store.load(1, expected_fingerprint="f" * 64)) for _ in range(5))
    return num_bytes / seconds


def measure_redis(trace: bytes, engines: list[int], *, repeats: int) -> dict[str, float]:
    """Seconds of the thread of Redis's that runs commands: for a poll, a report, a look of the sampling, a MB of traces
    from append to ack, and by number of engines a look at all reports (`look_N_s`) and a question for a place
    (`ask_N_s`); the bytes of the document that is read there (`spread_bytes_N`).
    """
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(folder) as server, connect(server.url) as client:
        pointer, orders = DraftPointer(client, KEY), Erasures(client, KEY)
        stream = TraceStream(client, KEY, max_bytes=512 << 20)
        pointer.publish(1)

        def cpu_of(action: Callable[[], object], times: int) -> float:
            before = _cpu_s(client)
            for _ in range(times):
                action()
            return (_cpu_s(client) - before) / times

        def poll() -> None:
            pointer.pinned()
            pointer.desired()

        def report(engine_id: str = "sglang-0") -> None:
            pointer.announced_target(f"{engine_id}:1")
            pointer.depth_limit(engine_id)
            orders.orders()
            pointer.report_engine(engine_id, _STATUS)

        def settle() -> None:
            stream.append(trace, trace_id=str(time.monotonic_ns()))
            stream.ack([entry.id for entry in stream.read(1, block_ms=0)])

        found["poll_s"] = cpu_of(poll, 500 * repeats)
        found["report_s"] = cpu_of(report, 200 * repeats)
        found["sample_s"] = cpu_of(stream.lag, 50 * repeats)
        found["trace_s_per_mb"] = cpu_of(settle, 5 * repeats) / (len(trace) / 1e6)
        for number in engines:
            for each in range(number):
                report(f"sglang-{each}")
            fleet = Fleet(client, KEY)
            whole = msgspec.json.encode(_whole_spread(number))
            client.set(RedisKeys(model_key=KEY).spread, whole)
            found[f"spread_bytes_{number}"] = len(whole)
            found[f"look_{number}_s"] = cpu_of(fleet.views, max(1, 20 * repeats // number + 1))
            found[f"ask_{number}_s"] = cpu_of(partial(fleet.change_spread, _changes_nothing), 50)
    return found


_STATUS: dict[str, str | int | float] = {
    **dict.fromkeys(("version", "refused", "watched", "swaps", "swap_failures", "steps", "depth", "asleep"), 12345),
    **dict.fromkeys(("verifications", "verified_tokens", "target_ok", "target_version", "erased_ms", "pending"), 12345),
    **dict.fromkeys(("captured", "appended", "trace_bytes", "trace_tokens", "baseline_verifications"), 123456789),
    **dict.fromkeys(("speedup", "speedup_lower", "speedup_upper", "accept_length", "last_stall_ms"), 1.2345),
    **dict.fromkeys(("rounds", "decode_ms", "round_tokens", "proposals", "accepted", "dropped"), "1=2,2=3,3=4,4=5"),
    **dict.fromkeys(("wants", "trial_verifications", "trial_target"), 0),
    "verdicts": "promoted=1,rolled_back=2,withdrawn=0",
    "last_verdict": "version 41 promoted: accepts more than the incumbent",
    "process": "sglang-0:123",
    "role": "settled",
}
"""A report of the plugin's size."""


def _changes_nothing(spread: Spread | None, engines: Views) -> None:
    """What an engine does for which there is no place."""


def _whole_spread(number: int) -> Spread:
    """With every engine in it."""
    now_s = time.time()
    member = Member(standing=Standing.KEPT, since_s=now_s, target=0, wave=1)
    members = {f"sglang-{each}": member for each in range(number)}
    return Spread(version=2, target=0, wave=1, opened_s=now_s, members=members)


def _weights(config: DraftConfig) -> dict[str, torch.Tensor]:
    dtypes = {"d2t": torch.int64, "t2d": torch.bool}
    weights = {
        name: torch.zeros(shape, dtype=dtypes.get(name, torch.bfloat16))
        for name, shape in expected_shapes(config).items()
    }
    weights["t2d"][: config.draft_vocab_size] = True
    return weights


def _cpu_s(client: redis.Redis) -> float:
    """Of the thread that runs commands."""
    used: Any = client.info("cpu")
    return float(used["used_cpu_user_main_thread"]) + float(used["used_cpu_sys_main_thread"])


def _seconds(action: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    action()
    return time.perf_counter() - began_s
