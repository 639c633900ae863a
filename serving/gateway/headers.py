"""What every answer tells a browser, whatever route it comes from; no answer lets another site's page read it."""

from __future__ import annotations

from collections.abc import Iterable

RawHeaders = Iterable[tuple[bytes, bytes]]

_SAFE = {
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    # Answers are what people asked for, and figures are of their moment.
    b"cache-control": b"no-store",
}


def with_safe_headers(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """`headers`, and those of ours that are not among them: the page has a policy of its own."""
    given = list(headers)
    names = {name.lower() for name, _ in given}
    return [*given, *((name, value) for name, value in _SAFE.items() if name not in names)]
