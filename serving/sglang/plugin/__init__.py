"""The plugin inside SGLang's processes: its entry point, its hooks into SGLang, and what it builds there."""

from __future__ import annotations


def register() -> None:
    """Hook this SGLang process; the entry point of the group `sglang.srt.plugins`."""
    from serving.sglang.plugin import hooks

    hooks.register()
