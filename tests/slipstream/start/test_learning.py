"""`slipstream serve --learn`: one command that serves, learns, ends in order, and goes on where it was."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

import httpx
import psutil
import pytest
import redis

from slipstream.children import Child
from slipstream.demo.servers import Scrape
from slipstream.start.learning import Learning, ProcessStatus, Supervisor, default_data_dir
from speculator.draft.checkpoint import target_fingerprint
from speculator.errors import ConfigError
from speculator.redis.client import connect
from speculator.redis.embedded import EmbeddedRedis
from speculator.versions.lineage import ensure_lineage
from speculator.versions.store import DraftStore
from tests.fixtures.faults import filled, small_disk
from tests.fixtures.toy import make_toy_model
from tests.fixtures.waiting import url_in, wait_until
from tests.slipstream.conftest import SampleEnd, service
from tests.slipstream.test_bad_start import Refused
from trainer.process import lock_state
from trainer.replay.trace_source import TraceFiles


@pytest.fixture
def data() -> Iterator[Path]:
    """Of a short name: a socket's path is."""
    with tempfile.TemporaryDirectory(prefix="learn-") as name:
        yield Path(name) / "data"


def ask(url: str, number: int) -> None:
    body = {"model": "toy", "prompt": f"question {number}", "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()


def version(url: str) -> float:
    return Scrape.parse(0, httpx.get(f"{url}/metrics").text).total("slipstream_draft_version")


def events(log: Path, name: str) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in log.read_text().splitlines() if line.startswith("{"))
    return [line for line in lines if line["event"] == name]


def children(pid: int, word: str) -> list[psutil.Process]:
    return [child for child in psutil.Process(pid).children() if any(word in part for part in child.cmdline())]


def test_it_learns_survives_its_trainer_and_goes_on_where_it_was(toy_model: Path, tmp_path: Path, data: Path) -> None:
    words = ("serve", "--model", toy_model, "--learn", "--data-dir", data, "--port", 0, "--draft-vocab-size", 24)
    words = (*words, "--dtype", "float32", "--control-share", 0.2)
    first = tmp_path / "first.log"
    with service(first, *words) as serve:
        url, asked = url_in(first), iter(range(10_000))
        wait_until(lambda: events(first, "learning"))
        [said] = events(first, "learning")
        assert (said["page"], said["endpoint"], said["data"]) == (f"{url}/", f"{url}/v1", str(data))

        def reaches(least: float) -> bool:
            ask(url, next(asked))
            return version(url) >= least

        wait_until(lambda: reaches(2))
        [trainer] = children(serve.pid, "train")
        trainer.kill()
        wait_until(lambda: events(first, "process ended"))
        [ended] = events(first, "process ended")
        assert (ended["process"], ended["exit_code"]) == ("trainer", -signal.SIGKILL)
        shown = httpx.get(f"{url}/slipstream/live").json()["trainer"]
        assert (shown["num_ended"], shown["exit_code"]) == (1, -signal.SIGKILL)
        # It goes on where it was.
        killed_at = version(url)
        wait_until(lambda: reaches(killed_at + 1))
        assert httpx.get(f"{url}/slipstream/live").json()["trainer"] == {**shown, "running": True}
        # That version may be of before the kill, and a trainer that still starts has nothing to end in order.
        wait_until(lambda: len(events(data / "train.log", "training")) == 2)
        beside = psutil.Process(serve.pid).children(recursive=True)
        assert {"redis-server", "python"} <= {re.sub(r"[\d.]+$", "", child.name()) for child in beside}
    assert serve.returncode == 0
    assert not [child for child in beside if child.is_running()], "all of them have ended"
    assert (data / "train.log").read_text().count("trainer ended") == 1, "in order, but for the one that was killed"
    assert data.stat().st_mode & 0o777 == 0o700
    num_resumed = len(events(data / "train.log", "trainer resumed"))
    second = tmp_path / "second.log"
    with service(second, *words):
        url_in(second)
        wait_until(lambda: len(events(data / "train.log", "trainer resumed")) > num_resumed)
        assert len(DraftStore(data / "drafts").versions()) > 1


def test_what_was_started_beside_ends_with_a_server_that_is_killed(toy_model: Path, tmp_path: Path, data: Path) -> None:
    log = tmp_path / "serve.log"
    with service(log, "serve", "--model", toy_model, "--learn", "--data-dir", data, "--port", 0) as serve:
        url_in(log)
        wait_until(lambda: children(serve.pid, "train"))
        beside = psutil.Process(serve.pid).children()
        assert len(beside) == 2
        serve.kill()
        serve.wait()
        wait_until(lambda: not any(child.is_running() for child in beside))


def test_a_redis_and_a_store_that_are_named_are_taken(redis_url: str, tmp_path: Path, data: Path) -> None:
    with Learning(data, model="m", redis_url=redis_url, store=tmp_path / "drafts") as learning:
        assert (learning.redis_url, learning.store) == (redis_url, tmp_path / "drafts")
        assert not (data / "redis").exists()
    with Learning(data, model="m", redis_url=None, store=None) as learning, connect(learning.redis_url) as client:
        assert client.ping()
        assert learning.store == data / "drafts"
        with pytest.raises(ConfigError, match="another Redis runs"):
            Learning(data, model="m", redis_url=None, store=None).__enter__()


def test_what_is_recorded_is_private_in_a_folder_that_is_not(data: Path) -> None:
    data.mkdir(mode=0o755)
    (data / "trainer-state").mkdir(mode=0o755)
    with Learning(data, model="m", redis_url=None, store=None):
        lock_state(data / "new" / "state")
        TraceFiles(data / "alone" / "replay").put("a", b"words")
    made = ("redis", "trainer-state", "new/state", "alone/replay", "train.log")
    assert {name: (data / name).stat().st_mode & 0o077 for name in made} == dict.fromkeys(made, 0)
    assert data.stat().st_mode & 0o777 == 0o755, "its owner's choice"


def test_a_redis_that_ends_is_started_again_with_what_it_had(data: Path) -> None:
    """Otherwise nothing would be captured or learned until somebody restarts the server."""
    start = partial(EmbeddedRedis, data, ends_with_us=True)
    supervisor = Supervisor("redis", start, data / "redis.log", running=(first := start()), first_pause_s=0.01)
    supervisor.start()
    client = connect(first.url)
    try:
        for number in range(2):
            client.set("kept", number)
            os.kill(int((data / "redis.pid").read_text()), signal.SIGKILL)
            wait_until(lambda: answer(client) is None)
            wait_until(lambda: answer(client) is not None)
            assert answer(client) == str(number).encode()
    finally:
        supervisor.stop()
    with client:
        assert answer(client) is None, "stopped on purpose, it stays so"
    assert supervisor.status.num_ended == 2, "nor is that an end to report"


def answer(client: redis.Redis) -> Any:
    with contextlib.suppress(redis.ConnectionError):
        return client.get("kept")
    return None


def test_the_trainer_forgets_when_the_server_does(redis_url: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[list[str]] = []

    class Noted(Short):
        def __init__(self, name: str, arguments: list[str], **_: object) -> None:
            super().__init__(0)
            begun.append(arguments)

    monkeypatch.setattr("slipstream.start.learning.Child", Noted)
    for hours in (None, 0.0, 24.0):
        with Learning(data, model="m", redis_url=redis_url, store=None, trace_ttl_hours=hours) as learning:
            begun.clear()
            learning.start("http://127.0.0.1:1")
            wait_until(lambda: begun)
        [words] = begun[:1]
        assert words[words.index("--state") + 2 :] == ([] if hours is None else ["--trace-ttl-hours", str(hours)])


def test_a_second_ctrl_c_while_the_trainer_ends_leaves_nothing_running(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    learning = Learning(data, model="m", redis_url=None, store=None).__enter__()
    monkeypatch.setattr(learning._trainer, "stop", interrupted)
    client = connect(learning.redis_url)
    with pytest.raises(KeyboardInterrupt):
        learning.__exit__(None, None, None)
    with client, pytest.raises(redis.ConnectionError):
        client.ping()
    assert not [thread for thread in threading.enumerate() if thread.name == "redis-keeper"]


class Short(Child):
    """Ends at once."""

    def __init__(self, code: int) -> None:
        self.code = code

    @property
    def returncode(self) -> int:
        return self.code


def test_a_trainer_that_cannot_start_is_tried_less_and_less_often(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "train.log"
    log.write_text("error: of an earlier process\n")
    started: list[Short] = []

    def start() -> Short:
        started.append(Short(2))
        if len(started) == 2:
            raise OSError("no memory for another process")
        if len(started) == 3:
            raise SubprocessError("Exception occurred in preexec_fn.")
        if len(started) == 4:
            with log.open("a") as file:
                file.write('{"event": "training"}\nerror: the store is on fire\n')
        return started[-1]

    keeper = Supervisor("trainer", start, log, first_pause_s=0.01)
    assert keeper.status == ProcessStatus()
    keeper.start()
    wait_until(lambda: len(started) == 5)
    keeper.stop()
    status = keeper.status
    assert status.num_ended in (4, 5), "the last one may have been stopped"
    assert status.exit_code == 2
    assert status.ended_ms is not None
    assert status.again_ms == status.ended_ms + 10 * 2 ** (status.num_ended - 1)
    said = capsys.readouterr()
    pauses = [float(one) for one in re.findall(r"again_in_s\W+([\d.]+)", said.out + said.err)]
    assert pauses[:3] == [0.01, 0.02, 0.04]
    assert "the store is on fire" in said.out + said.err
    assert "no memory for another process" in said.out + said.err
    assert "Exception occurred in preexec_fn." in said.out + said.err
    assert "of an earlier process" not in said.out + said.err


def test_the_log_of_a_trainer_is_bounded(tmp_path: Path) -> None:
    log, said = tmp_path / "train.log", iter(range(10_000))
    log.touch()

    class Talking(Short):
        @property
        def returncode(self) -> int | None:
            with log.open("a") as file:
                file.write(f"line {next(said)}\n" * 20)
            return None

        def stop(self, timeout_s: float = 30.0) -> None:
            pass

    keeper = Supervisor("trainer", lambda: Talking(0), log, max_log_bytes=150)
    keeper.start()
    wait_until(lambda: (tmp_path / "train.log.1").exists() and "line 5" in (tmp_path / "train.log.1").read_text())
    keeper.stop()
    assert {path.name for path in tmp_path.iterdir()} == {"train.log", "train.log.1"}
    assert all(path.stat().st_size < 500 for path in tmp_path.iterdir())


def test_a_log_for_whose_copy_the_disk_has_no_room_is_truncated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "train.log"
    log.write_text("a line\n" * 100)

    def copy(_: Path, to: Path) -> None:
        to.write_text("a li")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("slipstream.start.learning.shutil.copy", copy)
    Supervisor("trainer", lambda: Short(0), log, max_log_bytes=150)._truncate_log()
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == {"train.log": 0}


def test_a_full_disk_ends_the_start(refused: Refused, toy_model: Path) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="learn-") as folder,
        small_disk(Path(folder) / "disk", 1 << 20) as is_small,
    ):
        if not is_small:
            pytest.skip("no tmpfs may be mounted here")
        disk = Path(folder) / "disk"
        with filled(disk):
            line = refused("serve", "--model", toy_model, "--learn", "--port", 0, "--data-dir", disk / "data")
        assert "No space left" in line
        assert not children(os.getpid(), str(disk))


def test_a_keeper_that_never_began_can_be_stopped(tmp_path: Path) -> None:
    Supervisor("trainer", lambda: Short(0), tmp_path / "train.log").stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "trainer-keeper"]


def test_where_data_lies_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_data_dir("toy") == tmp_path / "slipstream" / "toy"
    assert default_data_dir("/models/toy") == tmp_path / "slipstream" / "models" / "toy", "not in the model's folder"
    with pytest.raises(ConfigError, match=r"--name \.\./other"):
        default_data_dir("../other")
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert default_data_dir("toy") == Path("/home/somebody/.local/share/slipstream/toy")


def test_what_cannot_start_says_why_and_leaves_nothing_behind(
    refused: Refused, toy_model: Path, tmp_path: Path, data: Path
) -> None:
    learn = ("serve", "--model", toy_model, "--learn", "--port", 0)
    assert "--learn" in refused("serve", "--model", toy_model, "--data-dir", data)
    (tmp_path / "file").touch()
    assert "--data-dir" in refused(*learn, "--data-dir", tmp_path / "file" / "data")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "--port" in refused(*learn, "--data-dir", data, "--port", taken.getsockname()[1])
    assert not children(os.getpid(), str(data))


@pytest.mark.parametrize("changed", [{"seed": 1}, {"hidden_size": 64}], ids=str)
def test_the_folder_of_another_model_is_refused_in_one_line(
    invoke: Callable[..., SampleEnd], toy_model: Path, tmp_path: Path, data: Path, changed: dict[str, int]
) -> None:
    other = make_toy_model(tmp_path / "other", **changed)
    ensure_lineage(DraftStore(data / "drafts"), other, target_fingerprint(other))
    ended = invoke("serve", "--model", toy_model, "--learn", "--port", 0, "--data-dir", data)
    [line] = ended.err.splitlines()
    assert ended.code == 2
    assert f"in {data / 'drafts'} was trained for target" in line
    assert line.endswith("if you pass one, --data-dir")
    assert not children(os.getpid(), str(data))
