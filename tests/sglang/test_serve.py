"""`slipstream serve --engine sglang` with real SGLang behind the gateway, used as its users would."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from speculator.checkpoint import model_key, target_fingerprint
from speculator.codec import decode_trace
from speculator.stream import TraceStream, connect
from tests.sglang.server import cpu_environment

NAME = "SmolLM2-135M-Instruct"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def served(
    model_dir: Path, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, subprocess.Popen[bytes], Path]]:
    """(URL of the gateway, the command's process, its log)."""
    folder, port = tmp_path_factory.mktemp("serve"), _free_port()
    command = [
        *(sys.executable, "-m", "slipstream", "serve", "--engine", "sglang", "--device", "cpu", "--capture"),
        *("--model", str(model_dir), "--redis-url", redis_url, "--store", str(folder / "drafts")),
        *("--port", str(port), "--depth", "2", "--", "--skip-server-warmup"),
    ]
    log = folder / "serve.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **cpu_environment()}, stdout=output, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 240
        while not _answers(url):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        yield url, process, log
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def client(served: tuple[str, subprocess.Popen[bytes], Path]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{served[0]}/v1", api_key="none", max_retries=0, http_client=httpx.Client(trust_env=False)
    ) as client:
        yield client


def _messages(text: str) -> list[openai.types.chat.ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    question = _messages("What is the capital of France?")
    whole = client.chat.completions.create(model=NAME, messages=question, temperature=0, max_tokens=16)
    assert "Paris" in (whole.choices[0].message.content or "")
    stream = client.chat.completions.create(model=NAME, messages=question, temperature=0, max_tokens=16, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole.choices[0].message.content


def test_what_sglang_knows_passes_through(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt="One, two, three,", temperature=0, max_tokens=4, logprobs=2)
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.tokens or []) == 4


def test_errors_have_one_shape(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not serve the model"):
        client.chat.completions.create(model="other", messages=_messages("Hi"))
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=NAME, messages=_messages("Hi"), temperature=-3)
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=NAME, messages=_messages("word " * 20_000), max_tokens=10)


def test_policy_reaches_the_trace(client: openai.OpenAI, model_dir: Path, redis_url: str) -> None:
    stream = TraceStream(connect(redis_url), model_key(model_dir, target_fingerprint(model_dir)), max_bytes=1 << 30)
    for body in ({"capture": False}, {"domain": "geography", "group_id": "g7"}):
        client.chat.completions.create(
            model=NAME, messages=_messages("Name a river."), max_tokens=8, extra_body={"slipstream": body}
        )
    deadline = time.monotonic() + 20
    domains: list[str] = []
    while "geography" not in domains and time.monotonic() < deadline:
        entries = stream.read(50, 500)
        domains += [decode_trace(entry.payload).header.domain for entry in entries]
        stream.ack([entry.id for entry in entries])
    assert domains.count("geography") == 1


def test_metrics_show_what_the_plugin_reports(served: tuple[str, subprocess.Popen[bytes], Path]) -> None:
    deadline = time.monotonic() + 20
    text = ""
    while "slipstream_engine_report_fresh 1.0" not in text and time.monotonic() < deadline:
        time.sleep(0.2)
        text = httpx.get(f"{served[0]}/metrics", trust_env=False).text
    assert "slipstream_engine_report_fresh 1.0" in text
    assert "slipstream_draft_version 1.0" in text


def test_it_stops_in_order(served: tuple[str, subprocess.Popen[bytes], Path]) -> None:
    url, process, log = served
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, log.read_text()[-3000:]
    assert not _answers(url)
