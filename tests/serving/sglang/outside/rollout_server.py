"""A stand-in for what rollouts ask of SGLang: `/generate`, its loads, and a router that knows several."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

DONE = b"data: [DONE]\n\n"


def token_after(tokens: list[int], seed: int, vocabulary: int) -> int:
    """What follows a text depends on the text alone, as with deterministic inference."""
    return zlib.crc32(f"{seed}/{tokens}".encode()) % vocabulary


@dataclass
class RolloutServer:
    """Its attributes say what it does; afterwards they say what it was asked."""

    vocabulary: int
    seed: int = 0
    end_after: int | None = None
    """Tokens behind the whole text's first 8 at which it ends by itself."""
    most: int = 8
    num_ranks: int = 1
    """That have reported their load."""
    others: int = 0
    """Requests that are none of ours."""
    max_tokens: int = 100_000
    by_priority: Literal["low first", "high first"] | None = None
    pause_s: float = 0.0
    """Between two events."""
    is_incremental: bool = False
    """Says in each event only what is new, as SGLang with `--incremental-streaming-output`."""
    num_full: int = 0
    """So many requests find its queue full (`--max-queued-requests`)."""
    is_down: bool = False
    """Breaks every connection, and answers nothing."""
    breaks_on: tuple[int, ...] | None = None
    """Breaks the connections of requests for this prompt, before their first token."""
    is_silent: bool = False
    """Does not answer how much load it has, and breaks no connection."""
    num_polls: int = 0
    refusal: Response | None = None
    events: list[bytes] | None = None
    """Said instead of an answer."""

    label: str = "default"
    """Of its weights."""
    refuses_weights: str = ""
    """Why."""
    is_paused: bool = False

    calls: list[str] = field(default_factory=list)
    """What was asked of it about weights."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    running: dict[str, asyncio.Event] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    most_running: int = 0

    def app(self) -> FastAPI:
        app = FastAPI()
        app.add_api_route("/generate", self._generate, methods=["POST"], response_model=None)
        app.add_api_route("/abort_request", self._abort, methods=["POST"], response_model=None)
        app.add_api_route("/v1/loads", self._loads, response_model=None)
        app.add_api_route("/server_info", self._info)
        app.add_api_route("/model_info", lambda: {"model_path": "m", "weight_version": self.label})
        for path in ("/pause_generation", "/continue_generation", "/update_weights_from_disk"):
            app.add_api_route(path, self._weights, methods=["POST"], response_model=None)
        return app

    async def _weights(self, request: Request) -> Response:
        """As SGLang: what runs waits, and goes on under the new weights."""
        asked, body = request.url.path, await request.json()
        self.calls.append(asked)
        if self.is_down:
            return Response(status_code=503)
        if asked != "/update_weights_from_disk":
            assert body == ({"mode": "retract"} if asked == "/pause_generation" else {})
            self.is_paused = asked == "/pause_generation"
            return JSONResponse({"status": "ok"})
        assert self.is_paused, "else SGLang waits until nothing runs"
        if self.refuses_weights:
            return JSONResponse({"success": False, "message": self.refuses_weights}, 400)
        self.label = body["weight_version"]
        self.seed = int(self.label)
        return JSONResponse({"success": True, "message": "Succeeded to update model weights."})

    def _info(self) -> dict[str, bool]:
        by_priority, low_first = self.by_priority is not None, self.by_priority == "low first"
        return {
            "enable_priority_scheduling": by_priority,
            "schedule_low_priority_values_first": low_first,
            "incremental_streaming_output": self.is_incremental,
        }

    async def _loads(self) -> Response:
        self.num_polls += 1
        while self.is_silent:  # noqa: ASYNC110 - a test's
            await asyncio.sleep(0.001)
        if self.is_down:
            return Response(status_code=503)
        counts = {"num_running_reqs": self.others + len(self.running), "num_waiting_reqs": 0}
        rank = {**counts, "max_running_requests": self.most, "max_total_num_tokens": self.max_tokens}
        return JSONResponse({"timestamp": "now", "loads": [rank] * self.num_ranks})

    async def _abort(self, request: Request) -> Response:
        rid = (await request.json())["rid"]
        self.aborted.append(rid)
        # As SGLang: nothing where the id is unknown, else all requests whose ids begin with it.
        for running, stopped in self.running.items() if rid in self.running else ():
            if running.startswith(rid):
                stopped.set()
        return Response()

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self.refusal is not None:
            return self.refusal
        return StreamingResponse(self._answer(body), media_type="text/event-stream")

    async def _answer(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        if self.events is not None:
            for event in self.events:
                yield event
            return
        if self.num_full:
            self.num_full -= 1
            finish = {"type": "abort", "status_code": 503, "message": "The request queue is full."}
            yield b"data: " + json.dumps({"output_ids": [], "meta_info": {"finish_reason": finish}}).encode() + b"\n\n"
            yield DONE
            return
        tokens, params, said = list(body["input_ids"]), body["sampling_params"], list[int]()
        labels: list[str] = []
        num_sent = 0
        stopped = self.running[body["rid"]] = asyncio.Event()
        self.most_running = max(self.most_running, len(self.running))
        try:
            while True:
                finish = None
                while self.is_paused:  # noqa: ASYNC110 - a test's
                    await asyncio.sleep(0.001)
                for _ in range(params["stream_interval"]):
                    labels.append(self.label)
                    tokens.append(token_after(tokens, self.seed, self.vocabulary))
                    said.append(tokens[-1])
                    if self.end_after is not None and len(tokens) >= self.end_after:
                        finish = {"type": "stop", "matched": tokens[-1]}
                        break
                    if len(said) == params["max_new_tokens"]:
                        finish = {"type": "length", "length": len(said)}
                        break
                if self.is_down or tuple(body["input_ids"]) == self.breaks_on:
                    raise ConnectionError("killed")
                new = said[num_sent:] if self.is_incremental else said
                num_sent = len(said)
                if stopped.is_set():
                    finish = {"type": "abort", "message": "Abort in waiting queue"}
                meta = {
                    "id": body["rid"],
                    "finish_reason": finish,
                    "output_token_logprobs": [[-0.5, token, None] for token in new] if body["return_logprob"] else [],
                    "weight_version": self.label,
                    "weight_versions": _spans(labels),
                }
                yield b"data: " + json.dumps({"text": "", "output_ids": new, "meta_info": meta}).encode() + b"\n\n"
                if finish is not None:
                    yield DONE
                    return
                await asyncio.sleep(self.pause_s)
        finally:
            self.running.pop(body["rid"], None)


def _spans(labels: list[str]) -> list[dict[str, Any]]:
    ends = [at for at in range(1, len(labels) + 1) if at == len(labels) or labels[at] != labels[at - 1]]
    return [
        {"version": labels[end - 1], "start": start, "end": end}
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]


def router(workers: list[str]) -> FastAPI:
    """As sglang-router lists its workers; the list may change."""
    app = FastAPI()
    app.add_api_route("/workers", lambda: {"workers": [{"id": str(n), "url": url} for n, url in enumerate(workers)]})
    return app
