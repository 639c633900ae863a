"""A stand-in for SGLang's HTTP server: the same paths and the same bytes, no model.

In a test it is an app on a loopback port; as `python -m sglang.launch_server` (see `install`) it is a process that does
what the environment tells it to.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from serving.request_metadata import HEADER, RequestMetadata

MODEL = "fake/model-8B"
CONTEXT_LENGTH = 4096
TEXT = ["Grüße", " from", ' "日本"', "\n\ndata: [DONE]\n\n", "!"]
WHOLE = json.dumps(
    {
        "id": "abc",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "".join(TEXT), "reasoning_content": None},
                "logprobs": None,
                "finish_reason": "stop",
                "matched_stop": 2,
            }
        ],
        "usage": {"prompt_tokens": 3, "total_tokens": 8, "completion_tokens": 5},
        "metadata": {"weight_version": "default"},
    },
    ensure_ascii=False,
).encode()
DONE = b"data: [DONE]\n\n"
GENERATES = tuple(f"/v1/{name}" for name in ("chat/completions", "completions", "responses", "messages"))
NEVER_STREAMS = (
    *(f"/v1/{name}" for name in ("messages/count_tokens", "embeddings", "tokenize", "detokenize")),
    *("/tokenize", "/detokenize"),
)


def chunk(text: str, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason, "matched_stop": None}
    data = {"id": "abc", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}
    return b"data: " + json.dumps(data).encode() + b"\n\n"


EVENTS = [*(chunk(text) for text in TEXT), chunk("", "stop"), DONE]


def flat_error(
    status: int, message: str, *, param: str | None = None, headers: dict[str, str] | None = None
) -> Response:
    """As SGLang's `create_error_response`."""
    body = {"object": "error", "message": message, "type": "BadRequestError", "param": param, "code": status}
    return JSONResponse(body, status_code=status, headers=headers)


def _too_many(num_prompt_tokens: int, asked: int) -> str:
    """As SGLang's tokenizer manager says it."""
    return (
        f"Requested token count exceeds the model's maximum context length of {CONTEXT_LENGTH} tokens. You requested a "
        f"total of {num_prompt_tokens + asked} tokens: {num_prompt_tokens} tokens from the input messages and {asked} "
        "tokens for the completion. Please reduce the number of tokens in the input messages or the completion to fit "
        "within the limit."
    )


def error_event(status: int, message: str) -> bytes:
    """As SGLang's `create_streaming_error_response`."""
    body = {"object": "error", "message": message, "type": "SERVICE_UNAVAILABLE", "param": None, "code": status}
    return b"data: " + json.dumps({"error": body}).encode() + b"\n\n"


@dataclass
class FakeSglang:
    """Its attributes say what it answers; afterwards they say what it was asked."""

    model: str = MODEL
    refusal: Response | None = None
    num_prompt_tokens: int = 0
    """What it takes every prompt to have, where it refuses to go beyond its context."""
    events: list[bytes] = field(default_factory=lambda: list(EVENTS))
    whole: bytes = WHOLE
    cut: bool = False
    """Ends the connection after the last event, without the end of the body."""
    hold: bool = False
    """Sends the first event, or nothing of a whole answer, and then waits for the client to leave."""
    begins: asyncio.Event | None = None
    """A stream waits for it."""
    status: int = 200
    heeds_marks: bool = False
    """Answers under the id of the gateway's header, as the plugin has it."""
    loads: dict[str, Any] = field(
        default_factory=lambda: {"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1}, {"num_running_reqs": 1}]}
    )

    workers: list[str] = field(default_factory=list)
    """As a router lists them."""
    raw: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    holding: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(each) for each in self.raw]

    def app(self) -> FastAPI:
        app = FastAPI()
        for path in ("/health", "/readiness"):
            app.add_api_route(path, self._health, response_model=None)
        app.add_api_route("/v1/models", self._models)
        app.add_api_route("/v1/loads", lambda: self.loads)
        app.add_api_route("/workers", lambda: {"workers": [{"url": url} for url in self.workers]})
        for path in (*GENERATES, *NEVER_STREAMS):
            app.add_api_route(path, self._generate, methods=["POST"], response_model=None)
        app.add_api_route("/{path:path}", self._other, methods=["GET", "POST"], response_model=None)
        return app

    def _health(self) -> Response:
        return Response(status_code=self.status)

    def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": self.model, "object": "model", "max_model_len": CONTEXT_LENGTH}]}

    def _other(self, path: str) -> Response:
        self.paths.append(path)
        return Response("SGLang's own")

    async def _generate(self, request: Request) -> Response:
        self.paths.append(request.url.path)
        self.raw.append(await request.body())
        self.headers.append(dict(request.headers))
        if self.refusal is not None:
            return self.refusal
        asked = self.bodies[-1].get("max_tokens") or self.bodies[-1].get("max_output_tokens") or 0
        if self.num_prompt_tokens + asked > CONTEXT_LENGTH:
            return flat_error(400, _too_many(self.num_prompt_tokens, asked))
        if self.bodies[-1].get("stream") and request.url.path in GENERATES:
            return StreamingResponse(self._stream(), media_type="text/event-stream")
        if self.hold:
            self.holding.set()
            while (await request.receive())["type"] != "http.disconnect":
                pass
            self.left.set()
        if self.heeds_marks:
            marks = RequestMetadata.of_header(self.headers[-1][HEADER])
            return JSONResponse({**json.loads(WHOLE), "id": marks.rid})
        return Response(self.whole, media_type="application/json")

    async def _stream(self) -> AsyncIterator[bytes]:
        try:
            if self.begins is not None:
                await self.begins.wait()
            for event in self.events:
                yield event
                # Each event is a write of its own, as SGLang's are.
                await asyncio.sleep(0.001)
                if self.hold:
                    self.holding.set()
                    await asyncio.sleep(60)
            if self.cut:
                raise ConnectionError("the scheduler died")
        except asyncio.CancelledError:
            self.left.set()
            raise


def install(folder: Path) -> dict[str, str]:
    """Put a package `sglang` and the plugin's entry point into `folder`; returns the environment that finds them."""
    package = folder / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(f"from {__name__} import main\n\nmain()\n")
    info = folder / "fake_plugin-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-plugin\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nslipstream = serving.sglang.plugin:register\n")
    return {
        "PYTHONPATH": f"{folder}:{Path(__file__).resolve().parents[4]}",
        "FAKE_SGLANG_RECORD": str(folder / "started"),
    }


def main() -> None:
    """`FAKE_SGLANG` chooses: serve, refuse, crash, hang (never healthy), stubborn (ignores SIGTERM)."""
    does = os.environ.get("FAKE_SGLANG", "serve")
    worker = subprocess.Popen(["sleep", "600"])
    record = {"arguments": sys.argv[1:], "environment": dict(os.environ), "pid": os.getpid(), "worker": worker.pid}
    record["file"] = json.loads(Path(_argument("--speculative-adaptive-config")).read_text())
    # Whole from the first moment: who sees it may end this process at once.
    written = Path(os.environ["FAKE_SGLANG_RECORD"])
    written.with_suffix(".part").write_text(json.dumps(record))
    written.with_suffix(".part").rename(written)
    os.write(1, b"a line that says nothing\n")
    if does == "refuse":
        os.write(2, b"slipstream: the draft was made for another target\n")
        os._exit(2)
    if does == "crash":
        raise RuntimeError("no accelerator")
    if does == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if does == "hang":
        time.sleep(600)
    _serve(does)


def _argument(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def _serve(does: str) -> None:
    fake = FakeSglang(model=_argument("--served-model-name"))
    port = int(_argument("--port"))
    server = uvicorn.Server(uvicorn.Config(fake.app(), host="127.0.0.1", port=port, log_config=None))
    if does == "stubborn":
        server.capture_signals = _no_signals  # type: ignore[method-assign]
    server.run()


class _no_signals:  # noqa: N801
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class _HasApp(Protocol):
    def app(self) -> FastAPI: ...


def in_background(fake: _HasApp) -> tuple[str, Callable[[], None]]:
    """Serve from a thread, for tests of code that blocks; returns the address and what ends it."""
    server = uvicorn.Server(uvicorn.Config(fake.app(), host="127.0.0.1", port=0, log_config=None))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]

    def stop() -> None:
        server.should_exit = True
        thread.join()

    return f"http://127.0.0.1:{port}", stop
