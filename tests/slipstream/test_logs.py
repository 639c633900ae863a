"""Logs of a real service: JSON lines with the request id, and never a user's text."""

from __future__ import annotations

import ast
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import structlog

from slipstream.logs import HANDLER, configure_logs
from speculator.errors import ConfigError
from tests.fixtures.waiting import url_in, wait_until
from tests.slipstream.conftest import service

MARKER = "xyzzyprompt"


Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Lines:
    """The lines that were logged in this process, at debug level, since the last look."""
    monkeypatch.setenv("SLIPSTREAM_LOG_LEVEL", "debug")
    return lambda: [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_ours_and_libraries_lines_look_alike(lines: Lines) -> None:
    configure_logs()
    with structlog.contextvars.bound_contextvars(request_id="abc"):
        structlog.get_logger().info("ours", n=1)
        structlog.get_logger().debug("formatted %s", "text")
        logging.getLogger("uvicorn.error").warning("server")
    for library in ("openai", "uvicorn.error"):
        logging.getLogger(library).info("a body, or that it is about to start")
    logging.getLogger("httpx").warning("slow")
    found = lines()
    assert [line["event"] for line in found] == ["ours", "formatted text", "server", "slow"]
    assert [line.get("request_id") for line in found] == ["abc", "abc", "abc", None]
    assert [line["level"] for line in found] == ["info", "debug", "warning", "warning"]
    assert all(line["timestamp"] for line in found)


def test_exceptions_are_told_without_the_values_they_quote(lines: Lines) -> None:
    configure_logs()

    def fail() -> None:
        try:
            raise ValueError(f"cannot parse {MARKER}")
        except ValueError as error:
            raise OSError(28, "No space left on device") from error

    try:
        fail()
    except OSError as error:
        structlog.get_logger().exception("failed")
        logging.getLogger("asyncio").error("Task exception was never retrieved\nfuture: %s", MARKER, exc_info=error)
    first, second = lines()
    for line in (first, second):
        assert MARKER not in json.dumps(line)
        assert "ValueError\n" in line["exception"]
        assert line["exception"].endswith("OSError: [Errno 28] No space left on device")
        assert f'{Path(__file__).name}"' in line["exception"]
    assert second["event"] == "Task exception was never retrieved"


def test_what_failed_while_an_exception_was_handled_is_told_with_it(lines: Lines) -> None:
    configure_logs()
    for hides in (False, True):
        try:
            try:
                raise OSError(5, "Input/output error")
            except OSError:
                if hides:
                    raise RuntimeError("closed twice") from None
                raise RuntimeError("closed twice")  # noqa: B904 - as an accident does
        except RuntimeError:
            structlog.get_logger().exception("failed")
    told, hidden = (line["exception"] for line in lines())
    assert "OSError: [Errno 5] Input/output error\nwhich led to:\n" in told
    assert "OSError" not in hidden
    assert told.endswith("RuntimeError: closed twice")


@pytest.mark.parametrize("kind", ["ValueError", "BaseException"])
def test_what_nobody_catches_is_told_like_everything_else(kind: str) -> None:
    """In a thread and in the main one; not as Python would, which quotes the value. A panic in Rust is no Exception."""
    code = f"""
import threading
from slipstream.logs import configure_logs
configure_logs()
def fail():
    raise {kind}("{MARKER}")
thread = threading.Thread(target=fail, name="worker")
thread.start()
thread.join()
fail()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    in_thread, in_main = (json.loads(line) for line in done.stderr.splitlines())
    assert in_thread["thread"] == "worker"
    for line in (in_thread, in_main):
        assert (line["event"], line["level"]) == ("uncaught exception", "critical")
        assert line["exception"].endswith(kind)
    assert MARKER not in done.stderr


def test_configured_twice_is_configured_once() -> None:
    configure_logs()
    configure_logs()
    assert [handler.get_name() for handler in logging.getLogger().handlers].count(HANDLER) == 1


def test_formats_and_levels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SLIPSTREAM_LOG_FORMAT", "console")
    monkeypatch.setenv("SLIPSTREAM_LOG_LEVEL", "warning")
    configure_logs()
    structlog.get_logger().info("left out")
    structlog.get_logger().warning("for a person", n=1)
    [line] = capsys.readouterr().err.splitlines()
    assert "for a person" in line
    assert not line.startswith("{")
    monkeypatch.setenv("SLIPSTREAM_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="SLIPSTREAM_LOG_LEVEL"):
        configure_logs()


def test_no_text_of_a_request_reaches_anything_but_its_trace(
    toy_model: Path, redis_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    """Log at debug level, metrics, errors, events, manifests, Redis (whose traces have token ids): for requests that
    succeed, are refused, break off and find nothing, with capture on.
    """
    log = tmp_path / "serve.log"
    words = ("serve", "--model", toy_model, "--redis-url", redis_url, "--store", tmp_path / "drafts", "--port", 0)
    with service(log, *words, "--capture", SLIPSTREAM_LOG_LEVEL="debug"):
        url = url_in(log)
        responses, answers = _talk(url)
        wait_until(lambda: "slipstream_traces_appended_total 2.0" in httpx.get(f"{url}/metrics").text)
        metrics = httpx.get(f"{url}/metrics").text
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    requests = {line["request_id"]: line for line in lines if line["event"] == "request"}
    statuses = {response.headers["x-request-id"]: response.status_code for response in responses}
    assert {number: requests[number]["status"] for number in statuses} == statuses
    assert sorted(statuses.values()) == [200, 200, 400, 404]
    text = log.read_text()
    assert MARKER not in text
    refused = [response.text for response in responses if response.status_code == 400]
    values = [redis_client.dump(key) or b"" for key in redis_client.scan_iter()]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"manifest.json", "events.jsonl"} <= {path.name for path in files}
    elsewhere = [metrics, *refused, *(path.read_bytes() for path in files), *values]
    for marked in (MARKER, *(answer[:20] for answer in answers)):
        assert len(marked) > 10
        assert marked not in text
        for place in elsewhere:
            assert (marked.encode() if isinstance(place, bytes) else marked) not in place


def _talk(url: str) -> tuple[list[httpx.Response], list[str]]:
    body = {"model": "toy", "prompt": f"{MARKER} 0123", "max_tokens": 60, "temperature": 0}
    chat = {"model": "toy", "messages": [{"role": "user", "content": MARKER}], "max_tokens": 60, "temperature": 0}
    with httpx.Client(base_url=url, timeout=60) as client:
        whole = client.post("/v1/completions", json=body)
        streamed = client.post("/v1/chat/completions", json={**chat, "stream": True})
        refused = client.post("/v1/completions", json={**body, "n": "many"})
        unknown = client.post("/v1/completions", json={**body, "model": MARKER})
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as broken_off:
            next(broken_off.iter_bytes())
    return [whole, streamed, refused, unknown], [whole.json()["choices"][0]["text"]]


@pytest.mark.parametrize("where", ["full", "pipe"])
def test_a_log_that_cannot_be_written_fails_nobody(where: str) -> None:
    """On a full disk, or behind a pipe whose reader has ended: the lines are lost, and what logs goes on."""
    code = """
import logging
import os
import structlog
from slipstream.logs import configure_logs
configure_logs()
for _ in range(2):
    structlog.get_logger().info("ours", text=9000 * "x")
    logging.getLogger("uvicorn.error").warning("theirs")
print("served")
"""
    reading, writing = os.pipe()
    os.close(reading)
    with Path("/dev/full").open("wb") as full:
        stream = {"full": full.fileno(), "pipe": writing}[where]
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=stream, text=True, timeout=60
        )
    os.close(writing)
    assert done.stdout == "served\n"


def test_a_librarys_python_warning_is_logged_like_everything_else() -> None:
    code = "from slipstream.logs import configure_logs; configure_logs(); import warnings; warnings.warn('old')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    [line] = (json.loads(line) for line in done.stderr.splitlines())
    assert line["event"].endswith("UserWarning: old")
    assert line["level"] == "warning"


def test_no_library_draws_progress_where_there_is_no_terminal() -> None:
    code = "from slipstream.logs import configure_logs; configure_logs(); from tqdm.auto import tqdm; [*tqdm(range(3))]"
    environment = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stderr == ""


def test_every_event_is_constant_words_and_its_data_are_fields() -> None:
    """So that a line is found by its event, and its numbers are read without a pattern."""
    root = Path(__file__).parents[2]
    packages = ("serving", "speculator", "trainer", "slipstream")
    calls = [
        (f"{path.relative_to(root)}:{node.lineno}", node.args)
        for path in (path for package in packages for path in root.glob(f"{package}/**/*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "log"
    ]
    assert len(calls) > 100
    assert not [place for place, args in calls if not _are_constant_words(args)]


def _are_constant_words(args: list[ast.expr]) -> bool:
    match args:
        case [ast.IfExp(body=one, orelse=other)]:
            return _are_constant_words([one]) and _are_constant_words([other])
        case [ast.Constant(value=str(event))]:
            return "%" not in event and (" " in event or "_" not in event)
    return False
