"""What `slipstream serve --learn` starts beside the server, in one folder.

    DATA/redis           where no --redis-url is given: Redis's file and socket, with recorded prompts and answers
    DATA/drafts          where no --store is given: the draft versions
    DATA/trainer-state   the trainer's checkpoint, and what it learns from
    DATA/train.log       what the trainer says; train.log.1 is the part before

Start: folder → Redis → server → trainer, once the server takes requests.
Stop:  server → trainer → Redis. Whatever ends this process, the other two are asked to end as well.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from slipstream.children import Child
from slipstream.terminal import console, say
from speculator.errors import ConfigError
from speculator.host import now_ms
from speculator.redis.embedded import EmbeddedRedis

log = structlog.get_logger(__name__)
_LOOK_S = 0.2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_GOOD_RUN_S = 60.0
"""A trainer that ran for so long has not failed at its start."""
_MAX_LOG_BYTES = 8 << 20


def default_data_dir(model_name: str) -> Path:
    """Of what a user keeps of a model. Raises ConfigError where there is no home."""
    try:
        return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "slipstream" / model_name
    except RuntimeError:
        raise ConfigError("there is no home directory: pass --data-dir") from None


class DataDir:
    """Where what lies in it."""

    def __init__(self, root: Path) -> None:
        self.root, self.redis, self.store = root, root / "redis", root / "drafts"
        self.state, self.log = root / "trainer-state", root / "train.log"


@dataclass(frozen=True, kw_only=True)
class TrainerStatus:
    """How the trainer has run so far. The last three fields are None until it has ended once."""

    running: bool = False
    num_ended: int = 0
    exit_code: int | None = None
    """Of the last end: negative for a signal, None also where no process could be started."""
    ended_ms: int | None = None
    again_ms: int | None = None
    """When it is started again, or was."""


class TrainerKeeper:
    """Keeps a trainer running: one that ends is started again, later each time it ends soon."""

    def __init__(
        self,
        start: Callable[[], Child],
        log_path: Path,
        *,
        first_pause_s: float = _FIRST_PAUSE_S,
        max_log_bytes: int = _MAX_LOG_BYTES,
    ) -> None:
        """`start` is called on a thread that lives until `stop`. A longer log than `max_log_bytes` moves to
        `….log.1`, in the place of the one before.
        """
        self._start, self._log_path, self._first_pause_s = start, log_path, first_pause_s
        self.status = TrainerStatus()
        self._max_log_bytes = max_log_bytes
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="trainer-keeper")

    def begin(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Once the child has ended in order; nothing before `begin`."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _keep(self) -> None:
        pause_s = self._first_pause_s
        while not self._stopping.is_set():
            began_s = time.monotonic()
            try:
                code, said = self._run(), self._last_line()
            except OSError as error:
                # There is no memory for another process, for instance.
                code, said = None, str(error)
            if self._stopping.is_set():
                return
            if time.monotonic() - began_s > _GOOD_RUN_S:
                pause_s = self._first_pause_s
            num_ended, ended_ms = self.status.num_ended + 1, now_ms()
            again_ms = ended_ms + round(1000 * pause_s)
            self.status = TrainerStatus(num_ended=num_ended, exit_code=code, ended_ms=ended_ms, again_ms=again_ms)
            log.error("trainer ended", exit_code=code, said=said, again_in_s=pause_s, log=str(self._log_path))
            self._stopping.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _run(self) -> int | None:
        """To its end, which comes in order once we are stopping."""
        child = self._start()
        self.status = replace(self.status, running=True)
        while child.returncode is None and not self._stopping.wait(_LOOK_S):
            self._bound_log()
        if self._stopping.is_set():
            child.stop()
        return child.returncode

    def _bound_log(self) -> None:
        """The child goes on at the beginning: it appends. What it says between the two steps is lost."""
        with suppress(OSError):
            if self._log_path.stat().st_size > self._max_log_bytes:
                shutil.copy(self._log_path, self._log_path.with_suffix(".log.1"))
                os.truncate(self._log_path, 0)

    def _last_line(self) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines()
        return lines[-1][:500] if lines else ""


class Learning:
    """A context manager around the server; `begin` is for when that takes requests."""

    def __init__(
        self, data_dir: Path, *, model: str, redis_url: str | None, store: Path | None, trace_ttl_hours: float = 0
    ) -> None:
        """`model` as the trainer is to be given it. Without `redis_url` a Redis is started. Of `trace_ttl_hours` 0 the
        trainer hears nothing.
        """
        self._data, self._model, self._trace_ttl_hours = DataDir(data_dir.absolute()), model, trace_ttl_hours
        self.redis_url, self.store = redis_url or "", store or self._data.store
        self._redis: EmbeddedRedis | None = None
        self._keeper = TrainerKeeper(self._trainer, self._data.log)

    def __enter__(self) -> Self:
        """Raises ConfigError where the folder cannot be used, or Redis does not start."""
        try:
            # Prompts and answers lie here.
            self._data.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._data.log.touch(mode=0o600)
        except OSError as error:
            raise ConfigError(f"cannot write to {self._data.root} ({error.strerror}): pass --data-dir") from None
        if not self.redis_url:
            self._redis = EmbeddedRedis(self._data.redis, ends_with_us=True)
            self.redis_url = self._redis.url
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._keeper.stop()
        if self._redis is not None:
            self._redis.stop()

    def trainer_status(self) -> dict[str, bool | int | None]:
        """The fields of TrainerStatus."""
        return asdict(self._keeper.status)

    def begin(self, url: str) -> None:
        """The server takes requests at `url`: say so, and start the trainer."""
        if console.is_terminal:
            say(f"page      {url}/")
            say(f"endpoint  {url}/v1")
            say(f"data      {self._data.root}: drafts, and the prompts and answers that are recorded")
            say("Ctrl-C ends server, trainer and Redis.")
        else:
            log.info("learning", page=f"{url}/", endpoint=f"{url}/v1", data=str(self._data.root), capture=True)
        self._keeper.begin()

    def _trainer(self) -> Child:
        places = ["--redis-url", self.redis_url, "--store", str(self.store)]
        words = ["train", "--model", self._model, *places, "--state", str(self._data.state)]
        words += ["--trace-ttl-hours", str(self._trace_ttl_hours)] if self._trace_ttl_hours else []
        return Child("train", words, log_path=self._data.log, num_threads=1, ends_with_us=True)
