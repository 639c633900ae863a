"""A filter of your own: which answers may be kept to learn from.

    slipstream serve --model DIR_OR_ID --learn --capture-filter examples.capture_filter:keep

The recorder asks it about each finished answer, before a trace of it leaves the process. In front of SGLang it runs in
SGLang's process. `slipstream_traces_dropped_total{reason="filtered"}` counts what it drops.
"""

from __future__ import annotations

import re

_SECRETS = re.compile(r"(?i)\b(password|api[ _-]?key|iban)\b|-----BEGIN [A-Z ]*PRIVATE KEY-----")
_EMAIL = re.compile(r"\b[\w.+-]+@[\w-]+\.\w+")
_TENANTS = {"clinic", "bank"}
"""Customers whose contract says that nothing is kept. `slipstream keys add --no-capture` says so, too, key by key."""


def keep(text: str, tenant: str) -> bool:
    """`text` is the prompt, as far as the trace has it, and the answer. Be quick: it is called for every answer.

    A trace for which this fails is dropped as well. Patterns find what looks like them and no more: for names and
    addresses take a library such as Presidio (docs/how-to/privacy.md).
    """
    return tenant not in _TENANTS and not _SECRETS.search(text) and not _EMAIL.search(text)
