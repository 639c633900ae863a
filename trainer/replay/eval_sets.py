"""Traces that judge candidates: the held-out set and the golden set. One trace of each text, oldest first.

**Held out** are fresh traces that wait before they are learnt from, so that the gate has some that no draft has seen.

    arriving ──(a fixed share of all texts)──▶ held out ──(newer ones came)──▶ the replay, as a new trace

Whether a text is held out depends on the text alone, so a repeated text goes the same way. A text that was learnt from
cannot come back as held out while the replay has it. No trace is lost: when the pool is full, one is released. First
goes one of a tenant above its share, then one that has siblings here, since answers to one prompt count as one, then
the oldest. The pool is part of the trainer's checkpoint.

**The golden set** is a few early traces that are never learnt from. It guards against drafts that become bad for this
early traffic, for example because someone sends poisoned traffic later.

The set is the first traces that arrive, some of each domain, saved in the trainer's checkpoint; or an operator's own
recording, which is read at every start.

Traffic may also move away for good. Then every draft that suits the present is worse on the golden traces, and their
veto would stand for ever. So the set is renewed:

    vetoed ──(golden_patience_s without a version, and vetoed again)──▶ learnt from; the next take their places

An attacker would have to send most of the traffic all that time, and the review still judges what is published. An
operator's recording is never renewed: the operator can choose another. It does not expire, but traces of an erased
tenant are removed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice

from speculator.errors import ConfigError, TraceError
from speculator.recording import RecordingReader
from speculator.trace import Trace
from trainer.config import ENV_PREFIX, TrainerConfig
from trainer.learning.batch import Example
from trainer.ranks import Ranks
from trainer.replay.reservoirs import Provenance, Stored, provenance_of, sampling_key


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
        """Remove and return the traces for which `is_gone` is true."""
        gone = [stored for stored in self if is_gone(stored.provenance)]
        for stored in gone:
            del self._by_text[stored.provenance.text_hash]
        return gone

    def keep(self, stored: Stored) -> None:
        """Take a trace as the newest."""
        self._by_text[stored.provenance.text_hash] = stored


class HeldOut(KeptTraces):
    """The held-out set: at most `max_traces` and `max_bytes`, of which one tenant has at most `max_tenant_share` where
    there are others. After each `keep` call `release`.
    """

    def __init__(self, *, share: float, max_traces: int, max_bytes: float, max_tenant_share: float, seed: int) -> None:
        super().__init__()
        self._share, self._max_traces, self._max_bytes = share, max_traces, max_bytes
        self._max_of_tenant = max_tenant_share * max_traces
        # Not the replay's seed: with that its reservoirs would keep exactly the held-out texts longest.
        self._seed = seed + 1
        self.is_young = True
        """No trace was released since the start of the process."""

    def holds_out(self, stored: Stored) -> bool:
        return sampling_key(stored.provenance.text_hash, self._seed) < self._share

    def release(self) -> Iterator[Stored]:
        """Remove and yield traces while there are too many."""
        while len(self) > self._max_traces or self.num_bytes > self._max_bytes:
            self.is_young = False
            yield self._by_text.pop(self._next())

    def _next(self) -> bytes:
        tenants = Counter(stored.provenance.tenant for stored in self)
        above = {name for name, count in tenants.items() if len(tenants) > 1 and count > self._max_of_tenant}
        may_leave = [stored.provenance for stored in self if not above or stored.provenance.tenant in above]
        answers = Counter(provenance.prompt_hash for provenance in may_leave)
        # Of equals the first, so the oldest.
        return max(may_leave, key=lambda provenance: answers[provenance.prompt_hash]).text_hash


_VARIABLE = f"{ENV_PREFIX}GOLDEN"


class GoldenSet(KeptTraces):
    """The golden set: at most `max_traces` and `max_bytes`, of which one tenant has at most `max_tenant_share`."""

    def __init__(self, *, max_traces: int, max_bytes: float, max_tenant_share: float) -> None:
        super().__init__()
        self._max_traces, self._max_bytes = max_traces, max_bytes
        self._max_of_tenant = max_tenant_share * max_traces

    def accepts(self, stored: Stored) -> bool:
        """Whether to keep a new trace: there is room, no other answer to its prompt is here, and its domain and tenant
        are below their shares. With n domains, this one's included, a domain gets a share of 1/(n + 1), so that another
        one still finds room.
        """
        domains = {one.provenance.domain for one in self} | {stored.provenance.domain}
        of_domain = sum(one.provenance.domain == stored.provenance.domain for one in self)
        of_tenant = sum(one.provenance.tenant == stored.provenance.tenant for one in self)
        return (
            len(self) < self._max_traces
            and stored.provenance.prompt_hash not in {one.provenance.prompt_hash for one in self}
            and of_domain < self._max_traces / (len(domains) + 1)
            and of_tenant < self._max_of_tenant
            and stored.num_bytes + self.num_bytes <= self._max_bytes
        )

    def remove_all(self) -> list[Stored]:
        """Empty the set and return its traces, so that the next ones can fill it."""
        given_up = list(self)
        self._by_text.clear()
        return given_up


def golden_set(
    config: TrainerConfig,
    make_example: Callable[[Trace], Example],
    ranks: Ranks,
    *,
    target_fingerprint: str,
    is_gone: Callable[[Provenance], object] = lambda _: False,
) -> GoldenSet:
    """The golden set as configured: empty, to be filled by traffic, or this rank's share of an operator's recording.

    Raises ConfigError where the recording is of another target or has no usable trace.
    """
    if config.golden is None:
        return GoldenSet(
            max_traces=config.golden_traces,
            max_bytes=config.holdout_share * config.replay_max_bytes,
            max_tenant_share=config.max_tenant_share,
        )
    with RecordingReader(config.golden) as reader:
        if reader.header.target_fingerprint != target_fingerprint:
            raise ConfigError(f"{config.golden} was recorded from another target: set {_VARIABLE} to one from this one")
        usable = list(islice(_usable(reader, make_example), config.golden_traces))
    if not usable:
        raise ConfigError(f"{config.golden} has no trace that fits this draft: set {_VARIABLE} to another recording")
    golden = GoldenSet(max_traces=0, max_bytes=0, max_tenant_share=0)
    # Erased traces are left out; where that leaves none, the held-out set alone judges drafts.
    usable = [stored for stored in usable if not is_gone(stored.provenance)]
    for stored in usable[ranks.rank :: ranks.size]:
        golden.keep(stored)
    return golden


def _usable(reader: RecordingReader, make_example: Callable[[Trace], Example]) -> Iterator[Stored]:
    for trace in reader.traces():
        try:
            yield Stored(example=make_example(trace), provenance=provenance_of(trace))
        except TraceError:
            continue
