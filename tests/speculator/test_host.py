"""Ports for servers that listen later."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from speculator.errors import ConfigError
from speculator.host import free_port, load_function, read_secret

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
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(("127.0.0.1", port)) as client:
        accepted, peer = server.accept()
        with accepted:
            assert peer == client.getsockname()


@pytest.mark.parametrize("content", [b"secret", b"secret\n", b"secret\r\n", b"\xef\xbb\xbfsecret\n"])
def test_the_end_of_its_line_and_a_byte_order_mark_are_no_part_of_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    assert read_secret(path, "SLIPSTREAM_KEY_FILE") == "secret"


def test_another_encoding_is_refused_by_file_and_variable(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes("secret".encode("utf-16"))
    with pytest.raises(ConfigError, match=f"SLIPSTREAM_KEY_FILE names {path}"):
        read_secret(path, "SLIPSTREAM_KEY_FILE")


def test_a_secret_that_others_can_read_is_refused() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "key"
        path.write_text("secret")
        path.chmod(0o644)
        assert read_secret(path, "SLIPSTREAM_KEY_FILE") == "secret", "they cannot reach it"
        folder.chmod(0o755)
        (folder / "link").symlink_to(path)
        for each in (path, folder / "link"):
            with pytest.raises(ConfigError, match=f"which other users can read: chmod o-r {each}"):
                read_secret(each, "SLIPSTREAM_KEY_FILE")
        path.chmod(0o640)
        assert read_secret(path, "SLIPSTREAM_KEY_FILE") == "secret"


def test_a_function_is_found_by_its_name() -> None:
    assert load_function("pathlib:Path", "--environment") is Path
    for name in ("nowhere:keep", f"{__name__}:nobody", "Path", f"{__name__}:__name__"):
        with pytest.raises(ConfigError, match=r"^--environment"):
            load_function(name, "--environment")
