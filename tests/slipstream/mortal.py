"""Services that die by SIGKILL exactly before or after a step that others see, and the process that brings them up.

    python -m tests.slipstream.mortal MODEL_DIR

has everything imported, so that a service is there in no time (tests/fixtures/preloaded.py). Services are put together
as the command line does it; every step is written down before it is made and after, as `before publish 2` and `after
publish 2`, and one of these may be the last.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import sys
from collections.abc import Callable
from os import _exit as exit_at_once
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from pydantic import SecretStr
from safetensors import safe_open

import serving.local.engine
import slipstream.start.local
import trainer.loop
import trainer.process
import trainer.release.live_review
from serving.gateway.app import create_app
from serving.gateway.config import GatewaySettings
from serving.gateway.server import GatewayServer, bind, serve_until_signal
from serving.hotswap.breaker import LiveWatch, WatchRules
from serving.hotswap.follower import DraftFollower
from serving.local.config import LocalEngineConfig
from serving.local.engine import LocalEngine
from serving.local.target.model import Target
from slipstream.start.local import ServeOptions
from speculator.draft.checkpoint import model_key, target_fingerprint
from speculator.redis.client import connect
from speculator.redis.control_plane import DraftPointer
from speculator.redis.trace_stream import TraceStream
from speculator.versions.operator import DraftOperator
from speculator.versions.store import DraftStore
from tests.fixtures.decoding import FixedPlanner
from tests.fixtures.doubles import DoubleEngine
from tests.fixtures.preloaded import Order, take_orders
from tests.trainer.examples import config_for, promote
from trainer.loop import Trainer
from trainer.process import run_trainer
from trainer.session import Training

KEY = "the-key-of-the-operator"
RULES = WatchRules(min_baseline=30, enough_rounds=30, enough_compared=30)
"""Some answers decide. What is tried here is plain: as good, or of no use at all."""


class Role(NamedTuple):
    """One life of a service."""

    service: str
    model_dir: str
    redis_url: str
    folder: str
    """Holds what the services share, and `steps`, all that they did, one life after the other."""
    dies: str = ""
    """Such as `before publish 2`; empty: at SIGTERM."""


def live(role: Role) -> None:
    """Become the service, to the end."""
    steps = os.open(f"{role.folder}/steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def reach(moment: str) -> None:
        os.write(steps, f"{moment}\n".encode())
        if moment == role.dies:
            os.kill(os.getpid(), signal.SIGKILL)

    _watch_steps(reach)
    {"serve": _serve, "gateway": _gateway, "train": _train}[role.service](role, reach)


def _watch_steps(reach: Callable[[str], None]) -> None:
    def watch(owner: Any, method: str, name: Callable[..., str | None]) -> None:
        call = getattr(owner, method)

        @functools.wraps(call)
        def watched(*args: Any) -> Any:
            step = name(*args)
            if step is None:
                return call(*args)
            reach(f"before {step}")
            result = call(*args)
            reach(f"after {step}")
            return result

        setattr(owner, method, watched)

    watch(os, "rename", _renamed)
    watch(DraftPointer, "publish", lambda _, version: f"publish {version}")
    watch(DraftPointer, "replace", lambda _, old, new: f"replace {old} by {new}")
    watch(DraftPointer, "pin", lambda _, version: f"pin {version}")
    watch(DraftPointer, "unpin", lambda _: "unpin")
    watch(LocalEngine, "install_draft", lambda _, version: f"install {version}")
    watch(TraceStream, "ack", lambda *_: "ack")
    watch(Training, "restart_from", lambda _, version: f"start over from {version}")


def _renamed(source: Path, target: Path) -> str | None:
    """What becomes durable with a rename; None for what is nobody else's concern."""
    match target.parent.name:
        case "versions":
            return f"stored {int(target.name)}"
        case "states":
            state = json.loads(source.read_bytes())[-1]["state"]
            return f"{state} {int(target.stem)}"
        case "state":
            with safe_open(source, framework="pt") as file:
                return f"checkpoint of {json.loads(file.metadata()['progress'])['version']}"
        case _:
            return None


def _serve(role: Role, reach: Callable[[str], None]) -> None:
    async def told(server: GatewayServer, *, draft_version: int, **rest: Any) -> None:
        reach(f"serves {draft_version} at {server.url}")
        await serve_until_signal(server, draft_version=draft_version, **rest)

    # Every round asks the head, so that a version is judged soon.
    serving.local.engine.RoundPlanner = lambda **_: FixedPlanner()  # type: ignore[assignment,misc]
    slipstream.start.local.LiveWatch = functools.partial(LiveWatch, rules=RULES)
    slipstream.start.local.DraftFollower = functools.partial(DraftFollower, poll_s=0.02)
    slipstream.start.local.serve_until_signal = told
    engine = LocalEngineConfig(
        model_dir=Path(role.model_dir),
        model_name="toy",
        dtype="float64",
        depth=3,
        control_share=0.0,
        num_slots=4,
        context_length=256,
        capture=False,
        engine_id="engine-0",
    )
    options = ServeOptions(
        engine=engine,
        store=Path(role.folder, "store"),
        redis_url=role.redis_url,
        host="127.0.0.1",
        port=0,
        stream_max_bytes=1 << 20,
        draft_vocab_size=16,
        vocab_texts=(),
        seed=0,
        trace_ttl_hours=0,
    )
    slipstream.start.local.run_server(options, GatewaySettings())


def _gateway(role: Role, reach: Callable[[str], None]) -> None:
    """The gateway of an engine that is a process of its own, as `slipstream serve --engine sglang` starts it."""
    fingerprint = target_fingerprint(Path(role.model_dir))
    pointer = DraftPointer(connect(role.redis_url), model_key(Path(role.model_dir), fingerprint))
    desk = DraftOperator(DraftStore(Path(role.folder, "store")), lambda: pointer, target_fingerprint=fingerprint)
    server = GatewayServer(_admin_app(desk), bind("127.0.0.1", 0))
    reach(f"serves 0 at {server.url}")
    asyncio.run(serve_until_signal(server, model="toy", draft_version=0))


def _admin_app(desk: DraftOperator) -> FastAPI:
    settings = GatewaySettings(admin_key=SecretStr(KEY))
    return create_app(DoubleEngine(), settings=settings, registry=CollectorRegistry(), drafts=desk)


def _train(role: Role, reach: Callable[[str], None]) -> None:
    """The gate is open, and it does not doze for as long as it usually does."""
    train_until = trainer.process.train_until

    def told(*args: Any) -> None:
        reach("trains")
        train_until(*args)

    trainer.process.train_until = told
    trainer.process.Trainer = functools.partial(Trainer, decide=promote)  # type: ignore[misc,assignment]
    trainer.loop.IDLE_BLOCK_MS = 20
    trainer.release.live_review.POLL_INTERVAL_S = 0.02
    model_dir = Path(role.model_dir)
    run_trainer(
        config_for(
            model_dir,
            Path(role.folder),
            redis_url=role.redis_url,
            model_key=model_key(model_dir, target_fingerprint(model_dir)),
            draft_vocab_size=16,
            checkpoint_interval_s=0.0,
            publish_interval_s=0.0,
            publish_min_tokens=200,
            publish_pause_s=0.0,
            max_passes=0.01,
            autocast=False,
            device="cpu",
        )
    )


def _become(order: Order) -> None:
    live(Role(*order.words))
    sys.stdout.flush()
    sys.stderr.flush()
    exit_at_once(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    # What they import and compute on first use is here already, and collecting garbage copies no pages.
    Target(Path(sys.argv[1]), num_slots=1, context_length=8, cache_margin=1, dtype=torch.float64)
    _admin_app(DraftOperator(DraftStore(Path(sys.argv[1])), lambda: sys.exit("not to be used")))
    take_orders((), _become)
