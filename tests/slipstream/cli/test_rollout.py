"""`slipstream rollout`: a file goes out, samples come back, over connections that break."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import dedent
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from typer.testing import CliRunner

from serving.engine import Chunk, GenerateRequest
from serving.gateway.app import create_app
from serving.gateway.config import GatewaySettings
from serving.gateway.rollouts import registry, routes
from slipstream.cli.main import app
from speculator.errors import EngineDeadError, EngineError
from tests.fixtures.doubles import DoubleEngine, says
from tests.fixtures.waiting import wait_until
from tests.hostile.api import running

Refused = Callable[..., str]


@contextmanager
def served(engine: DoubleEngine, **settings: Any) -> Iterator[str]:
    gateway = create_app(engine, settings=GatewaySettings(**settings), registry=CollectorRegistry())
    with running(gateway) as site:
        yield site.url


@contextmanager
def cutting(url: str, after: bytes, times: int) -> Iterator[str]:
    """A way to the server that breaks off as soon as it has passed on `after`, the first few `times`."""
    host, port = url.removeprefix("http://").split(":")
    listener = socket.create_server(("127.0.0.1", 0))

    def pass_requests(client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while part := client.recv(1 << 16):
                server.sendall(part)
            server.shutdown(socket.SHUT_WR)

    def pass_on() -> None:
        cuts = 0
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with suppress(OSError), client, socket.create_connection((host, int(port))) as server:
                threading.Thread(target=pass_requests, args=(client, server), daemon=True).start()
                seen = b""
                while part := server.recv(1 << 16):
                    client.sendall(part)
                    seen += part
                    if cuts < times and after in seen:
                        cuts += 1
                        break
                client.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=pass_on, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    file = tmp_path / "groups.jsonl"
    rows = [{"id": "a", "prompt": "hello", "n": 3, "max_tokens": 9}, {"prompt": [104, 105]}]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return file


def rollout(*words: object) -> tuple[int, list[dict[str, Any]]]:
    result = CliRunner().invoke(app, ["rollout", *map(str, words)], catch_exceptions=False)
    return result.exit_code, [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def names(samples: list[dict[str, Any]]) -> list[str]:
    return sorted(f"{sample['group_id']}{sample['sample']}" for sample in samples)


def test_samples_are_printed_or_written_as_they_end(groups: Path, tmp_path: Path) -> None:
    engine, out = DoubleEngine(answer=says("abcdefghijkl")), tmp_path / "out.jsonl"
    with served(engine) as url:
        code, samples = rollout(groups, "--url", url, "--n", 2, "--max-tokens", 4, "--no-logprobs")
        assert (code, names(samples)) == (0, ["10", "11", "a0", "a1", "a2"])
        assert {sample["group_id"]: sample["text"] for sample in samples} == {"a": "abcdefghi", "1": "abcd"}
        assert rollout(groups, "--url", url, "--out", out) == (0, [])
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert names(written) == ["10", "a0", "a1", "a2"]


def test_a_sample_is_in_the_file_before_the_next_one_ends(tmp_path: Path) -> None:
    """Whoever trains on them, or a crash, does not wait for the last."""
    file, out, released = tmp_path / "groups.jsonl", tmp_path / "out.jsonl", threading.Event()
    file.write_text('{"prompt": "a", "max_tokens": 4}\n{"prompt": "b", "max_tokens": 4}\n')

    class OneWaits(DoubleEngine):
        async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
            if request.prompt_token_ids == (ord("b"),):
                await asyncio.to_thread(released.wait)
            async for chunk in super().generate(request):
                yield chunk

    with served(OneWaits()) as url:
        running = threading.Thread(target=rollout, args=(file, "--url", url, "--out", out))
        running.start()
        try:
            wait_until(lambda: out.exists() and out.read_text().endswith("\n"), timeout_s=20)
            assert names([json.loads(line) for line in out.read_text().splitlines()]) == ["00"]
        finally:
            released.set()
            running.join()
    assert len(out.read_text().splitlines()) == 2


def test_an_environment_is_a_class_whose_objects_need_nothing(
    groups: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = """
        from slipstream.rollout import Step


        class Calculator:
            async def reset(self, sample): ...
            async def step(self, text):
                return Step(reward=1.0, done=True) if "4" in text else Step(observation="Try again.")
    """
    (tmp_path / "calculating.py").write_text(dedent(module))
    monkeypatch.syspath_prepend(tmp_path)
    with served(DoubleEngine(answer=says("2 + 2 = 4"))) as url:
        code, samples = rollout(groups, "--url", url, "--environment", "calculating:Calculator")
    assert (code, names(samples)) == (0, ["10", "a0", "a1", "a2"])
    assert {sample["reward"] for sample in samples} == {1.0}


def test_no_text_ends_a_line_but_the_line_feed(tmp_path: Path) -> None:
    """Of the file, of the stream, and of what is written."""
    text = "a\u2028b\u0085c\x0b\x1cd\u2029é"
    file, out = tmp_path / "groups.jsonl", tmp_path / "out.jsonl"
    lines = [json.dumps({"prompt": text + text, "max_tokens": 40}, ensure_ascii=False) for _ in range(2)]
    file.write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    engine = DoubleEngine(answer=says(text))
    with served(engine) as url:
        code, samples = rollout(file, "--url", url)
        assert (code, [sample["text"] for sample in samples]) == (0, [text, text])
        out.write_text("of an earlier run\n")
        assert rollout(file, "--url", url, "--out", out) == (0, [])
        response = httpx.post(f"{url}/v1/rollouts", json={"model": "double", "groups": [json.loads(lines[0])]})
    assert [json.loads(line)["text"] for line in out.read_text("utf-8").splitlines()] == [text, text]
    assert [json.loads(line).get("text") for line in response.iter_lines()] == [None, text, None]
    assert all(bytes(request.prompt_token_ids).decode() == text + text for request in engine.requests)


@pytest.mark.parametrize("content", [b"<html>\n", b'{"a"\n}', b"[" * 100_000 + b"\n"])
def test_a_server_of_another_kind_is_one_line(refused: Refused, groups: Path, content: bytes) -> None:
    async def answer(_: Request) -> Response:
        return Response(content)

    other = FastAPI()
    other.add_route("/v1/{rest:path}", answer, methods=["GET", "POST"])
    with running(other) as site:
        for model in ((), ("--model", "m")):
            assert "check --url" in refused("rollout", groups, "--url", site.url, *model)


def test_a_refusal_may_name_a_group_that_was_not_sent(refused: Refused, groups: Path) -> None:
    number = "9" * 5000

    async def answer(_: Request) -> Response:
        return JSONResponse({"error": {"message": "no", "param": f"groups[{number}].n", "code": "x"}}, 400)

    other = FastAPI()
    other.add_route("/v1/rollouts", answer, methods=["POST"])
    with running(other) as site:
        assert f"groups[{number}].n" in refused("rollout", groups, "--url", site.url, "--model", "m")


def test_a_connection_that_breaks_is_made_again_and_nothing_comes_twice(groups: Path) -> None:
    engine = DoubleEngine()
    with served(engine) as url, cutting(url, b'"number":1', times=1) as broken:
        code, samples = rollout(groups, "--url", broken)
        assert (code, names(samples)) == (0, ["10", "a0", "a1", "a2"])
    assert len(engine.requests) == 4


def test_an_answer_that_never_came_does_not_begin_a_second_rollout(groups: Path) -> None:
    engine = DoubleEngine()
    with served(engine) as url, cutting(url, b"rollout", times=1) as broken:
        assert rollout(groups, "--url", broken)[0] == 0
    assert len(engine.requests) == 4


def test_a_stream_that_ends_too_early_is_followed(groups: Path) -> None:
    engine = DoubleEngine(hold_at=1)
    with served(engine, max_request_s=0.2) as url:
        threading.Timer(0.5, engine.release.set).start()
        assert names(rollout(groups, "--url", url)[1]) == ["10", "a0", "a1", "a2"]


def test_aborted_samples_are_written_and_make_it_fail(tmp_path: Path) -> None:
    file = tmp_path / "late.jsonl"
    file.write_text('{"prompt": "a", "deadline_s": 0.01}\n')
    with served(DoubleEngine(hold_at=0)) as url:
        code, samples = rollout(file, "--url", url)
    assert (code, samples[0]["finish_reason"]) == (1, "deadline")


def test_a_server_that_has_gone_for_good(groups: Path) -> None:
    with (
        served(DoubleEngine(hold_at=1)) as url,
        cutting(url, b"rollout", times=10**6) as broken,
        pytest.raises(EngineError, match="is gone after 0 samples"),
    ):
        rollout(groups, "--url", broken, "--retry-s", 0.5)


def test_a_server_whose_engine_has_gone_for_good(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ENGINE_GRACE_S", 0.2)
    monkeypatch.setattr(routes, "SILENCE_S", 0.05)
    engine = DoubleEngine(failure=EngineDeadError("gone"), alive=False)
    with served(engine) as url, pytest.raises(EngineError, match="after 0 samples: No engine runs"):
        rollout(groups, "--url", url, "--retry-s", 0.5)


def test_what_cannot_be_sent_is_one_line(refused: Refused, groups: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    for content, words in (
        ("", "has no groups"),
        ("{}\n{", "line 2 is not JSON"),
        ("[1]", "line 1 does not fit"),
        ("\xff", "line 1 is not UTF-8"),
    ):
        bad.write_bytes(content.encode("latin-1"))
        assert words in refused("rollout", bad)
    assert "cannot be read" in refused("rollout", tmp_path / "none")
    assert "--retry-s" in refused("rollout", groups, "--retry-s", "inf")
    assert "nothing answers" in refused("rollout", groups, "--url", "http://127.0.0.1:1")
    assert "write http://HOST:PORT" in refused("rollout", groups, "--url", "127.0.0.1:8000")
    with served(DoubleEngine()) as url:
        for row, words in (('{"prompt": "a", "n": 0}', "groups[1].n"), ('{"prompt": "a", "m": 0}', "groups[1].m")):
            bad.write_text(f'\n{{"prompt": "a"}}\n\n{row}')
            told = refused("rollout", bad, "--url", url)
            assert f"{bad}, line 4: " in told
            assert words in told
        assert "does not serve" in refused("rollout", groups, "--url", url, "--model", "other")
        assert "does not exist" in refused("rollout", groups, "--url", url, "--out", tmp_path / "no" / "out")
        (link := tmp_path / "link").symlink_to(tmp_path / "no" / "out")
        assert "check --out" in refused("rollout", groups, "--url", url, "--out", link)
        before = groups.read_bytes()
        assert "is read, too" in refused("rollout", groups, "--url", url, "--out", tmp_path / "." / groups.name)
        assert "does not serve" in refused("rollout", groups, "--url", url, "--model", "other", "--out", bad)
        assert (groups.read_bytes(), bad.read_text()) == (before, f'\n{{"prompt": "a"}}\n\n{row}')


def test_ctrl_c_cancels_what_still_runs(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Holding(DoubleEngine):
        async def misbehave(self, index: int) -> None:
            if len(self.requests) == 2:
                await self.release.wait()

    def interrupted(_: object) -> bytes:
        wait_until(lambda: len(engine.requests) == 2)
        raise KeyboardInterrupt

    monkeypatch.setattr("slipstream.cli.rollout.json_line", interrupted)
    engine = Holding(num_slots=1)
    with served(engine) as url:
        assert CliRunner().invoke(app, ["rollout", str(groups), "--url", url]).exit_code != 0
        wait_until(lambda: len(engine.aborted) == 1, timeout_s=20)
