"""Connect to Redis: key names, URL parsing, a client with timeouts, and errors that name the fix.

    redis://[user:password@]host:port/db                    rediss:// with TLS, unix:///path?db=0
    redis+sentinel://[user:password@]host:port,…/service/db   rediss+sentinel://; the hosts are Sentinels

A Redis Cluster is refused: one Redis carries what 100 engines capture (docs/how-to/size.md). A query may set only the
options in `_OPTIONS`. redis-py's others would break this client, which needs replies in bytes (`decode_responses`) and
timeouts (`socket_timeout`).

All keys of a model share one prefix, and one transaction can change them together.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import parse_qsl, unquote

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from speculator.errors import ConfigError, StreamError
from speculator.host import now_ms, read_secret

SOCKET_TIMEOUT_S = 5.0
PASSWORD_FILE_VARIABLE = "SLIPSTREAM_REDIS_PASSWORD_FILE"  # noqa: S105 - its name
"""Environment variable with the path of a file that holds the password of the URL's user."""
_MALFORMED = (
    "the Redis URL is malformed: set SLIPSTREAM_REDIS_URL or --redis-url to redis://, rediss://, unix:// or "
    "redis+sentinel://HOST:PORT,…/SERVICE/DB"
)
_P = ParamSpec("_P")
_R = TypeVar("_R")
_Self = TypeVar("_Self")


def connect(url: str) -> redis.Redis:
    """As `open_client`, with a PING. Raises ConfigError also for an invalid host, and StreamError when Redis does not
    answer.
    """
    client = open_client(url)
    try:
        client.ping()
    except (exceptions.RedisError, OSError) as error:
        client.close()
        parsed = RedisUrl.parse(url)
        raise StreamError(f"{parsed.shown}: {_explain(error, parsed.path)}") from error
    except ValueError:
        raise ConfigError(_MALFORMED) from None
    return client


def open_client(url: str) -> redis.Redis:
    """A client that connects at its first command; a password may come from a file.

    No automatic retries: a repeated group read would leave delivered entries unseen; callers retry where it is safe.
    Raises ConfigError for a malformed URL or an unreadable file.
    """
    try:
        return _client(RedisUrl.parse(url))
    except ConfigError:
        raise
    except ValueError:
        # Without the cause: its message may quote a part of the password.
        raise ConfigError(_MALFORMED) from None


def _client(url: RedisUrl) -> redis.Redis:
    options: dict[str, Any] = {
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": SOCKET_TIMEOUT_S,
        "protocol": 2,
        "password": _password_of(url.options.get("username")),
        # Options of the URL override the defaults above.
        **url.options,
    }
    _check_files(url)
    never = Retry(NoBackoff(), 0)
    if url.service:
        return _master(url, retry=never, **options)
    if url.path:
        return redis.Redis(unix_socket_path=url.path, retry=never, **options)
    [(host, port)] = url.hosts
    return redis.Redis(host=host, port=port, ssl=url.has_tls, retry=never, **options)


def _master(url: RedisUrl, **options: Any) -> redis.Redis:
    """A client of the master that the Sentinels name; each new connection asks them again."""
    of_sentinels = {name: options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    common = {name: value for name, value in options.items() if name not in ("username", "password", "db")}
    sentinel = Sentinel(url.hosts, sentinel_kwargs={**common, **of_sentinels, "ssl": url.has_tls})
    client: redis.Redis = sentinel.master_for(url.service, ssl=url.has_tls, **options)
    return client


def _check_files(url: RedisUrl) -> None:
    """Raise ConfigError for a missing certificate file: redis-py's error would not name the option."""
    for name in ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile"):
        if name in url.options and not os.access(url.options[name], os.R_OK):
            raise ConfigError(f"{name} in the Redis URL names nothing that can be read: correct the path")


def _password_of(user: str | None) -> str | None:
    """The password in the file; None for a URL without a user: its server, such as the demo's, needs none."""
    file = os.environ.get(PASSWORD_FILE_VARIABLE)
    return read_secret(Path(file), PASSWORD_FILE_VARIABLE) if file and user else None


def redis_errors(
    method: Callable[Concatenate[_Self, _P], _R],
) -> Callable[Concatenate[_Self, _P], _R]:
    """Decorator: convert redis-py's errors to a StreamError whose message names the fix."""

    @functools.wraps(method)
    def wrapped(self: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(self, *args, **kwargs)
        except StreamError:
            _close_idle(getattr(self, "_redis", self))
            raise
        except (exceptions.RedisError, OSError) as error:
            _close_idle(getattr(self, "_redis", self))
            raise StreamError(_explain(error)) from error

    return wrapped


def _close_idle(client: object) -> None:
    """Close idle connections, so that new ones ask the Sentinels for the master. redis-py may have reconnected one to a
    demoted master, in the middle of a transaction.
    """
    if isinstance(client, redis.Redis):
        client.connection_pool.disconnect(inuse_connections=False)


class LostTransactionError(StreamError):
    """The connection was lost in the middle of a transaction. Redis may have carried it out."""


def until_unraced(transaction: Callable[[], _R], *, attempts: int, what: str) -> _R:
    """Run a transaction with WATCH again while other clients change what it watches.

    Raises StreamError after so many attempts, and LostTransactionError where Redis answered WATCH and no more.
    """
    for _ in range(attempts):
        try:
            return transaction()
        except exceptions.WatchError as error:
            # redis-py puts a WatchError in the place of a lost connection's error, too. Redis may have carried that
            # transaction out, and may be too slow for another one at once.
            lost = error.__context__
            if isinstance(lost, exceptions.ConnectionError | exceptions.TimeoutError | OSError):
                raise LostTransactionError(_explain(lost)) from lost
    raise StreamError(f"too many clients change {what} at once: try again")


def is_denied(error: StreamError) -> bool:
    """Whether Redis refused the command because this user lacks the permission."""
    return isinstance(error.__cause__, exceptions.NoPermissionError)


class ServerInfo:
    """What Redis says of itself. Raises redis-py's errors."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis: Any = client
        self._may_ask = True

    def section(self, name: str) -> dict[str, Any]:
        """A section of INFO; {} where Redis refuses it for good."""
        if not self._may_ask:
            return {}
        try:
            return dict(self._redis.info(name))
        except exceptions.ResponseError as error:
            if "BUSY" in str(error):
                raise  # it runs a script, and answers again after it
            # Do not ask again: Redis logs each denied command.
            self._may_ask = False
            return {}

    def time_ms(self) -> int:
        """The time by Redis's clock, as in the ids of streams: services whose own clocks differ compare times by it. By
        this machine's clock where Redis refuses INFO.
        """
        time_us = self.section("server").get("server_time_usec")
        return now_ms() if time_us is None else int(time_us) // 1000


def _explain(error: Exception, socket: str = "") -> str:
    if isinstance(error, exceptions.AuthenticationError | exceptions.NoPermissionError):
        return f"Redis refuses the login: set the user and password in SLIPSTREAM_REDIS_URL or --redis-url ({error})"
    if isinstance(error, exceptions.OutOfMemoryError):
        return f"Redis is out of memory: raise its maxmemory or lower the stream's byte cap ({error})"
    if "MISCONF" in str(error):
        return f"Redis cannot write to its disk: free some space ({error})"
    if isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | OSError):
        fix = "start it, or set SLIPSTREAM_REDIS_URL or --redis-url"
        # The lock of `EmbeddedRedis` stays when that ends.
        if socket and os.access(Path(socket).with_name("redis.lock"), os.F_OK):
            fix = f"it runs only while `slipstream serve --learn --data-dir {Path(socket).parent.parent}` does"
        return f"Redis cannot be reached: {fix} ({error})"
    return f"Redis refuses the command: {error}"


class RedisKeys:
    """The names of one model's keys; `model_key` is a slug that the caller derives from the target's name."""

    def __init__(self, *, model_key: str) -> None:
        self.model_key = model_key
        self._prefix = f"slipstream:{{{model_key}}}:"
        self.traces = self._key("traces")
        """Stream of traces."""
        self.sizes = self._key("sizes")
        """List: "payload bytes:index" of every trace, in the stream's order."""
        self.num_appended = self._key("num_appended")
        """Integer: traces ever appended, which is also the next one's index."""
        self.accounts = self._key("accounts")
        """Hash: acked, lost, dead_lettered, erased, expired, redelivered, foreign (entries), bytes (payload of the
        entries in the stream), surplus (entries in the stream beyond those in `sizes`), position and next_index (the id
        that the group has delivered last, and the index of what it delivers next)."""
        self.open = self._key("open")
        """Sorted set: traces that are neither acked nor lost nor erased, as `open_member`, by index."""
        self.dead_letters = self._key("dead_letters")
        self.desired_draft = self._key("desired_draft")
        self.pinned_draft = self._key("pinned_draft")
        self.erasures = self._key("erasures")
        """Hash: time of the erasure order, in milliseconds, by tenant."""
        self.rewards = self._key("rewards")
        self.trainers = self._key("trainers")
        """Hash: the last report of each trainer process by its name."""
        self.gateways = self._key("gateways")
        """Stream: which orders to erase each gateway in front of SGLang has carried out, about once a second."""
        self.trainer_resting = self._key("trainer_resting")
        """String: exists while the trainer pauses because no engine uses its draft head; expires unless renewed."""
        self.engines = self._key("engines")
        """Sorted set of engine ids by the time, in milliseconds, at which their report expires."""
        self.canary = self._key("canary")
        """String: the engine that holds the canary slot; expires unless renewed."""
        self.canary_awaited = self._key("canary_awaited")
        """String: the id of an engine that failed to get the canary slot lately; expires soon."""
        self.pool_metrics = self._key("pool_metrics")
        """String: the gateway that exports the figures of a pool of engines; expires unless renewed."""
        self.group_texts = self._key("group_texts")
        """Sorted set of prompt groups with text, by the time of the last addition, in milliseconds."""
        self.ended_groups = self._key("ended_groups")
        """Stream of the prompt groups that ended last."""

    def engine(self, engine_id: str) -> str:
        return self._key(f"engine:{engine_id}")

    def canary_trials(self, version: int) -> str:
        """Sorted set: processes that began a trial of the version and did not end cleanly, by time in milliseconds."""
        return self._key(f"canary_trials:{version}")

    def group_text(self, group: str) -> str:
        """String in the format of serving/group_cache/texts.py; `group` is a member of `group_texts`."""
        return self._key(f"group_text:{group}")

    def _key(self, name: str) -> str:
        return self._prefix + name


HostPort = tuple[str, int]
_CLUSTER = re.compile(r"\s*rediss?\+cluster:")
# Not urllib: it validates hosts in brackets, and takes several hosts for one.
_URL = re.compile(r"(rediss?(?:\+sentinel)?|unix)://([^/?#]*)([^?#]*)(?:\?([^#]*))?", re.DOTALL)
_HOST = re.compile(r"(?:\[([^\[\]\s]+)\]|([^\[\]:\s]*))(?::([0-9]{1,5}))?")
_NAME = re.compile(r"[a-z_]{1,40}")
_PATH, _TEXT, _TRUE = (r"(?s:.+)", "a path"), (r"(?s:.+)", "text"), ("true", "yes", "1")
_OPTIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "db": (r"[0-9]{1,9}", "a number"),
        "username": _TEXT,
        "password": _TEXT,
        "client_name": (r"[!-~]+", "ASCII without spaces"),
        "sentinel_username": _TEXT,
        "sentinel_password": _TEXT,
        "ssl_ca_certs": _PATH,
        "ssl_ca_path": _PATH,
        "ssl_certfile": _PATH,
        "ssl_keyfile": _PATH,
        "ssl_password": _TEXT,
        "ssl_cert_reqs": (r"none|optional|required", "none, optional or required"),
        "ssl_check_hostname": (r"(?i:true|yes|1|false|no|0)", "true or false"),
    }
)
"""Allowed options by name: a pattern for the whole value, and its description for errors."""


@dataclass(frozen=True, kw_only=True)
class RedisUrl:
    shown: str
    """The URL without secrets, for messages."""
    has_tls: bool
    hosts: tuple[HostPort, ...]
    """Servers, or Sentinels; empty for a Unix socket."""
    path: str = ""
    """Path of a Unix socket."""
    service: str = ""
    """The name that Sentinels know the server by; empty without Sentinels."""
    options: dict[str, Any]
    """Arguments for redis-py's connections: user, password, database, and the query's options."""

    @classmethod
    def parse(cls, url: str) -> RedisUrl:
        """Parse a Redis URL. Raises ConfigError for a wrong option or a Redis Cluster, else ValueError.

        Only a ConfigError's message is free of secrets.
        """
        if _CLUSTER.match(url):
            raise ConfigError(
                "the Redis URL names a Redis Cluster, which is not supported: give one server (redis://, rediss:// or "
                "unix://), or its Sentinels (redis+sentinel://)"
            )
        if not (parts := _URL.fullmatch(url.strip())):
            raise ValueError("no URL of Redis")
        scheme, location, path, query = (part or "" for part in parts.groups())
        is_socket, has_tls, has_sentinels = scheme == "unix", scheme.startswith("rediss"), scheme.endswith("sentinel")
        login, at, hosts = location.rpartition("@")
        # An unquoted / or ? in the password: its rest would be read as a path or an option.
        if "@" in query or ("@" in path and not (is_socket and (at or not location))):
            raise ValueError("an @ behind the hosts")
        username, _, password = (unquote(part, errors="strict") for part in login.partition(":"))
        service, db = "", path
        if is_socket:
            db = ""
            if hosts or path in ("", "/"):
                raise ValueError("no path of a socket")
        elif has_sentinels:
            service, _, db = path.removeprefix("/").partition("/")
            if not service:
                raise ValueError("no service")
        given = {"username": username, "password": password, "db": db.strip("/")}
        options = [*((name, value) for name, value in given.items() if value), *parse_qsl(query, True)]
        return cls(
            shown=f"{scheme}://{hosts}{path}",
            has_tls=has_tls,
            hosts=() if is_socket else tuple(_host(host, has_sentinels) for host in hosts.split(",")),
            path=unquote(path, errors="strict") if is_socket else "",
            service=unquote(service),
            options=dict(_checked(options, has_sentinels=has_sentinels, has_tls=has_tls)),
        )


def _checked(
    options: Iterable[tuple[str, str]], *, has_sentinels: bool, has_tls: bool
) -> Iterator[tuple[str, str | int | bool]]:
    """Validate options. Raises ConfigError, which does not quote values: they may be secret."""
    seen = set()
    for name, value in options:
        if name not in _OPTIONS:
            # Quote only what looks like an option's name: other text may be part of a secret.
            shown = name if _NAME.fullmatch(name) else "something unreadable"
            raise ConfigError(
                f"the Redis URL sets {shown}, which is not an option here: remove it; the options are "
                + ", ".join(_OPTIONS)
            )
        if name in seen:
            raise ConfigError(f"the Redis URL sets {name} twice: remove one")
        if name.startswith("ssl_") and not has_tls:
            raise ConfigError(f"the Redis URL sets {name} without TLS: write rediss://, or remove it")
        if name.startswith("sentinel_") and not has_sentinels:
            raise ConfigError(f"the Redis URL sets {name} without Sentinels: write redis+sentinel://, or remove it")
        seen.add(name)
        pattern, expected = _OPTIONS[name]
        if not re.fullmatch(pattern, value):
            raise ConfigError(f"{name} in the Redis URL is not {expected}: correct or remove it")
        yield name, int(value) if name == "db" else value.lower() in _TRUE if name == "ssl_check_hostname" else value


def _host(text: str, is_sentinel: bool) -> HostPort:
    parts = _HOST.fullmatch(text)
    if parts is None:
        raise ValueError("no host and port")
    host = unquote(parts[1] or parts[2], errors="strict")
    if not host and is_sentinel:
        raise ValueError("a host is missing")
    port = int(parts[3]) if parts[3] else 26379 if is_sentinel else 6379
    if not 0 < port < 2**16:
        raise ValueError("no port")
    return host.lower() or "localhost", port
