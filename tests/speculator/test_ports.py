"""Ports for servers that listen later."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from speculator.host import free_port

_SAY_TEN = "from speculator.host import free_port; print(*(free_port() for _ in range(10)))"


def test_no_connection_is_given_such_a_port() -> None:
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not any(lowest <= free_port() <= highest for _ in range(100))


def test_a_port_is_told_once_and_never_while_somebody_listens() -> None:
    following = free_port() + 1
    with socket.create_server(("127.0.0.1", following)):
        told = [free_port() for _ in range(100)]
    assert len(set(told)) == 100
    assert following not in told


def test_processes_that_start_together_are_told_different_ports() -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", _SAY_TEN], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    told = [int(port) for process in processes for port in process.communicate(timeout=60)[0].split()]
    assert len(set(told)) == 30


def test_a_server_can_listen_at_it() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server, socket.create_connection(server.getsockname()):
        pass
