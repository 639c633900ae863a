"""Helpers around the operating system: settings, secrets, clock, cores, cache folder, ports, durable files, locks.

Files of JSON lines end a line with LF or CR LF and nothing else. Unicode has further line separators, which JSON allows
in a string. `str.splitlines` and most text readers split there, so nothing here reads with them. Written lines have
those separators escaped.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import errno
import fcntl
import itertools
import os
import pkgutil
import re
import signal
import socket
import stat
import sys
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError

from speculator.errors import ConfigError


def now_ms() -> int:
    """Unix time."""
    return time.time_ns() // 1_000_000


_CGROUPS, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def _cgroups(controller: str) -> Iterator[Path]:
    """Folders of the control groups that limit this process: its own and those around it, of version 1 and 2."""
    with contextlib.suppress(OSError):
        for line in _OWN_CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                # A container may see the host's path here, and its own group at the top.
                top = _CGROUPS / controller if controllers else _CGROUPS
                own = top / path.lstrip("/")
                yield from (group for group in (own, *own.parents) if group.is_relative_to(top))


def num_cores() -> int:
    """Cores that this process may use: those of its affinity, or what CPU limits of its control groups leave."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _cgroups("cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with contextlib.suppress(OSError, ValueError):
                quota_us, period_us = (int(word) for name in names for word in (group / name).read_text().split())
                # Version 1 says -1 where there is no limit.
                cores = min(cores, max(quota_us // period_us, 1)) if quota_us > 0 else cores
    return cores


PREFIX = "SLIPSTREAM_"
CACHE_VARIABLE = f"{PREFIX}CACHE"


def memory_bytes() -> int:
    """Memory that this process may use, in bytes: the machine's, or the limit of its control groups."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in _cgroups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            # The file says "max" where there is no limit.
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((group / name).read_text()))
    return min(limits)


def cache_root() -> Path:
    """The cache directory, which need not exist: `$SLIPSTREAM_CACHE`, or below the home. Raises ConfigError without
    home.
    """
    if named := os.environ.get(CACHE_VARIABLE):
        return expanded(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or expanded("~") / ".cache") / "slipstream"


def expanded(path: str) -> Path:
    """A path whose `~` or `~USER` is that home directory. Raises ConfigError where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{path} is nobody's home directory here: set HOME, or give a path without ~") from None


def path_option() -> list[str]:
    """Python's option for a child process that searches the working directory for modules only where this process does,
    too: a file there may have the name of one of our packages.
    """
    try:
        here = os.getcwd()
    except FileNotFoundError:
        here = ""
    return [] if {"", here} & set(sys.path) else ["-P"]


_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def load_function(name: str, setting: str) -> Callable[..., Any]:
    """Import the operator's function named `name`, MODULE:FUNCTION.

    Raises ConfigError, in one line that begins with the setting, for a name that is malformed or cannot be imported,
    and for an object that is not callable.
    """
    if not _FUNCTION.fullmatch(name):
        raise ConfigError(f"{setting} is {name!r}: write MODULE:FUNCTION")
    try:
        found = pkgutil.resolve_name(name)
    except Exception as error:  # the module is the operator's, and may raise anything
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{setting}: {name} cannot be imported ({type(error).__name__}: {reason}): install its module, or put its "
            "folder into PYTHONPATH"
        ) from error
    if not callable(found):
        raise ConfigError(f"{setting}: {name} is not a function: name one")
    function: Callable[..., Any] = found
    return function


_PORTS = range(10_000, 22_000)
"""Below Linux's ephemeral ports (`ip_local_port_range`, from 32,768 on), which connections could take before we
listen; and below 22,000 to 29,999, where SGLang picks its own."""
_first = os.getpid() * 61 % len(_PORTS)
_ports: Iterator[int] = itertools.cycle([*_PORTS[_first:], *_PORTS[:_first]])
"""Starts at a different port in each process, so that two processes rarely try the same one."""


def free_port() -> int:
    """A port on which nobody listens; repeats only after all others were returned.

    Raises OSError when all are taken.
    """
    for port in itertools.islice(_ports, len(_PORTS)):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise OSError(f"no port of {_PORTS[0]} to {_PORTS[-1]} is free")


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def end_with_parent(parent_pid: int) -> None:
    """`preexec_fn` for a child process: it gets SIGTERM when the thread that started it ends. Linux only."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        os._exit(1)


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, SIGINT, and SIGHUP, which a closed terminal sends, except where `nohup` made this process ignore it."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *(() if ignores_hangup else (signal.SIGHUP,)))


def exit_on_signal() -> None:
    """Let SIGTERM and SIGHUP end this process through every `finally`, as SIGINT does, until something else handles
    them, such as an event loop.

    Linux ignores an unhandled SIGTERM for a container's first process, and elsewhere child processes would stay. Call
    from the main thread.
    """
    for number in stop_signals():
        if number != signal.SIGINT:
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def invalid_setting(prefix: str, invalid: ValidationError, options: Mapping[str, str] | None = None) -> ConfigError:
    """A ConfigError for the first invalid setting: names the environment variable, and does not quote its value.
    `options` are those of variables that a command takes as an option, too, by variable: it is named beside.
    """
    first = invalid.errors(include_url=False)[0]
    place = "_".join(str(part) for part in first["loc"]).upper()
    # A field may have a variable without the prefix.
    variable = place if place.startswith(PREFIX) else prefix + place
    if option := (options or {}).get(variable):
        return ConfigError(f"{option} ({variable}) is not usable: {first['msg']}: give another, or leave it out")
    return ConfigError(f"{variable} is not usable: {first['msg']}: set {variable} or unset it")


def read_secret(path: Path, variable: str) -> str:
    """Read a secret from the file that `variable` names, without line end. Raises ConfigError naming the variable."""
    try:
        secret = path.read_text("utf-8-sig").rstrip("\r\n")
        check_private(path, variable)
    except (OSError, UnicodeDecodeError) as error:
        reason = type(error).__name__
        raise ConfigError(
            f"{variable} names {path}, which cannot be read ({reason}): check path and permissions"
        ) from None
    if not secret:
        raise ConfigError(f"{variable} names {path}, which is empty: write the secret into it")
    return secret


_CONTAINER_SECRETS = Path("/run/secrets")
"""Secrets of a container: readable by all users, of which the container has only one."""


def check_private(path: Path, what: str) -> None:
    """Raise ConfigError where other users of this machine can read a file with a secret that `what` names."""
    real = path.resolve()
    if _CONTAINER_SECRETS in real.parents or not real.stat().st_mode & stat.S_IROTH:
        return
    if all(folder.stat().st_mode & stat.S_IXOTH for folder in real.parents):
        raise ConfigError(f"{what} names {path}, which other users can read: chmod o-r {path}")


def write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield an empty file beside `path` that replaces it after the block; a failure leaves `path` as it was. Of a
    symbolic link the file that it names is replaced.

    The new file is readable by its owner alone until it gets mode and owner of the old one, if there is one. Raises
    OSError.
    """
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.rewritten")
    temporary.unlink(missing_ok=True)
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    try:
        yield temporary
        with contextlib.suppress(FileNotFoundError):
            old = path.stat()
            mode = stat.S_IMODE(old.st_mode)
            try:
                os.chown(temporary, old.st_uid, old.st_gid)
            except OSError:
                # Only root may change an owner. What the old group may do is not for the new one.
                mode &= ~stat.S_IRWXG
            # Drives of Windows and SMB shares have no modes to change.
            with contextlib.suppress(PermissionError):
                os.chmod(temporary, mode)
        temporary.rename(path)
        sync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems, such as shared folders of virtual machines, cannot flush a folder.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exclusive_lock(lock: Path) -> Iterator[None]:
    """Hold a lock file exclusively. Excludes threads of this process too; a crash releases it."""
    with lock.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def shared_lock(lock: Path) -> Iterator[None]:
    """Hold a lock file shared with other readers. Needs no write access; does nothing if the file does not exist."""
    try:
        file = lock.open("rb")
    except FileNotFoundError:
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


T = TypeVar("T")
_LONE_SURROGATE = re.compile(rb"\\ud[89ab][0-9a-f]{2}(?!\\ud[c-f])|(?<!\\ud[89ab][0-9a-f]{2})\\ud[c-f]", re.IGNORECASE)
"""An escaped surrogate without its other half."""
_OTHER_LINE_ENDS = tuple((end.encode(), f"\\u{ord(end):04x}".encode()) for end in "\u0085\u2028\u2029")
"""Unicode's line separators that JSON does not escape by itself, with their escapes."""


def read_json_lines(path: Path, kind: type[T], *, example: str) -> Iterator[tuple[int, T]]:
    """Parse a file of JSON lines: (line number, value), without blank lines.

    Raises ConfigError that names file and line, and shows `example`, a valid line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): check the path") from None
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        if line.strip():
            try:
                yield number, _decoded(line, kind)
            except ValueError as error:
                raise ConfigError(
                    f"{path}, line {number} {error}: write one JSON object a line, like {example}"
                ) from None


def _decoded(line: bytes, kind: type[T]) -> T:
    """Parse one line. Raises ValueError that says what is wrong with it."""
    try:
        if "\0" in line.decode():
            raise ValueError("holds null bytes, as UTF-16 does; save the file as UTF-8")
        return msgspec.json.decode(line, type=kind)
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8; save the file as UTF-8") from None
    except msgspec.ValidationError as error:
        raise ValueError(f"does not fit ({error})") from None
    except (msgspec.DecodeError, RecursionError) as error:
        reason = "an escape that is half a character" if _LONE_SURROGATE.search(line) else error
        raise ValueError(f"is not JSON ({reason})") from None


def split_lines(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a stream of byte chunks, without line ends; drops an unterminated last line, which was cut off."""
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        yield from lines


async def asplit_lines(parts: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """`split_lines` for asynchronous streams."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line


def json_line(value: Any) -> bytes:
    """Encode as JSON that every reader takes for one line; without the line end."""
    encoded = msgspec.json.encode(value)
    for end, escaped in _OTHER_LINE_ENDS:
        encoded = encoded.replace(end, escaped)
    return encoded
