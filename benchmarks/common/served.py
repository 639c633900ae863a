"""A server of its own for a benchmark that is a client, with the local engine or with SGLang."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from slipstream.children import running_child
from slipstream.demo.servers import wait_until_ready
from speculator.host import free_port
from speculator.redis.embedded import EmbeddedRedis

_START_S = 600.0


def add_serving_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--engine", choices=("local", "sglang"), default="local")
    options.add_argument("--slots", type=int, default=8)
    options.add_argument("serve", nargs="*", help="further arguments, of `slipstream serve` or of SGLang")


@contextlib.contextmanager
def serving(options: argparse.Namespace, **settings: str) -> Iterator[str]:
    """The URL of a server that does not learn, until the end; `settings` are variables of its environment."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    with tempfile.TemporaryDirectory() as name, EmbeddedRedis(Path(name) / "redis") as redis:
        is_local = options.engine == "local"
        words = ["--model", options.model, "--redis-url", redis.url, "--store", f"{name}/drafts", "--port", str(port)]
        words += ["--engine", options.engine, *(["--slots", str(options.slots)] if is_local else [])]
        words += options.serve if is_local else ["--", "--max-running-requests", str(options.slots), *options.serve]
        with running_child("serve", words, Path(name), **settings) as server:
            wait_until_ready(url, [server], timeout_s=_START_S)
            yield url
