"""API keys: each belongs to one tenant and has limits.

A file has all keys, with hashes of their secrets: `slipstream keys` writes it, and a running gateway (`Keyring`)
notices a change at the next request.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import structlog
from msgspec import Meta
from pydantic import SecretStr

from speculator.errors import ConfigError
from speculator.host import exclusive_lock, replacing, write_synced

Label = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
"""Name of a key or a tenant; tenants are labels of metrics."""
_PREFIX = "sk-slipstream-"
_SECRET_BYTES = 32
_LAST_S = 253_402_300_799
"""The last second of the year 9999."""
_MAX_FILE_BYTES = 4 * 1024 * 1024
log = structlog.get_logger(__name__)


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    name: Label
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    """Hash of the secret (`digest`)."""
    tenant: Label = "default"
    """The tenant of all its requests, whatever a request says."""
    capture: bool = True
    """False: this key's requests are not recorded, and their text is not proposed to others."""
    read_only: bool = False
    """True: the key may read models, metrics and the page's figures, and may not generate."""
    requests_per_minute: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    """Most requests in any 60 seconds."""
    max_concurrent: Annotated[int, Meta(ge=1)] | None = None
    """Requests under way at once."""
    created_s: Annotated[int, Meta(ge=0, le=_LAST_S)] = 0
    """Unix time."""
    expires_s: Annotated[int, Meta(ge=0, le=_LAST_S)] | None = None
    """Unix time of expiry."""

    def is_expired(self, now_s: float) -> bool:
        return self.expires_s is not None and now_s >= self.expires_s


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Literal[1]
    keys: tuple[ApiKey, ...]


def new_secret() -> str:
    return _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def digest(secret: bytes) -> str:
    """The hash of a secret, as the file has it.

    One round of SHA-256 without a salt: slow, salted hashes make guessing of chosen passwords expensive. Secrets here
    are 256 random bits, which nobody can guess and no two of which are equal.
    """
    return hashlib.sha256(secret).hexdigest()


def read_keys(file: Path) -> tuple[ApiKey, ...]:
    """Read a key file. Raises ConfigError where it cannot be trusted or parsed; the message quotes none of it."""
    try:
        with file.open("rb") as opened:
            if stat.S_IMODE(os.fstat(opened.fileno()).st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
                raise ConfigError(f"{file} can be changed by other users, who could add keys: chmod go-w {file}")
            content = opened.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(f"{file} with the API keys cannot be read ({reason}): check path and permissions") from None
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"{file} is too large for a file with API keys: check its path")
    try:
        keys = msgspec.json.decode(content, type=_KeyFile).keys
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file} is not a file of API keys ({error}): correct that, or write the file with `slipstream keys`"
        ) from None
    for what, values in (("name", [key.name for key in keys]), ("sha256", [key.sha256 for key in keys])):
        if len(set(values)) < len(values):
            raise ConfigError(f"{file} has the same {what} twice: remove one of the keys")
    return keys


def change_keys(file: Path, change: Callable[[tuple[ApiKey, ...]], Iterable[ApiKey]]) -> None:
    """Replace the keys of `file`, which need not exist, by what `change` returns for them; one writer at a time.

    A reader sees the old file or the new one. Raises ConfigError where it cannot be read or written, and whatever
    `change` raises; the file is then as it was.
    """
    file = file.resolve()
    try:
        with exclusive_lock(file.with_name(f".{file.name}.lock")):
            keys = tuple(change(read_keys(file) if file.exists() else ()))
            # With the mode and owner of the old one, so that another user's gateway can still read it.
            with replacing(file) as temporary:
                write_synced(temporary, msgspec.json.format(msgspec.json.encode(_KeyFile(1, keys))) + b"\n")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(f"{file} cannot be written ({reason}): check path and permissions") from None


def make_key(name: str, secret: str, *, lifetime_s: int | None, **fields: Any) -> ApiKey:
    """A key with that secret, created now, with further `fields` of `ApiKey`.

    Raises ConfigError for a value that is not allowed.
    """
    now_s = int(time.time())
    expires_s = None if lifetime_s is None else now_s + lifetime_s
    try:
        return msgspec.convert(
            {"name": name, "sha256": digest(secret.encode()), "created_s": now_s, "expires_s": expires_s, **fields},
            ApiKey,
        )
    except msgspec.ValidationError as error:
        raise ConfigError(f"no such key can be made: {error}") from None


class OneKey:
    """The keyring of a gateway with a single key for all clients."""

    has_tenants = False

    def __init__(self, secret: SecretStr) -> None:
        self._key = ApiKey(name="api-key", sha256=digest(secret.get_secret_value().encode()))

    def find(self, secret: bytes) -> ApiKey | None:
        return self._key if hmac.compare_digest(self._key.sha256, digest(secret)) else None


class Keyring:
    """The keys of a file, read again whenever it changes; a broken or missing file leaves the keys as they were."""

    has_tenants = True
    """Keys of several tenants: most may not see answers that name other tenants."""

    def __init__(self, file: Path) -> None:
        """Raises ConfigError for an unusable file, since there are no earlier keys to keep."""
        self._file = file
        self._seen = self._identity()
        self._keys = read_keys(file)
        self._failure: tuple[tuple[int, ...], str] | None = None

    def find(self, secret: bytes) -> ApiKey | None:
        """The key with that secret, expired or not."""
        self._reload_if_changed()
        asked = digest(secret)
        found = None
        # Compare all keys in constant time, so that timing reveals neither a key nor whose it is.
        for key in self._keys:
            if hmac.compare_digest(key.sha256, asked):
                found = key
        return found

    def _reload_if_changed(self) -> None:
        identity = self._identity()
        if identity == self._seen:
            return
        try:
            self._keys = read_keys(self._file)
        except ConfigError as error:
            # Read again at the next request: after one failed read, such as for want of a descriptor, a revoked key
            # would stay valid for ever. Logged once.
            failure = identity, str(error)
            if failure != self._failure:
                log.error("keys not read", reason=str(error), kept=len(self._keys))
            self._failure = failure
        else:
            # The identity from before the read: a change during it is read at the next request.
            self._seen, self._failure = identity, None
            log.info("keys read", num_keys=len(self._keys))

    def _identity(self) -> tuple[int, ...]:
        """Identity of the file's content: changes if it is written in place or replaced by a rename."""
        try:
            found = self._file.stat()
        except OSError:
            return ()
        return found.st_dev, found.st_ino, found.st_ctime_ns, found.st_mtime_ns, found.st_size
