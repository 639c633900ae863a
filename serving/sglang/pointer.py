"""The draft version that an SGLang server should run, and the version of its target, on each of its ranks.

Rank 0 reads the desired draft from Redis; the process must start and keep running without Redis. The other ranks learn
it at meetings (serving/sglang/rank_agreement.py). SGLang itself updates the target's weights; the plugin hooks every
kind of update.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping

import structlog

from serving.request_metadata import version_of_label
from speculator.errors import ConfigError, StreamError
from speculator.redis.client import connect
from speculator.redis.control_plane import CanaryHolder, CanarySlot, DraftPointer


def refuse_second(redis_url: str, model_key: str, engine_id: str) -> None:
    """Raises ConfigError where another living server reports under this engine id; Redis may be away."""
    try:
        with connect(redis_url) as client:
            process = DraftPointer(client, model_key).engines().get(engine_id, {}).get("process", "")
    except StreamError:
        return
    if _is_alive(process):
        raise ConfigError(
            f"engine id {engine_id} is in use by {process}: stop that server, or set SLIPSTREAM_ENGINE_ID"
        )


class RankPointer:
    """The pointer of every rank but 0: they stage what rank 0 stages, and report nothing."""

    def __init__(self) -> None:
        self.wanted: int | None = None
        """The version that rank 0 has staged, set at each meeting; None for none."""

    def desired(self) -> int | None:
        return self.wanted

    def pinned(self) -> int | None:
        return None

    def replace(self, old: int, new: int) -> bool:
        return False

    def hold_canary(self, holder: CanaryHolder, *, ttl_s: float, on_probation: bool) -> CanarySlot:
        raise StreamError("only the first rank tries versions")

    def release_canary(self, holder: CanaryHolder, *, forget_crashes: bool = False) -> None:
        return

    def report_engine(self, engine_id: str, status: Mapping[str, str | int | float]) -> None:
        return


def _is_alive(process: str) -> bool:
    """Whether "host:pid" runs; a process of another host counts as alive until its report expires."""
    host, _, pid = process.rpartition(":")
    if host != socket.gethostname() or not pid.isdigit() or int(pid) == os.getpid():
        return bool(host) and host != socket.gethostname()
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


log = structlog.get_logger(__name__)


def label_refusal(label: str | None, newest: int) -> str:
    """Why the target's weights may not get this label where one has named version `newest` (0: none has); "" if they
    may.

    With a lower label the gateway would take them for weights that an update has yet to replace, and so would rollouts.
    """
    if label is None or (version_of_label(label) or 0) >= newest:
        return ""
    return (
        f"labels of the target's weights count up, and {label[:40]!r} is no whole number from {newest} on: send one, "
        "or restart the server"
    )


class RankTarget:
    """The version of one rank's target. SGLang updates all ranks between the same two steps."""

    def __init__(self, on_version: Callable[[int], object]) -> None:
        """`on_version` is called with each new version."""
        self._on_version = on_version
        self._process = f"{socket.gethostname()}:{os.getpid()}"
        self.version = 0
        self.label = 0
        """The newest version that a label has named."""
        self._updated_at = -1

    def updated(self, label: str | None, step: int) -> None:
        """Note new weights of the target before this step: of the version that their label names, else of the next.

        Updates without a step between them are parts of one version.
        """
        if version_of_label(label) is not None:
            self.labelled(label)
        elif step != self._updated_at:
            self._serve(self.version + 1)
        self._updated_at = step

    def labelled(self, label: str | None) -> None:
        """Note a label of the weights in service; a higher version than theirs becomes theirs."""
        if (version := version_of_label(label)) is not None:
            self.label = max(self.label, version)
            self._serve(version)

    def _serve(self, version: int) -> None:
        if version <= self.version:
            return
        self.version = version
        self._on_version(version)
        log.info("slipstream: target version in service", version=version)

    def status(self) -> dict[str, str | int | float]:
        """Fields of the engine's report."""
        return {"target_version": self.version, "target_label": self.label, "process": self._process}
