"""Load new target weights into SGLang servers, by SGLang's update from disk, while running requests are paused.

    pause ──▶ update: load, flush the cache, label ──▶ continue
    running requests drop their keys and values        their text so far is read under the new weights, and goes on

All servers at once, each for itself: one that cannot open the files keeps its old weights and label. Where reading them
fails half-way, SGLang reads the same folder again: the server then ends, or has the new weights under its old label
until the update is repeated. Where SGLang refuses to flush its cache, as beside a request that goes on running, the new
weights also read the old ones' keys and values until then; SGLang 0.5.17 ends. Where this process is killed in between,
a server stays paused until then.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec

from speculator.target_folder import reason_of

_CONNECT_TIMEOUT_S = 5.0


class _UpdateAnswer(msgspec.Struct):
    success: bool
    message: str = ""


class Weights(msgspec.Struct):
    weight_version: str = ""


def update_weights(
    urls: Sequence[str], version: int, folder: Path, *, timeout_s: float
) -> tuple[float, dict[str, str]]:
    """Give the servers the weights in `folder`, which they must see under the same path.

    Returns the longest pause in milliseconds, and the reason of each server that does not have them.
    """
    with ThreadPoolExecutor(len(urls)) as threads:
        done = list(threads.map(lambda url: _update(url, version, folder, timeout_s), urls))
    return max(stall_ms for stall_ms, _ in done), {
        url: reason for url, (_, reason) in zip(urls, done, strict=True) if reason
    }


def _update(url: str, version: int, folder: Path, timeout_s: float) -> tuple[float, str]:
    began_s = time.monotonic()
    timeout = httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S)
    try:
        with httpx.Client(base_url=url, timeout=timeout, trust_env=False) as http:
            try:
                http.post("/pause_generation", json={"mode": "retract"}).raise_for_status()
                reason = _load(http, version, folder)
            finally:
                http.post("/continue_generation", json={}).raise_for_status()
    except (httpx.HTTPError, msgspec.MsgspecError) as error:
        reason = reason_of(error)
    return 1000 * (time.monotonic() - began_s), reason


def _load(http: httpx.Client, version: int, folder: Path) -> str:
    """Load the weights unless the server has them; returns the reason of a failure, else an empty string."""
    info = http.get("/model_info").raise_for_status()
    if msgspec.json.decode(info.content, type=Weights).weight_version == str(version):
        return ""
    body = {"model_path": str(folder), "weight_version": str(version)}
    answer = http.post("/update_weights_from_disk", json=body)
    # SGLang says no with status 400 and a message.
    said = msgspec.json.decode(answer.content, type=_UpdateAnswer)
    return "" if said.success else said.message or f"status {answer.status_code}"
