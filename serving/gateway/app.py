"""Assemble the gateway's app: routes, middleware, metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match

from serving.engine import Engine, ServedEngine, Tokenizer
from serving.gateway.access import AccessControl
from serving.gateway.admin import Drafts, Targets, admin_routes, target_routes
from serving.gateway.config import GatewaySettings
from serving.gateway.keys import Keyring, OneKey
from serving.gateway.live.live import Live, ReadTrainerStatus, live_routes
from serving.gateway.live.status import declare_keys, page_routes, status_routes
from serving.gateway.metrics import GatewayMetrics, HealthCollector, RolloutCollector
from serving.gateway.openai.generation import Gateway
from serving.gateway.openai.routes import completion_routes
from serving.gateway.passthrough import passthrough_routes
from serving.gateway.rollouts.registry import RolloutRegistry
from serving.gateway.rollouts.routes import SendRewards, rollout_routes
from serving.gateway.telemetry import Telemetry, exchange_of
from serving.gateway.upstream import Upstream
from serving.rollout.engines import EnginePool, InProcessEngine
from serving.rollout.interactive_share import SlotsShare


async def _routing_error(request: Request, failure: Exception) -> Response:
    """Answer an unknown path or a wrong method with the error envelope. The framework's answer lacks it, and names the
    methods of only one route where several have the path.
    """
    response = exchange_of(request).refuse(failure)
    if response.status_code == 405:
        others = [route for route in request.app.routes if route.matches(request.scope)[0] is Match.PARTIAL]
        methods = {method for route in others for method in route.methods or ()}
        response.headers["allow"] = ", ".join(sorted(methods))
    return response


def create_app(
    engine: Engine,
    *,
    settings: GatewaySettings,
    registry: CollectorRegistry = REGISTRY,
    drafts: Drafts | None = None,
    targets: Targets | None = None,
    send_rewards: SendRewards | None = None,
    trainer_status: ReadTrainerStatus | None = None,
) -> FastAPI:
    """The OpenAI-compatible app in front of `engine`, with the live page; with `drafts` also the operator's endpoints,
    with `targets` the endpoint for new target weights. `send_rewards` gets rewards of rollouts. The app's
    `state.erase` drops what it keeps of tenants (`serving.capture.filter.Forget`). The page shows `trainer_status`.

    Its collectors are added to `registry`, and `/metrics` shows all of that registry; raises ValueError where the
    registry already serves a gateway, ConfigError where the file with the API keys is not usable.
    """
    share = settings.make_slots_share()
    gateway = Gateway(engine=engine, settings=settings, metrics=GatewayMetrics(registry, engine.info.model, share))
    # Rollouts share this engine with all other requests.
    rollout_engine = InProcessEngine("local", engine, share, num_interactive=lambda: gateway.num_samples)
    rollout_registry = RolloutRegistry([rollout_engine], settings)
    gateway.on_change = rollout_registry.driver.dispatch
    registry.register(RolloutCollector(rollout_registry.driver, rollout_registry.ended, share))
    rollouts = rollout_routes(
        rollout_registry, info=engine.info, tokenizer=engine.tokenizer, settings=settings, send_rewards=send_rewards
    )
    routers = [completion_routes(gateway), rollouts]
    if targets is not None:
        routers.append(target_routes(targets, settings, on_target_update=rollout_registry.driver.set_target_version))
    app = _assemble(
        routers,
        engine,
        settings,
        gateway.metrics,
        registry,
        drafts,
        trainer_status,
        shows_tokens=True,
        background=rollout_registry.running,
    )
    app.state.erase = rollout_registry.erase
    return app


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """What `/v1/rollouts` needs where the engines are other processes; `create_app` makes its own."""

    pool: EnginePool
    slots_share: SlotsShare
    """What the pool's engines obey; it gets the latencies of all other requests."""
    tokenizer: Tokenizer
    send_rewards: SendRewards | None = None


def create_passthrough_app(
    host: ServedEngine,
    upstream: Upstream,
    *,
    settings: GatewaySettings,
    registry: CollectorRegistry = REGISTRY,
    drafts: Drafts | None = None,
    targets: Targets | None = None,
    target: str = "",
    least_version: Callable[[], int] = lambda: 0,
    rollouts: Rollouts | None = None,
    engine_figures: Collector | None = None,
    trainer_status: ReadTrainerStatus | None = None,
) -> FastAPI:
    """The app in front of a server that speaks the OpenAI protocol itself; `host` reports and steers its draft. The
    server's target must have the fingerprint `target` and a version from `least_version` on. Without `rollouts` there
    is no `/v1/rollouts`. `engine_figures`: see `Live`.
    """
    metrics = GatewayMetrics(registry, host.info.model, rollouts.slots_share if rollouts is not None else None)
    routers = [passthrough_routes(host, upstream, settings, metrics, target, least_version)]
    on_target_update: Callable[[int], None] = _ignore
    erase: Callable[[Collection[str]], None] = _ignore
    running: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    if rollouts is not None:
        rollout_registry, pool = RolloutRegistry([], settings), rollouts.pool
        on_target_update, erase = rollout_registry.driver.set_target_version, rollout_registry.erase
        registry.register(RolloutCollector(rollout_registry.driver, rollout_registry.ended, rollouts.slots_share))
        tokenizer, send_rewards = rollouts.tokenizer, rollouts.send_rewards
        routers.append(
            rollout_routes(
                rollout_registry, info=host.info, tokenizer=tokenizer, settings=settings, send_rewards=send_rewards
            )
        )

        @asynccontextmanager
        async def running() -> AsyncIterator[None]:
            # The driver closes its streams before the pool closes the connections.
            async with pool.running(rollout_registry.driver.set_engines), rollout_registry.running():
                yield

    if targets is not None:
        routers.append(target_routes(targets, settings, on_target_update=on_target_update))
    app = _assemble(
        routers,
        host,
        settings,
        metrics,
        registry,
        drafts,
        trainer_status,
        shows_tokens=False,
        background=running,
        engine_figures=engine_figures,
    )
    app.state.erase = erase
    return app


def _ignore(_: object) -> None:
    return


def _assemble(
    routers: Sequence[APIRouter],
    host: ServedEngine,
    settings: GatewaySettings,
    metrics: GatewayMetrics,
    registry: CollectorRegistry,
    drafts: Drafts | None,
    trainer_status: ReadTrainerStatus | None,
    *,
    shows_tokens: bool,
    background: Callable[[], AbstractAsyncContextManager[None]],
    engine_figures: Collector | None = None,
) -> FastAPI:
    """`background` runs while the app is served. `shows_tokens`, `engine_figures`, `trainer_status`: see `Live`."""
    registry.register(HealthCollector(host.health, host.info.model))
    live = Live(host, registry, shows_tokens=shows_tokens, engine_figures=engine_figures, trainer_status=trainer_status)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with live.lifespan(), background():
            yield

    # No documentation pages: the framework's load scripts from other sites. The schema stays at /openapi.json.
    app = FastAPI(
        title="Slipstream",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        servers=[{"url": settings.root_path}] if settings.root_path else None,
    )
    if drafts is not None:
        routers = [*routers, admin_routes(drafts, settings)]
    for router in (*routers, status_routes(host, registry), live_routes(live, drafts), page_routes(settings.root_path)):
        # One flat list, so that access control finds the same route as the router; there is nothing else to include.
        app.router.routes.extend(router.routes)
    for route in list(app.routes):
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
            # The server drops the body of the answer to HEAD.
            app.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)
    app.add_exception_handler(HTTPException, _routing_error)
    keyring = _keyring(settings)
    declare_keys(app, has_keys=keyring is not None)
    # Middleware that is added later runs first.
    app.add_middleware(
        AccessControl,
        routes=app.router.routes,
        keyring=keyring,
        settings=settings,
        metrics=metrics,
        is_full=lambda: host.health().is_full,
    )
    app.add_middleware(Telemetry, metrics=metrics, root_path=settings.root_path)
    if settings.cors_origins:
        origins, every = [origin.strip() for origin in settings.cors_origins.split(",")], ["*"]
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=every, allow_headers=every, expose_headers=every
        )
    return app


def _keyring(settings: GatewaySettings) -> Keyring | OneKey | None:
    """The API keys; None where the gateway needs none. Raises ConfigError for a file that is not usable."""
    if settings.keys_file is not None:
        return Keyring(settings.keys_file)
    return None if settings.api_key is None else OneKey(settings.api_key)
