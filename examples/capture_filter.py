"""A capture filter of your own: decides which answers may be kept to learn from.

    slipstream serve --model DIR_OR_ID --learn --capture-filter examples.capture_filter:keep

The recorder calls it for each finished answer, before the trace leaves the process. With SGLang it runs in SGLang's
process. `slipstream_traces_dropped_total{reason="filtered"}` counts the traces that it drops.
"""

from __future__ import annotations

import re

_SECRETS = re.compile(r"(?i)\b(password|api[ _-]?key|iban)\b|-----BEGIN [A-Z ]*PRIVATE KEY-----")
_EMAIL = re.compile(r"\b[\w.+-]+@[\w-]+\.\w+")
_TENANTS = {"clinic", "bank"}
"""Customers of whom nothing may be kept. `slipstream keys add --no-capture` does the same for a key."""


def keep(text: str, tenant: str) -> bool:
    """Whether to keep an answer. `text` is the prompt, as far as the trace has it, and the answer. Must be fast.

    A trace for which this raises is dropped as well. Patterns find only fixed forms: for names and addresses take a
    library such as Presidio (docs/how-to/privacy.md).
    """
    return tenant not in _TENANTS and not _SECRETS.search(text) and not _EMAIL.search(text)
