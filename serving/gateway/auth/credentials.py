"""What a request shows to be let in: its bearer token, the admin key, the name it was sent to."""

from __future__ import annotations

import functools
import hmac
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import urlsplit

from pydantic import SecretStr
from starlette.requests import Request

from serving.gateway.config import ENV_PREFIX
from serving.gateway.errors import ApiError

_KEY_VARIABLE = f"{ENV_PREFIX}ADMIN_KEY"


def bearer(request: Request) -> bytes | None:
    """None where there is none."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Headers come decoded as Latin-1.
    return given.encode("latin-1") if scheme.lower() == "bearer" and given else None


def unauthorised(message: str, code: str) -> ApiError:
    return ApiError(401, message, code=code, headers={"www-authenticate": "Bearer"})


def check_admin_key(request: Request, key: SecretStr | None) -> None:
    """Raise ApiError (401, 403) unless the request has the admin key; nothing opens a gateway that has none."""
    if key is None:
        raise ApiError(403, f"This gateway has no admin key: set {_KEY_VARIABLE} and restart it.", code="no_admin_key")
    given = bearer(request)
    if given is None:
        message = "This needs the admin key: send the header 'authorization: Bearer <key>'."
        raise unauthorised(message, "admin_key_missing")
    # As bytes, since a key need not be ASCII. The time tells nothing of the key.
    if not hmac.compare_digest(given, key.get_secret_value().encode()):
        raise ApiError(403, "This is not the admin key.", code="admin_key_wrong")


@functools.lru_cache(maxsize=256)
def _is_no_name(host: str) -> bool:
    """`localhost`, or an address."""
    with suppress(ValueError):
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ip_address(name))
    return False


def check_host(request: Request) -> None:
    """Raise ApiError (403) where somebody was sent to this machine under a name of somebody else's.

    Without keys the gateway trusts whoever reaches loopback. A browser does so for any page whose own name resolves to
    127.0.0.1 for a moment, and takes that page and this gateway for one site.
    """
    if _is_no_name(request.headers.get("host", "")):
        return
    message = "Without API keys this gateway answers to localhost and to addresses alone, not to names: give it keys."
    raise ApiError(403, message, code="host_not_allowed")
