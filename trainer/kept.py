"""Traces that are kept from learning: one of each text, from the oldest to the newest."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trainer.provenance import Provenance, Stored


class KeptTraces:
    def __init__(self) -> None:
        self._by_text: dict[bytes, Stored] = {}

    def __len__(self) -> int:
        return len(self._by_text)

    def __iter__(self) -> Iterator[Stored]:
        return iter(self._by_text.values())

    def __contains__(self, text_hash: bytes) -> bool:
        return text_hash in self._by_text

    @property
    def trace_ids(self) -> list[str]:
        return [stored.trace_id for stored in self]

    @property
    def num_bytes(self) -> int:
        return sum(stored.num_bytes for stored in self)

    def forget(self, is_gone: Callable[[Provenance], object]) -> list[Stored]:
        """Remove, and return, the traces that are gone."""
        gone = [stored for stored in self if is_gone(stored.provenance)]
        for stored in gone:
            del self._by_text[stored.provenance.text_hash]
        return gone

    def keep(self, stored: Stored) -> None:
        """Take a trace as the newest."""
        self._by_text[stored.provenance.text_hash] = stored
