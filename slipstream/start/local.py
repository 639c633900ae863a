"""`slipstream serve`: the gateway with the local engine behind it, capture and hot swap beside it.

Start: port → Redis → target → store → engine → recorder and follower → gateway.
Stop:  gateway drains → follower → engine → group texts and recorder flush → Redis connections close.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import partial

from serving.capture.privacy import ErasureWatch
from serving.capture.recorder import TraceRecorder
from serving.engine import Engine
from serving.gateway.config import GatewaySettings
from serving.gateway.server import GatewayServer, bind, make_room, serve_until_signal
from serving.hotswap.breaker import LiveWatch
from serving.hotswap.follower import DraftFollower
from serving.local.engine import LocalEngine
from serving.metrics import VerdictCollector
from slipstream.start.effects import GATEWAY_OF_LOCAL, check_variables
from slipstream.start.exposure import check_exposure
from slipstream.start.local_site import (
    ServeOptions,
    Site,
    first_version,
    load_target,
    open_app,
    open_engine,
    open_privacy,
    open_recorder,
    open_sharing,
)
from speculator.errors import EngineDeadError
from speculator.redis.control_plane import DraftPointer

_LOOK_S = 1.0
"""Between two looks at whether the engine lives."""


def run_server(options: ServeOptions, settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises ConfigError, StreamError, StoreError or DraftError when it cannot start, EngineDeadError when the engine
    fails.
    """
    check_exposure(options.host, options.redis_url, settings)
    check_variables(settings, GATEWAY_OF_LOCAL)
    make_room(settings, each=1)
    with ExitStack() as opened:
        listener = opened.enter_context(bind(options.host, options.port))
        site = Site.of(options, opened)
        client = site.connect()
        pointer = DraftPointer(client, site.key)
        recorder = open_recorder(site)
        target = load_target(options.engine)
        version = first_version(site)
        watch = LiveWatch(version)
        sharing = open_sharing(site, vocab_size=target.embed.shape[0])
        engine = open_engine(site, target, version, recorder, watch, sharing)
        engine.start()
        opened.callback(engine.stop)
        app = open_app(site, settings, engine, pointer, takes_rewards=recorder is not None)
        privacy = open_privacy(site, app.state.erase, engine, recorder, sharing)
        follower = DraftFollower(
            engine,
            pointer,
            engine_id=options.engine.engine_id,
            status=partial(_status, engine, recorder, privacy),
            watch=watch,
            lifecycle=site.store.lifecycle,
        )
        site.registry.register(VerdictCollector(lambda: follower.log))
        follower.start()
        opened.callback(lambda: follower.stop(is_in_order=engine.health().alive))
        server = GatewayServer(app, listener, max_connections=settings.max_connections)
        asyncio.run(
            serve_until_signal(
                server,
                model=options.engine.model_name,
                draft_version=engine.draft_version,
                beside=until_it_fails(engine),
            )
        )


async def until_it_fails(engine: Engine) -> None:
    """An engine that has failed serves nobody, and is not started again here: whoever started this process does that.

    Raises EngineDeadError.
    """
    while (health := engine.health()).alive:  # noqa: ASYNC110 - its thread knows of no event loop
        await asyncio.sleep(_LOOK_S)
    raise EngineDeadError(f"the engine ended ({health.detail}): the log says why")


def _status(engine: LocalEngine, recorder: TraceRecorder | None, privacy: ErasureWatch) -> dict[str, str | int | float]:
    """What the engine's report says beside its version."""
    return {
        "target_version": engine.target_version,
        **engine.load.report(),
        **({"capture_share": round(recorder.stats().share, 4)} if recorder else {}),
        **privacy.look(),
    }
