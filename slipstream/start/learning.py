"""Trainer and Redis of `slipstream serve --learn`, with their files in one folder.

    DATA/redis           without --redis-url: Redis's file and socket, with recorded prompts and answers
    DATA/drafts          without --store: the draft versions
    DATA/trainer-state   the trainer's checkpoint, and the traces that it learns from
    DATA/train.log       the trainer's log; train.log.1 is the part before

Start: folder → Redis → server → trainer, once the server accepts requests.
Stop:  server → trainer → Redis. If this process is killed, the kernel signals the other two to end.
Either of the two that ends by itself is started again.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from subprocess import SubprocessError
from types import TracebackType
from typing import Self

import structlog

from slipstream.children import Child
from slipstream.terminal import console, print_status
from speculator.errors import ConfigError
from speculator.host import now_ms
from speculator.redis.embedded import EmbeddedRedis

log = structlog.get_logger(__name__)
_POLL_S = 0.2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_GOOD_RUN_S = 60.0
"""A process that ran for so long did not fail at its start, so the pause before its restart is short again."""
_MAX_LOG_BYTES = 8 << 20


def default_data_dir(model_name: str) -> Path:
    """Default of --data-dir, by model. Raises ConfigError where there is no home directory, or the name leads out of
    the folder for all models.
    """
    if ".." in Path(model_name).parts:
        raise ConfigError(f"no folder can be named after --name {model_name}: choose another, or pass --data-dir")
    try:
        home = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    except RuntimeError:
        raise ConfigError("there is no home directory: pass --data-dir") from None
    # A name may be a path, as vLLM's default is.
    return home / "slipstream" / model_name.lstrip("/")


class DataDir:
    """Paths in the folder of `serve --learn`."""

    def __init__(self, root: Path) -> None:
        self.root, self.redis, self.store = root, root / "redis", root / "drafts"
        self.state, self.log = root / "trainer-state", root / "train.log"


@dataclass(frozen=True, kw_only=True)
class ProcessStatus:
    """State of a process that is started again. The last three fields are None until it has ended once."""

    running: bool = False
    num_ended: int = 0
    exit_code: int | None = None
    """Last exit code: negative for a signal, None also where no process could be started."""
    ended_ms: int | None = None
    again_ms: int | None = None
    """Time of the restart, in the future or past."""


class Supervisor:
    """Keeps a process running: starts it again whenever it ends, after a pause that doubles while it ends soon, up to a
    minute.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], Child | EmbeddedRedis],
        log_path: Path,
        *,
        running: EmbeddedRedis | None = None,
        first_pause_s: float = _FIRST_PAUSE_S,
        max_log_bytes: int = _MAX_LOG_BYTES,
    ) -> None:
        """`start` is called on a thread that lives until `stop`; for the first process not where one is `running`. A
        log above `max_log_bytes` moves to `….log.1`, replacing the one there.
        """
        self._name, self._start, self._log_path, self._running = name, start, log_path, running
        self._first_pause_s, self._max_log_bytes = first_pause_s, max_log_bytes
        self._log_start = 0
        """Bytes of the log that are of earlier processes."""
        self.status = ProcessStatus()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"{name}-keeper")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the process and wait for it; does nothing before `start`."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _keep(self) -> None:
        next_pause_s = self._first_pause_s
        while not self._stopping.is_set():
            began_s = time.monotonic()
            try:
                code, said = self._run(), self._last_line()
            except (OSError, SubprocessError, ConfigError) as error:
                # For example no memory for another process.
                code, said = None, str(error)
            if self._stopping.is_set():
                return
            pause_s = self._first_pause_s if time.monotonic() - began_s > _GOOD_RUN_S else next_pause_s
            next_pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            num_ended, ended_ms = self.status.num_ended + 1, now_ms()
            again_ms = ended_ms + round(1000 * pause_s)
            self.status = ProcessStatus(num_ended=num_ended, exit_code=code, ended_ms=ended_ms, again_ms=again_ms)
            log.error(
                "process ended",
                process=self._name,
                exit_code=code,
                said=said,
                again_in_s=pause_s,
                log=str(self._log_path),
            )
            self._stopping.wait(pause_s)

    def _run(self) -> int | None:
        """Run one process until it ends, or end it once `stop` is called; returns its exit code."""
        self._log_start = self._log_path.stat().st_size if self._log_path.exists() else 0
        process, self._running = self._running or self._start(), None
        self.status = replace(self.status, running=True)
        while process.returncode is None and not self._stopping.wait(_POLL_S):
            self._truncate_log()
        if self._stopping.is_set():
            process.stop()
        return process.returncode

    def _truncate_log(self) -> None:
        """Copy and truncate a log that is too long. The process opened it for appending, so it writes on at the start.
        Lines written between copy and truncation are lost.
        """
        with suppress(OSError):
            if self._log_path.stat().st_size > self._max_log_bytes:
                before = self._log_path.with_suffix(".log.1")
                try:
                    shutil.copy(self._log_path, before)
                except OSError:
                    # On a full disk the space is worth more than the part that was copied.
                    before.unlink(missing_ok=True)
                finally:
                    os.truncate(self._log_path, 0)
                    self._log_start = 0

    def _last_line(self) -> str:
        """The last line that this process has logged; empty where it has logged none."""
        lines = self._log_path.read_bytes()[self._log_start :].decode(errors="replace").splitlines()
        return lines[-1][:500] if lines else ""


class Learning:
    """Redis and trainer of `serve --learn`: a context manager around the server. Call `start` once that accepts
    requests.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        model: str,
        redis_url: str | None,
        store: Path | None,
        trace_ttl_hours: float | None = None,
    ) -> None:
        """`model` is passed to the trainer's --model. Without `redis_url` a Redis is started. With `trace_ttl_hours`
        None the trainer uses its own setting.
        """
        self._data, self._model, self._trace_ttl_hours = DataDir(data_dir.absolute()), model, trace_ttl_hours
        self.redis_url, self.store = redis_url or "", store or self._data.store
        self._redis: Supervisor | None = None
        self._trainer = Supervisor("trainer", self._start_trainer, self._data.log)

    def __enter__(self) -> Self:
        """Raises ConfigError where the folder cannot be used, or Redis does not start."""
        try:
            # Private: the folder has prompts and answers.
            self._data.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._data.log.touch(mode=0o600)
            for folder in (self._data.redis, self._data.state):
                # One of an earlier version may be readable by all. Drives of Windows have no modes to change.
                with suppress(FileNotFoundError, PermissionError):
                    folder.chmod(0o700)
        except OSError as error:
            raise ConfigError(
                f"cannot write to {self._data.root} ({error.strerror}): pass another --data-dir"
            ) from None
        if not self.redis_url:
            # The first on this thread, so that its errors end the start.
            start = partial(EmbeddedRedis, self._data.redis, ends_with_us=True)
            first = start()
            self.redis_url = first.url
            self._redis = Supervisor("redis", start, self._data.redis / "redis.log", running=first)
            self._redis.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._trainer.stop()
        finally:
            # Also after a second Ctrl-C: otherwise Redis's thread would keep it, and this process, for ever.
            if self._redis is not None:
                self._redis.stop()

    def trainer_status(self) -> dict[str, bool | int | None]:
        """The fields of `ProcessStatus`, for the live page."""
        return asdict(self._trainer.status)

    def start(self, url: str) -> None:
        """Print the server's addresses and start the trainer; call once the server accepts requests."""
        if console.is_terminal:
            print_status(f"page      {url}/")
            print_status(f"endpoint  {url}/v1")
            print_status(f"data      {self._data.root}: drafts, and the prompts and answers that are recorded")
            print_status("Ctrl-C ends server, trainer and Redis.")
        else:
            log.info("learning", page=f"{url}/", endpoint=f"{url}/v1", data=str(self._data.root), capture=True)
        self._trainer.start()

    def _start_trainer(self) -> Child:
        places = ["--redis-url", self.redis_url, "--store", str(self.store)]
        words = ["train", "--model", self._model, *places, "--state", str(self._data.state)]
        words += ["--trace-ttl-hours", str(self._trace_ttl_hours)] if self._trace_ttl_hours is not None else []
        return Child("train", words, log_path=self._data.log, ends_with_us=True)
