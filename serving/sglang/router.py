"""What a router before several SGLang servers must let through, tried with one request."""

from __future__ import annotations

from uuid import uuid4

import httpx

from serving.marks import Marks
from speculator.errors import ConfigError, EngineDeadError

_TIMEOUT_S = 60.0
"""A busy engine answers late."""


def check_router(url: str, model: str) -> None:
    """Ask for one token through the router at `url`; an answer that is not under the id of our header has lost it.

    Without it no opt-out and no tenant would reach an engine. Raises ConfigError, or EngineDeadError where no engine
    answers.
    """
    rid = f"slipstream-{uuid4().hex}"
    marks = Marks(rid=rid, cache_salt="default", policy={"capture": False})
    body = {"model": model, "messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
    try:
        with httpx.Client(base_url=url, timeout=_TIMEOUT_S, trust_env=False) as router:
            answer = router.post("/v1/chat/completions", json=body, headers=marks.to_header())
        answered = answer.raise_for_status().json()["id"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise EngineDeadError(f"no engine answers through {url}: {type(error).__name__}") from error
    if answered != rid:
        raise ConfigError(
            f"{url} loses what the gateway says about a request, its opt-out and its tenant: put sglang-router there, "
            "and behind it servers that were started with `slipstream sglang`"
        )
