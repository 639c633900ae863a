"""Engines of rollouts: the protocol that an engine implements, and which samples hold its slots and memory.

Another kind of engine needs only an adapter (`RolloutEngine`). It must take noise by (seed, position), or moving a
sample changes its tokens. It must obey `GenerateRequest.num_answered`, or a sample's text breaks where it moved.

A sample runs in chunks (divided rollout, Seer, arXiv 2511.14617). Seer's engines share a pool of keys and values; here
an engine's cache is its own, so to go on elsewhere costs reading the prompt and all tokens again. A sample therefore
stays where it is unless it makes room for one that is more urgent (`Order.displaces`), or an idle engine would end it
clearly sooner, reading included (serving/rollout/engine_costs.py).

Memory is reserved by the chunk, not by the limit: many samples can start, and none has to be evicted in the middle of a
chunk. A sample whose next chunk does not fit waits, and is read again later. One that fits into no engine's memory runs
alone, up to where the engine ends it. So that waiting is rare, a sample starts beside others only if all of them would
fit with half of what each is expected to add. (They end at different times: half is what they have added on average.)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from serving.engine import Chunk, Engine, GenerateRequest
from serving.rollout.interactive_share import SlotsShare
from serving.rollout.order import Order
from serving.rollout.samples import Sample, SampleId


class RolloutEngine(Protocol):
    """One of the engines that samples of a rollout run on."""

    @property
    def name(self) -> str:
        """Unique among the engines of a driver."""

    @property
    def num_slots(self) -> int:
        """Samples that may run here now; it may change at any time (`Driver.dispatch`)."""

    @property
    def takes_new(self) -> bool:
        """Whether samples may begin here now, in as far as there are slots. What runs goes on in any case."""

    @property
    def memory_tokens(self) -> int:
        """Tokens that all its samples together may hold."""

    @property
    def is_alive(self) -> bool:
        """Polled a few times a second."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """As `serving.engine.Engine.generate`."""

    def drop_group_text(self, tenant: str, group_id: str) -> None:
        """As `serving.engine.Engine.drop_group_text`."""


class EnginePool(Protocol):
    """A set of engines that may change."""

    def running(self, on_change: Callable[[Iterable[RolloutEngine]], None]) -> AbstractAsyncContextManager[None]:
        """Until its end call `on_change` with all engines, at first and at every change, on the event loop."""


class InProcessEngine:
    """An engine of this process, shared with interactive requests, which go first.

    Samples hold at most `share` of its slots, and of those only what interactive requests leave: a slot that they need
    beyond the rest is given up at once, by a sample that goes on later with the tokens that it has.
    """

    def __init__(
        self, name: str, engine: Engine, share: SlotsShare, *, num_interactive: Callable[[], int] = lambda: 0
    ) -> None:
        self._name, self._engine, self._share, self._num_interactive = name, engine, share, num_interactive

    @property
    def name(self) -> str:
        return self._name

    @property
    def num_slots(self) -> int:
        num_slots = self._engine.info.num_slots
        return max(0, min(self._share.slots(num_slots), num_slots - self._num_interactive()))

    @property
    def takes_new(self) -> bool:
        return True

    @property
    def memory_tokens(self) -> int:
        """Every slot has a whole context for itself."""
        info = self._engine.info
        return max(1, int(self._share.most * info.num_slots)) * info.context_length

    @property
    def is_alive(self) -> bool:
        return self._engine.health().alive

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        return self._engine.generate(request)

    def drop_group_text(self, tenant: str, group_id: str) -> None:
        self._engine.drop_group_text(tenant, group_id)


_GROWTH = 0.5


@dataclass(kw_only=True)
class EngineCapacity:
    order: Order
    chunk_tokens: int
    running: dict[SampleId, Sample] = field(default_factory=dict)
    free_slots: int = 0
    free_tokens: int = 0
    """Neither held nor reserved, as last reported and as changed since."""
    reserved_now: int = 0
    """Memory of all its samples, each to the end of its chunk."""
    num_read: int = 0
    """Tokens that its samples have read, each counted when its next token came."""
    target_version: int = 0
    """The newest that was announced for it, or that its tokens have had."""

    def end_of_chunk(self, sample: Sample) -> int:
        """The number of tokens at which a chunk ends that begins now."""
        return min(len(sample.tokens) + self.chunk_tokens, sample.group.request.max_tokens)

    def reserved_tokens(self, sample: Sample) -> int:
        """Memory of a running sample, to the end of its chunk."""
        return sample.context + max(sample.chunk_end - len(sample.tokens), 0)

    def room(self) -> int:
        """Tokens of memory left if all that runs grows as expected."""
        reservations = [(sample, self.reserved_tokens(sample)) for sample in self.running.values()]
        return self.free_tokens - sum(
            self._expected_memory(sample, reserved) - reserved for sample, reserved in reservations
        )

    def fits(self, sample: Sample, room: int) -> bool:
        """Whether it fits now and, where others run beside it, for as long as all are expected to run."""
        need = self._need(sample)
        return need <= self.free_tokens and (not self.running or self._expected_memory(sample, need) <= room)

    def could_hold(self, sample: Sample) -> bool:
        """Whether it would fit if nothing else ran."""
        return self._need(sample) <= self.free_tokens + self.reserved_now

    def add(self, sample: Sample) -> None:
        self.free_slots -= 1
        self._reserve(self._need(sample))
        sample.chunk_end = self.end_of_chunk(sample)
        self.running[sample.sample_id] = sample

    def extend(self, sample: Sample, *, in_any_case: bool = False) -> bool:
        """Reserve for a running sample its next chunk, if there is room for it and for what it got beyond the last."""
        end = self.end_of_chunk(sample)
        more = end - sample.chunk_end
        if more > self.free_tokens and not in_any_case:
            return False
        sample.chunk_end = end
        self._reserve(more)
        return True

    def remove(self, sample: Sample) -> None:
        del self.running[sample.sample_id]
        self.free_slots += 1
        beyond = max(len(sample.tokens) - sample.chunk_end, 0)
        self._reserve(beyond - self.reserved_tokens(sample))

    def _reserve(self, tokens: int) -> None:
        self.free_tokens -= tokens
        self.reserved_now += tokens

    def _need(self, sample: Sample) -> int:
        """Memory to take a sample and run its next chunk."""
        return sample.context + self.end_of_chunk(sample) - len(sample.tokens)

    def _expected_memory(self, sample: Sample, reserved: int) -> int:
        """Memory that a sample will hold on average until it ends."""
        return max(reserved, sample.context + round(_GROWTH * self.order.remaining(sample)))
