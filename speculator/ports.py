"""Loopback ports for servers that begin to listen later: an engine loads its model for a minute first."""

from __future__ import annotations

import itertools
import os
import socket

_LOWEST, _HIGHEST = 10_000, 21_999
"""Below what Linux hands out by itself (`ip_local_port_range`, from 32,768 on) to connections and to servers that
name no port, any of which could take a port that nobody listens at yet; and below 22,000 to 29,999, where SGLang
looks for its own."""
_BETWEEN_PROCESSES = 61
_next = itertools.count(os.getpid() * _BETWEEN_PROCESSES)
"""Processes that start one after another walk through the ports far from each other."""


def free_port() -> int:
    """A port that nobody listens at, and that this process has not been given before it has seen all others.

    Raises OSError when all are taken.
    """
    num_ports = _HIGHEST - _LOWEST + 1
    for step in itertools.islice(_next, num_ports):
        port = _LOWEST + step % num_ports
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise OSError(f"no port of {_LOWEST} to {_HIGHEST} is free")
