"""What a router before several SGLang servers must let through, tried with one request."""

from __future__ import annotations

from uuid import uuid4

import httpx
import structlog

from serving.request_metadata import OTHER_TARGET, POLICY_KEY, TARGET_KEY, Marks
from speculator.errors import ConfigError, EngineDeadError

log = structlog.get_logger(__name__)

_TIMEOUT = httpx.Timeout(60.0, connect=5.0)
"""A busy engine answers late."""


def check_routers(urls: tuple[str, ...], model: str, target: str) -> None:
    """Check that routers in front of the same engines pass on what the gateway says of a request.

    The engines behind them must serve the target with the fingerprint `target`. A router that is away is logged where
    another answers. Raises ConfigError, or EngineDeadError where no engine answers through any.
    """
    away: list[EngineDeadError] = []
    for url in urls:
        try:
            _check_router(url, model, target)
        except EngineDeadError as error:
            away.append(error)
    if len(away) == len(urls):
        raise away[0]
    for each in away:
        log.warning("router not checked, another answers", reason=str(each))


def _check_router(url: str, model: str, target: str) -> None:
    """Ask for one token as the gateway does; an answer under another id has lost the header and the fields of the body.

    Without them no opt-out and no tenant would reach an engine.
    """
    rid = f"slipstream-{uuid4().hex}"
    marks = Marks(rid=rid, cache_salt="default", policy={"capture": False, TARGET_KEY: target})
    ours = {"rid": rid, "cache_salt": marks.cache_salt, "custom_params": {POLICY_KEY: marks.policy}}
    body = {"model": model, "messages": [{"role": "user", "content": "?"}], "max_tokens": 1, **ours}
    try:
        with httpx.Client(base_url=url, timeout=_TIMEOUT, trust_env=False) as router:
            answer = router.post("/v1/chat/completions", json=body, headers=marks.to_header())
        is_another = OTHER_TARGET in answer.text
        answered = None if is_another else answer.raise_for_status().json()["id"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise EngineDeadError(f"no engine answers through {url}: {type(error).__name__}") from error
    if is_another:
        raise ConfigError(
            f"{url} serves another target than the drafts of --store are for: give the gateway engines that were "
            "started with the same --model"
        )
    if answered != rid:
        raise ConfigError(
            f"{url} loses what the gateway says about a request, its opt-out and its tenant: put sglang-router there, "
            "and behind it servers that were started with `slipstream sglang`"
        )
