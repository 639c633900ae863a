"""Redis, SGLang with the plugin, gateway and trainer as docker-compose.yml starts them, on a machine without a GPU.

SGLang is the real one, on the project's CPU operators (`tests/sglang/ops`): it shows the integration, not its speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from slipstream.models import BUNDLED_MODEL, resolve_model
from slipstream.processes import running_child, wait_until_ready
from slipstream.topics import built_in_prompts, endless
from slipstream.traffic import Traffic, TrafficStats
from speculator.checkpoint import model_name, target_fingerprint
from speculator.embedded_redis import EmbeddedRedis
from speculator.lineage import ensure_lineage
from speculator.store import DraftStore
from tests.sglang.server import cpu_environment

_START_TIMEOUT_S = 300.0
_CLIENTS = 2


@contextlib.contextmanager
def services(folder: Path, ports: Mapping[str, int]) -> Iterator[str]:
    """Start everything on the ports of `sglang`, `gateway` and `trainer`; yields the gateway's URL once it serves."""
    os.environ |= {
        **cpu_environment(),
        "SLIPSTREAM_TRAINER_METRICS_PORT": str(ports["trainer"]),
        # So slow a machine verifies too little in some minutes for trials to end: versions come as they are published.
        "SLIPSTREAM_WATCH": "0",
    }
    model_dir, store = resolve_model(BUNDLED_MODEL), folder / "drafts"
    texts = [prompt.text for prompt in built_in_prompts()]
    ensure_lineage(DraftStore(store), model_dir, target_fingerprint(model_dir), texts=texts)
    with contextlib.ExitStack() as running:
        redis = running.enter_context(EmbeddedRedis(folder / "redis"))
        common = ["--model", BUNDLED_MODEL, "--redis-url", redis.url, "--store", str(store)]
        sglang = ["--port", str(ports["sglang"]), "--device", "cpu", "--capture", "--depth", "3"]
        front = ["--port", str(ports["gateway"]), "--sglang", f"http://127.0.0.1:{ports['sglang']}"]
        started = [
            running.enter_context(running_child(name, [*common, *own], folder))
            for name, own in (("sglang", sglang), ("gateway", front), ("train", ["--state", str(folder / "state")]))
        ]
        url = f"http://127.0.0.1:{ports['gateway']}"
        wait_until_ready(url, started, timeout_s=_START_TIMEOUT_S)
        yield url


def ask_for(url: str, minutes: float) -> TrafficStats:
    """The demo's questions, from two clients."""

    async def run() -> TrafficStats:
        name = model_name(resolve_model(BUNDLED_MODEL))
        prompts = endless(built_in_prompts(), seed=0)
        traffic = Traffic(url, name, prompts, max_tokens=120, temperature=0.0)
        asyncio.get_running_loop().call_later(60 * minutes, traffic.stop)
        await traffic.run(_CLIENTS)
        return traffic.stats

    return asyncio.run(run())
