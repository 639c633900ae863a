"""SGLang seen from the gateway: its health over HTTP, and its draft through what the plugin reports to Redis.

A thread of its own polls both about once a second, so that no caller waits for either. When Redis is away the last
report stands until it would have expired; when SGLang is slow to answer it counts as ready for a while.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import structlog

from serving.engine import EngineHealth, EngineInfo, TargetReport
from serving.sglang.outside.weights import update_weights
from serving.sglang.report import EngineReport
from serving.target import TargetLayout, check_weights
from speculator.errors import EngineDeadError, EngineError, StreamError, type_and_place
from speculator.redis.control_plane import ENGINE_TTL_S, DraftPointer

log = structlog.get_logger(__name__)

_ANSWER_LASTS_S = 15.0
"""A long prompt being tokenised can keep SGLang's HTTP server from answering for some seconds."""
_HTTP_TIMEOUT_S = 5.0
_TARGET_POLL_S = 0.1
_UPDATE_TIMEOUT_S = 600.0
"""Enough to read a large target's weights from a disk."""


class SglangClient:
    """Implements serving.engine.ServedEngine for an SGLang server whose scheduler runs the plugin."""

    def __init__(
        self,
        url: str,
        pointer: DraftPointer,
        *,
        engine_id: str,
        draft_version: int,
        is_process_alive: Callable[[], bool],
        poll_s: float = 1.0,
        target_timeout_s: float = 60.0,
    ) -> None:
        """`draft_version` is the one that SGLang was started with.

        Raises EngineDeadError where nothing answers.
        """
        self._pointer, self._engine_id = pointer, engine_id
        self._is_process_alive = is_process_alive
        self._poll_s, self._target_timeout_s = poll_s, target_timeout_s
        self._http = httpx.Client(base_url=url, timeout=_HTTP_TIMEOUT_S, trust_env=False)
        self._info = self._ask_info()
        self._draft_version = draft_version
        self._answered_s = time.monotonic()
        self._num_running = self._num_waiting = 0
        self._report: EngineReport | None = None
        self._reported_s = 0.0
        self._redis_is_away = False
        self.on_poll: Callable[[], object] = lambda: None
        """Called after every poll."""
        self.target_layout: Callable[[], TargetLayout] | None = None
        """Returns the layout that new weights of the target must have; None where that cannot be read here."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sglang-client", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._http.close()

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def draft_version(self) -> int:
        """The version last reported; it stays while there is no report."""
        return self._draft_version

    @property
    def report(self) -> EngineReport | None:
        """The plugin's last report; None where that is too old, because Redis or the plugin is away."""
        return self._report

    def health(self) -> EngineHealth:
        """Where SGLang only does not answer, the gateway lives: to end it too would not help."""
        alive = ready = self._is_process_alive()
        detail = "" if alive else "SGLang has ended"
        if alive and time.monotonic() - self._answered_s > _ANSWER_LASTS_S:
            ready, detail = False, "SGLang does not answer"
        return EngineHealth(
            alive=alive, ready=ready, num_running=self._num_running, num_waiting=self._num_waiting, detail=detail
        )

    @property
    def target_version(self) -> int:
        return (self._report.target_version if self._report is not None else None) or 0

    @property
    def least_target_version(self) -> int:
        """The version of which older weights may not answer; 0 where the weights' labels name no version."""
        return (self._report.target_label if self._report is not None else None) or 0

    def update_target(self, version: int, folder: Path | None) -> TargetReport:
        """Move all servers to a version of the target: load the weights in `folder`, or without one expect them there
        already.

        An engine without the new weights, such as one that starts again, refuses the gateway's requests until it has
        them. Raises TargetError for weights that do not fit.
        """
        previous, stall_ms = self.target_version, 0.0
        if folder is not None:
            if self.target_layout is not None:
                check_weights(folder, self.target_layout())
            stall_ms, failed = update_weights(self._servers(), version, folder, timeout_s=_UPDATE_TIMEOUT_S)
            if failed:
                reasons = "; ".join(f"{url}: {reason}" for url, reason in sorted(failed.items()))
                raise EngineError(f"target version {version} is not on {reasons}. Repeat the update to load it there")
        self._await_target(version)
        return TargetReport(version=version, previous=previous, stall_ms=stall_ms)

    def _servers(self) -> Sequence[str]:
        """The base addresses of the SGLang servers."""
        return (str(self._http.base_url).rstrip("/"),)

    def _now(self) -> Mapping[str, EngineReport]:
        """What each engine last reported."""
        return {} if self._report is None else {self._engine_id: self._report}

    def _await_target(self, version: int) -> None:
        deadline_s = time.monotonic() + self._target_timeout_s
        missing: list[str] = []
        while time.monotonic() < deadline_s and not self._stop.wait(_TARGET_POLL_S):
            self._read_report()
            reports = self._now()
            missing = [engine_id for engine_id, report in reports.items() if (report.target_version or 0) < version]
            if reports and not missing:
                return
        who = ", ".join(sorted(missing)) or "no engine reports: SGLang"
        raise EngineError(
            f"{who} did not take target version {version}, which SGLang knows by the weight_version of an update, "
            f"within {self._target_timeout_s:.0f} s"
        )

    def poll(self) -> None:
        """Poll SGLang and its report once."""
        self._poll_server()
        try:
            self._read_report()
        except StreamError as error:
            if not self._redis_is_away:
                log.warning("engine report not read", reason=str(error))
            self._redis_is_away = True
            if time.monotonic() - self._reported_s > ENGINE_TTL_S:
                self._report = None
        else:
            self._redis_is_away = False
        self.on_poll()

    def _run(self) -> None:
        while not self._stop.wait(self._poll_s):
            try:
                self.poll()
            except Exception as error:
                # Health goes by the age of the last answer; the next poll may succeed.
                log.error("sglang not polled", error=type_and_place(error))

    def _poll_server(self) -> None:
        try:
            if self._http.get("/health").status_code != 200:
                return
            self._answered_s = time.monotonic()
            loads = self._http.get("/v1/loads", params={"include": "core"}).json()["loads"]
            self._num_running = sum(load["num_running_reqs"] for load in loads)
            self._num_waiting = sum(load["num_waiting_reqs"] for load in loads)
        except (httpx.TransportError, ValueError, KeyError, TypeError):
            # The age of the last answer says enough; an SGLang that does not count its load serves all the same.
            return

    def _read_report(self) -> EngineReport | None:
        fields = self._pointer.engines().get(self._engine_id)
        self._note_report(None if fields is None else EngineReport.parse(fields))
        return self._report

    def _note_report(self, report: EngineReport | None) -> None:
        self._report = report
        if report is not None:
            self._reported_s = time.monotonic()
            self._note_version(report.version)
            self._info = replace(self._info, heeds_seed=bool(report.heeds_seed))

    def _note_version(self, version: int | None) -> None:
        if version is None or version == self._draft_version:
            return
        log.info("draft swapped", version=version, previous=self._draft_version)
        self._draft_version = version

    def _ask_info(self) -> EngineInfo:
        """What SGLang serves: it lists the served model first, then its adapters."""
        try:
            model = self._http.get("/v1/models").raise_for_status().json()["data"][0]
            return EngineInfo(model=model["id"], context_length=model["max_model_len"], heeds_seed=False)
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            self._http.close()
            raise EngineDeadError(f"SGLang's list of models cannot be read: {type(error).__name__}") from error
