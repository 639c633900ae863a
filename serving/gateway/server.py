"""Serve the app on a port until a signal comes, inside an event loop that also runs other things.

Stopping: refuse new connections → let running answers finish for `grace_s` → send the rest a shutdown error →
close.

A connection is a file descriptor, and the soft limit of a process is often 1,024. Idle connections are kept for longer
than load balancers keep theirs (AWS and nginx 60 s, Google 600 s): otherwise one may be closed just as a balancer sends
a request on it, which its client sees as an error. When connections run short, idle ones are closed, and so are those
whose request does not come: opening connections needs no key.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import math
import resource
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from typing import Any

import structlog
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from serving.gateway.config import ENV_PREFIX, GatewaySettings
from speculator.errors import ConfigError
from speculator.host import stop_signals

FAREWELL_S = 1.0
"""How long to wait for a client that does not read the last error event of its stream."""
_BACKLOG = 2048
_MAX_HEADER_BYTES = 16 * 1024
"""Limit on a request's headers; more is answered with 400."""
_HEADERS_S = 10.0
"""How long a connection may take for the headers of a request while connections are short."""
_OTHER_FILES = 100
"""File descriptors beside connections: files, Redis, pipes, the event loop."""
log = structlog.get_logger(__name__)


def bind(host: str, port: int) -> socket.socket:
    """Listen on a port (0: any free one) before anything slow starts; raises ConfigError naming the fix.

    Clients that connect before a GatewayServer accepts are kept waiting, not refused.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"port {port} does not exist: pass --port between 0 and 65535")
    try:
        listener = socket.create_server(
            (host, port),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=_BACKLOG,
            # All addresses of the machine, IPv4 included.
            dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
        )
    except OSError as failure:
        match failure.errno:
            case errno.EADDRINUSE:
                fix = f"port {port} is in use: pass --port or stop the other process"
            case errno.EACCES:
                fix = f"port {port} needs privileges: pass --port 1024 or higher"
            case _:
                fix = f"cannot listen on host {host!r}: pass --host with an address of this machine"
        raise ConfigError(fix) from failure
    # Connections inherit TCP_NODELAY. asyncio sets it only on sockets with an explicit protocol number, which this one
    # lacks; without it, an answer in two writes waits 40 ms for the client's acknowledgement of the first.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _swallow_cancellation(app: ASGIApp) -> ASGIApp:
    """Swallow the cancellation of a request: uvicorn cancels only at the end of the grace period, and would log a
    traceback.
    """

    async def ended(scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(asyncio.CancelledError):
            await app(scope, receive, send)

    return ended


class _Http1(H11Protocol):
    """HTTP/1.1 alone: a request that offers HTTP/2, as all of Java's HttpClient do, is answered as if it did not."""

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: uvicorn would write two lines for each such request, and advise another library."""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # Not cancelled by uvicorn where the client resets the connection: it would keep this object until it fires.
        self._unset_keepalive_if_required()


class _Uvicorn(uvicorn.Server):
    """A uvicorn server that handles no signals and sets `accepting` once it accepts connections."""

    def __init__(self, config: uvicorn.Config, *, many: int) -> None:
        """Above `many` connections, idle ones are closed, and those that send no request for long."""
        super().__init__(config)
        self.accepting = asyncio.Event()
        self._many = many
        self._awaited_s: dict[H11Protocol, float] = {}
        """Since when the headers of a connection's request have been awaited, while connections are short."""

    async def on_tick(self, counter: int) -> bool:
        now_s, awaited_s = asyncio.get_running_loop().time(), self._awaited_s
        self._awaited_s = {}
        if len(self.server_state.connections) > self._many:
            for connection in tuple(self.server_state.connections):
                assert isinstance(connection, H11Protocol)
                is_idle = connection.timeout_keep_alive_task is not None
                # The server starts no timer for a connection before its first request, and stops it at the first byte.
                if not is_idle and (connection.cycle is None or connection.cycle.response_complete):
                    since_s = self._awaited_s[connection] = awaited_s.get(connection, now_s)
                    is_idle = now_s - since_s > _HEADERS_S
                if is_idle:
                    connection.timeout_keep_alive_handler()
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.accepting.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class GatewayServer:
    """Serves `app` on `listener` from `start` to `stop`; owns the listener and closes it.

    Requests above `max_connections` connections get uvicorn's own 503. An idle connection is closed after `idle_s`.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        *,
        grace_s: int = 10,
        max_connections: int = 600,
        idle_s: float = 620,
    ) -> None:
        self._listener = listener
        self._host, self._port = listener.getsockname()[:2]
        self._task: asyncio.Task[None] | None = None
        self._server = _Uvicorn(
            uvicorn.Config(
                _swallow_cancellation(app),
                log_config=None,
                access_log=False,
                lifespan="on",
                ws="none",
                # Fixed, not whichever is installed: this parser bounds the headers.
                http=_Http1,
                h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
                limit_concurrency=max_connections,
                proxy_headers=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=grace_s,
                timeout_keep_alive=idle_s,  # type: ignore[arg-type]
            ),
            many=max_connections * 3 // 4,
        )

    @property
    def url(self) -> str:
        host = self._host
        if ip_address(host).is_unspecified:
            # A client cannot connect to the wildcard address.
            host = "::1" if ":" in host else "127.0.0.1"
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    async def start(self) -> None:
        """Return once requests are accepted; raises the error that kept the server from starting."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        accepting = asyncio.create_task(self._server.accepting.wait())
        await asyncio.wait((self._task, accepting), return_when=asyncio.FIRST_COMPLETED)
        accepting.cancel()
        if self._task.done():
            self._task.result()

    async def wait(self) -> None:
        """Return when the server has stopped; raises the error that stopped it."""
        assert self._task is not None, "start() first"
        await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Stop accepting, let answers finish within the grace period, end the rest with an error, close."""
        self._server.should_exit = True
        await self.wait()
        # Answers that the server has just cancelled still have their last event to send.
        if unfinished := set(self._server.server_state.tasks):
            await asyncio.wait(unfinished, timeout=FAREWELL_S)


def raise_open_file_limit(settings: GatewaySettings, *, each: int) -> None:
    """Raise this process's limit on open files to what its settings need; a running request takes `each` connections.

    Raises ConfigError where the system's hard limit is too low for `max_in_flight`.
    """
    least = each * settings.max_in_flight + _OTHER_FILES
    given = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in given)
    if hard < least:
        raise ConfigError(
            f"{ENV_PREFIX}MAX_IN_FLIGHT={settings.max_in_flight} takes {least} file descriptors and this process may "
            f"open {hard:.0f}: lower it, or raise the limit (`ulimit -Hn`, LimitNOFILE=)"
        )
    # A sample of a rollout takes a connection to its server, beside those of requests.
    samples = settings.rollout_max_samples if each > 1 else 0
    wanted = min(least + settings.max_connections - settings.max_in_flight + samples, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(wanted), given[1]))


async def serve_until_signal(
    server: GatewayServer,
    *,
    model: str,
    draft_version: int,
    background: Coroutine[Any, Any, None] | None = None,
    on_serving: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until one of `stop_signals` or the end of `background`, then drain; raises what `background` raised.

    Further ones but SIGINT have no effect, also afterwards: the exits of what the caller opened are still to run.

    `on_serving` is called with the address once requests are accepted; it must not block.
    """
    ends: list[asyncio.Task[Any]] = [] if background is None else [asyncio.create_task(background)]
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    # Before `on_serving`: a signal right after it would otherwise kill the process without a shutdown.
    for number in stop_signals():
        if number == signal.SIGINT:
            # With it, every signal wakes the loop.
            loop.add_signal_handler(number, stopping.set)
        else:
            # The loop would restore the default, which kills the process, when it closes.
            signal.signal(number, lambda *_: stopping.set())
    await server.start()
    # Freeze the objects made so far: a full garbage collection that walks them would delay every answer.
    gc.collect()
    gc.freeze()
    log.info("serving", url=server.url, model=model, draft_version=draft_version)
    on_serving(server.url)
    ends += asyncio.create_task(stopping.wait()), asyncio.create_task(server.wait())
    done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    log.info("stopping")
    await server.stop()
    # Otherwise extension modules report leaks at the end of the process.
    gc.unfreeze()
    for task in ends:
        task.cancel()
    for task in done:
        task.result()
