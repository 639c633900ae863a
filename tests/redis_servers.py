"""Real Redis processes on loopback ports, for what one embedded server is not: replicas and Sentinels."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from speculator.redis.embedded import redis_server
from tests.waiting import wait_until


@dataclass
class Server:
    port: int
    process: subprocess.Popen[bytes]

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, retry=Retry(NoBackoff(), 0), socket_timeout=2, decode_responses=True)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Servers:
    """Starts servers, and ends those that it started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[Server] = []

    def start(self, port: int, *options: str, config: str | None = None) -> Server:
        """With `config` a Sentinel."""
        folder = self._folder / str(port)
        folder.mkdir()
        words = [redis_server()]
        if config is not None:
            file = folder / "sentinel.conf"
            file.write_text(config)
            words += [str(file), "--sentinel"]
        words += ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), *options]
        if config is None:
            words += ["--save", ""]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        self._started.append(server := Server(port, process))
        with server.client() as client:
            wait_until(lambda: _answers(client))
        return server

    def stop(self) -> None:
        for server in self._started:
            server.kill()


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[Servers]:
    started = Servers(folder)
    try:
        yield started
    finally:
        started.stop()


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except (redis.RedisError, OSError):
        return False
