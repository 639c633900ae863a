"""A process that has imported SGLang, and becomes a server's processes by forking (tests/fixtures/preloaded.py).

A server is three processes or more, each of which imports 7,600 modules: on two cores three quarters of its start. The
launcher is forked from this process; so are, through the launcher, its children, in place of those that SGLang would
spawn. Each begins as this process stands, before any plugin is loaded and with only one thread, and runs what it would
have run as a new process: `sglang.launch_server` as `__main__`, and what `multiprocessing` tells a spawned child.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import functools
import importlib
import multiprocessing.util  # noqa: TID251 - SGLang's processes are those that it makes
import os
import runpy
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from tests.fixtures.preloaded import Order, set_variables, take_orders

_READERS = tuple(
    f"sglang.srt.managers.{name}" for name in ("tokenizer_manager", "detokenizer_manager", "scheduler", "tp_worker")
)
"""Modules that read a tokenizer, by their own `get_tokenizer`."""
_MODULES = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.models.registry",
    "sglang.srt.speculative.spec_utils",
    *_READERS,
)
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
_READ_AGAIN = {
    "SGLANG_SIMULATE_ACC_LEN": ("sglang.srt.speculative.spec_utils", "SIMULATE_ACC_LEN"),
    "SGLANG_TEST_RETRACT": ("sglang.srt.managers.scheduler", "TEST_RETRACT"),
    "SGLANG_TEST_RETRACT_INTERVAL": ("sglang.srt.managers.scheduler", "TEST_RETRACT_INTERVAL"),
}
"""Variables that are read into a constant on import: (module, name)."""


def read_on_import(variables: Mapping[str, str]) -> dict[str, str]:
    """Those of a server's variables that have to be there before anything is imported."""
    late = (*_READ_LATE, *_READ_AGAIN)
    return {name: value for name, value in variables.items() if not name.startswith(late)}


def _read_again() -> None:
    environment = importlib.import_module("sglang.srt.environ").envs
    for variable, (module, name) in _READ_AGAIN.items():
        sys.modules[module].__dict__[name] = getattr(environment, variable).get()


def _prepare(order: Order) -> None:
    """Read the tokenizer of the target that the words name, as its server will."""
    model_dir = order.words[order.words.index("--model-path") + 1]
    with contextlib.suppress(Exception):  # the server says what is wrong with it
        _tokenizer_reader()(
            model_dir, tokenizer_mode="auto", trust_remote_code=False, revision=None, tokenizer_backend="huggingface"
        )


@functools.cache
def _tokenizer_reader() -> Callable[..., Any]:
    """SGLang's `get_tokenizer`, which from now on reads each tokenizer once."""
    modules = [importlib.import_module(name) for name in _READERS]
    reader = functools.cache(modules[0].get_tokenizer)
    for module in modules:
        module.__dict__["get_tokenizer"] = reader
    return reader


class _Child(msgspec.Struct):
    """What a spawned process would have got: words of its command line, variables, and files by their numbers."""

    words: list[str]
    variables: dict[str, str]
    fds: list[int]


def _launch(order: Order) -> None:
    """Run `python -m sglang.launch_server WORDS`, in a session of its own."""
    os.setsid()
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
    set_variables(child.variables)
    _read_again()
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
        take_orders(_MODULES, _launch, prepare=_prepare)
