"""API keys: each lets its holder ask for one tenant, within limits.

A file has all of them and none of their secrets: `slipstream keys` writes it, and a running gateway (`Keyring`) notices
a change of it at the next request.
"""

from __future__ import annotations

import contextlib
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
from speculator.host import exclusive, sync, write_synced

Label = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
"""Of a key or a tenant. Tenants become labels of metrics."""
_PREFIX = "sk-slipstream-"
_SECRET_BYTES = 32
_NEW_FILE_MODE = 0o600
_LAST_S = 253_402_300_799
"""The last second that has a date of four digits."""
_MAX_FILE_BYTES = 4 * 1024 * 1024
log = structlog.get_logger(__name__)


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    name: Label
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    """Of the secret; see `digest`."""
    tenant: Label = "default"
    """Whose traffic it is, whatever a request says."""
    capture: bool = True
    """Without it, nothing is recorded of this key's requests and nothing is proposed from them to others."""
    read_only: bool = False
    """It sees models, metrics and the page's figures, and generates nothing."""
    requests_per_minute: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    """In any 60 seconds."""
    max_concurrent: Annotated[int, Meta(ge=1)] | None = None
    """Requests under way at once."""
    created_s: Annotated[int, Meta(ge=0, le=_LAST_S)] = 0
    """Unix time."""
    expires_s: Annotated[int, Meta(ge=0, le=_LAST_S)] | None = None
    """Unix time from which on it opens nothing."""

    def is_expired(self, now_s: float) -> bool:
        return self.expires_s is not None and now_s >= self.expires_s


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Literal[1]
    keys: tuple[ApiKey, ...]


def new_secret() -> str:
    return _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def digest(secret: bytes) -> str:
    """What the file keeps of a secret.

    One round of SHA-256 without a salt: slow, salted hashes protect what people think up, by making guesses dear. Of
    256 random bits there is nothing to guess, and no two secrets are the same.
    """
    return hashlib.sha256(secret).hexdigest()


def read_keys(file: Path) -> tuple[ApiKey, ...]:
    """Raises ConfigError where the file cannot be trusted or understood; the message has nothing of its content."""
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
            f"{file} is no file with API keys ({error}): remove what is named there, or write it with `slipstream keys`"
        ) from None
    for what, values in (("name", [key.name for key in keys]), ("sha256", [key.sha256 for key in keys])):
        if len(set(values)) < len(values):
            raise ConfigError(f"{file} has the same {what} twice: remove one of the keys")
    return keys


def change_keys(file: Path, change: Callable[[tuple[ApiKey, ...]], Iterable[ApiKey]]) -> None:
    """Replace the keys of `file`, which need not exist, by what `change` makes of them; one writer at a time.

    A reader sees the old file or the new one. Raises ConfigError where it cannot be read or written, and whatever
    `change` raises; the file is then as it was.
    """
    file = file.resolve()
    try:
        with exclusive(file.with_name(f".{file.name}.lock")):
            exists = file.exists()
            _replace(file, change(read_keys(file) if exists else ()), file.stat() if exists else None)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(f"{file} cannot be written ({reason}): check path and permissions") from None


def _replace(file: Path, keys: Iterable[ApiKey], old: os.stat_result | None) -> None:
    """Mode and owner stay as they are, or another user's gateway could not read the file any more."""
    temporary = file.with_name(f".{file.name}.tmp")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _NEW_FILE_MODE))
    write_synced(temporary, msgspec.json.format(msgspec.json.encode(_KeyFile(1, tuple(keys)))) + b"\n")
    if old is not None:
        with contextlib.suppress(PermissionError):  # only root gives files away
            os.chown(temporary, old.st_uid, old.st_gid)
        temporary.chmod(stat.S_IMODE(old.st_mode))
    temporary.rename(file)
    sync(file.parent)


def make_key(name: str, secret: str, *, lifetime_s: int | None, **fields: Any) -> ApiKey:
    """A key of that secret, from now on, with further `fields` of `ApiKey`.

    Raises ConfigError for a value that the file may not have.
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
    """Of a gateway whose clients all have the same key."""

    has_tenants = False

    def __init__(self, secret: SecretStr) -> None:
        self._key = ApiKey(name="api-key", sha256=digest(secret.get_secret_value().encode()))

    def find(self, secret: bytes) -> ApiKey | None:
        return self._key if hmac.compare_digest(self._key.sha256, digest(secret)) else None


class Keyring:
    """Reads the file again whenever it is another one; a broken or missing file leaves the keys as they were."""

    has_tenants = True
    """Some keys may not see what names the tenants of others."""

    def __init__(self, file: Path) -> None:
        """Raises ConfigError: there is no last good file to fall back to."""
        self._file = file
        self._seen = self._identity()
        self._keys = read_keys(file)
        self._failure: tuple[tuple[int, ...], str] | None = None

    def find(self, secret: bytes) -> ApiKey | None:
        """The key with that secret, expired or not."""
        self._look_again()
        asked = digest(secret)
        found = None
        # All of them and all of each: the time tells neither how much was right nor whose key it was.
        for key in self._keys:
            if hmac.compare_digest(key.sha256, asked):
                found = key
        return found

    def _look_again(self) -> None:
        identity = self._identity()
        if identity == self._seen:
            return
        try:
            self._keys = read_keys(self._file)
        except ConfigError as error:
            # Tried again at the next request, or a key that was revoked while there was no descriptor to read with
            # would open for ever; said once.
            failure = identity, str(error)
            if failure != self._failure:
                log.error("keys_not_read", reason=str(error), kept=len(self._keys))
            self._failure = failure
        else:
            # As it was before we read: what changed meanwhile is read again next time.
            self._seen, self._failure = identity, None
            log.info("keys_read", num_keys=len(self._keys))

    def _identity(self) -> tuple[int, ...]:
        """Which file it is, and when it was last changed: in place, or by another that was renamed to its name."""
        try:
            found = self._file.stat()
        except OSError:
            return ()
        return found.st_dev, found.st_ino, found.st_ctime_ns, found.st_mtime_ns, found.st_size
