"""The keys of a running gateway: it notices a change of their file at the next request."""

from __future__ import annotations

import hmac
from pathlib import Path

import structlog

from serving.gateway.auth.keys import ApiKey, digest, read_keys
from speculator.errors import ConfigError

log = structlog.get_logger(__name__)


class Keyring:
    """Reads the file again whenever it is another one; a broken or missing file leaves the keys as they were."""

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
