"""A process that has imported SGLang, and becomes a server's processes by forking: a start imports nothing.

A server is three processes or more, each of which imports 7,600 modules: on two cores three quarters of its start. The
launcher is forked from this process; so are, through the launcher, its children, in place of those that SGLang would
spawn. Each begins as this process stands, before any plugin is loaded and with only one thread, and runs what it would
have run as a new process: `sglang.launch_server` as `__main__`, and what `multiprocessing` tells a spawned child.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import importlib
import multiprocessing.util  # noqa: TID251 - SGLang's processes are those that it makes
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

_MODULES = ("sglang.launch_server", "sglang.srt.entrypoints.http_server", "sglang.srt.models.registry")
_NUM_CHILDREN = 8
"""Ready for a launcher: a scheduler and a process that writes traces a rank, a detokenizer. More are spawned."""
_ABOVE_ALL_FDS = 500
_READ_LATE = (
    "SLIPSTREAM_",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION",
    "SGLANG_CPU_OMP_THREADS_BIND",
    "SGLANG_NCCL_SO_PATH",
)
"""Names, or how they begin, of variables that nothing reads on import."""


class _Order(msgspec.Struct):
    """To become a server, or with `ended` to say how a server ended."""

    words: list[str] = []
    variables: dict[str, str] = {}
    log: str = ""
    ended: int = 0


def can_have(variables: Iterable[str]) -> bool:
    """Whether a server with these variables may begin with what is imported already."""
    return all(name.startswith(_READ_LATE) for name in variables)


class _Child(msgspec.Struct):
    """What a spawned process would have got: words of its command line, variables, and files by their numbers."""

    words: list[str]
    variables: dict[str, str]
    fds: list[int]


class ForkedServer:
    """The launcher of a server, with what `subprocess.Popen` has to say about a process."""

    def __init__(self, preloaded: Preloaded, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._preloaded = preloaded

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._preloaded.ask(_Order(ended=self.pid))
        return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code


class Preloaded:
    """The process, which starts with the first server and ends with its owner."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = dict(variables)
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, words: Sequence[str], variables: Mapping[str, str], log: Path) -> ForkedServer:
        """`python -m sglang.launch_server WORDS` in a session of its own."""
        pid = self.ask(_Order(words=list(words), variables=dict(variables), log=str(log)))
        assert pid is not None
        return ForkedServer(self, pid)

    def ask(self, order: _Order) -> int | None:
        with self._turn:
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __spec__.name],
                    env=self._variables,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            assert answer, f"python -m {__spec__.name} has ended; run it to see why"
            return msgspec.json.decode(answer, type=int | None)


def _serve() -> None:
    """Take orders until there is nobody who gives any; returns in a server's process, too, once that has ended."""
    answers = os.dup(1)
    os.dup2(2, 1)
    for name in _MODULES:
        importlib.import_module(name)
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=_Order)
        answer: int | None
        if order.ended:
            pid, status = os.waitpid(order.ended, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                os.close(answers)
                _launch(order)
                return
        os.write(answers, msgspec.json.encode(answer) + b"\n")


def _launch(order: _Order) -> None:
    os.setsid()
    nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(order.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for fd, number in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(fd, number)
    _take(order.variables)
    children = [_child() for _ in range(_NUM_CHILDREN)]
    spawn = multiprocessing.util.spawnv_passfds

    def become(path: Any, args: Sequence[Any], fds: Sequence[int]) -> int:
        if "--multiprocessing-fork" not in args or not children:
            return spawn(path, args, fds)
        pid, sock = children.pop()
        fds = sorted(map(int, fds))
        sent = msgspec.json.encode(_Child(words=list(args), variables=dict(os.environ), fds=fds))
        sock.sendmsg([sent], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
        sock.close()
        return pid

    multiprocessing.util.spawnv_passfds = become
    sys.argv = ["sglang.launch_server", *order.words]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def _take(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None


def _child() -> tuple[int, socket.socket]:
    """A process that waits to become a child, and the socket on which it is told."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if pid := os.fork():
        its.close()
        return pid, ours
    ours.close()
    message, received, *_ = socket.recv_fds(its, 1 << 20, 64)
    its.close()
    if not message:
        os._exit(0)
    child = msgspec.json.decode(message, type=_Child)
    _take(child.variables)
    # Aside, so that none takes the number of another that is still to come.
    aside = [fcntl.fcntl(fd, fcntl.F_DUPFD, _ABOVE_ALL_FDS) for fd in received]
    for fd in received:
        os.close(fd)
    for fd, number in zip(aside, child.fds, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    at = child.words.index("-c")
    sys.argv = ["-c", *child.words[at + 2 :]]
    exec(child.words[at + 1], {"__name__": "__main__"})  # noqa: S102 - multiprocessing's own line, which ends the process
    raise AssertionError("a spawned child ends by itself")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        _serve()
