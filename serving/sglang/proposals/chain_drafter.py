"""Suffix chains of a whole batch in one compiled call, and the windows of text that they come from.

It proposes what `speculator.proposals.suffix_drafter` proposes with trees of width 1 and calibration alone, from the
same windows and with the same probabilities (tests/serving/sglang/proposals/test_chain_drafter.py compares them). It
leaves out the learned model of trees, which has little to decide for chains (benchmarks/results/suffix_acceptance.md).
The suffix drafter takes microseconds of Python for each token, too much for a scheduler of 64 requests. The compiled
part is serving/sglang/proposals/compiled_chains.py; Numba is a dependency of SGLang's own.

All windows lie in one arena, in blocks whose sizes are powers of two. When it is full, the least recently used text is
evicted.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from serving.sglang.proposals.compiled_chains import BITS, GROUP, OWN, WEIGHT, Arena, Requests, advance, append
from speculator.proposals.suffix_drafter import (
    GROUP_WINDOW,
    MAX_MATCH,
    REQUEST_WINDOW,
    TENANT_WINDOW,
    SuffixConfig,
)
from speculator.proposals.suffix_index import NEW_TEXT

_LEAST_BLOCK = 512
ARENA_TOKENS = 1 << 22
"""Tokens in all windows, requests' own text included; each takes 52 bytes once it was used."""
_ANSWER_ROOM = 4096
"""Most tokens for which a request's own window has room beside its prompt: few answers come near to their limit, and
a longer one only forgets its oldest text.
"""


class _Blocks:
    """Gives out parts of an arena, of sizes that are powers of two (a buddy allocator)."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: dict[int, set[int]] = {size: {0}}

    def allocate(self, size: int) -> int | None:
        """Take a block; returns where it begins, None where there is no room."""
        larger = min((each for each, places in self._free.items() if each >= size and places), default=None)
        if larger is None:
            return None
        place = self._free[larger].pop()
        while larger > size:
            larger //= 2
            self._free.setdefault(larger, set()).add(place + larger)
        return place

    def free(self, place: int, size: int) -> None:
        while size < self._size and (place ^ size) in self._free.get(size, ()):
            self._free[size].remove(place ^ size)
            place, size = min(place, place ^ size), 2 * size
        self._free.setdefault(size, set()).add(place)


class _Window:
    """A window of text; its block is freed when nobody uses it."""

    def __init__(self, arena: Arena, windows: np.ndarray, number: int, place: int, size: int) -> None:
        """`number` is its row in `windows`; `place` and `size` are its block in the arena."""
        self._arena, self._windows = arena, windows
        self.number, self.place, self.size = number, place, size
        self.num_users = 1

    def append(self, text: int, tokens: Sequence[int] | np.ndarray, /) -> int:
        """As `SuffixIndex.append`."""
        if not self.num_users:
            return text  # its place in the arena may be another tenant's by now
        return append(self._arena, self._windows, self.number, text, np.asarray(tokens, np.int64))


class _Tenant:
    def __init__(self, number: int, answers: _Window | None) -> None:
        self.number, self.answers = number, answers
        self.groups: OrderedDict[str, _Window] = OrderedDict()
        self.created_s = time.monotonic()
        self.target_age = 0
        """Changes of the target since the first text."""
        self.num_users = 1


class ChainDrafter:
    """The recent text of every tenant that a scheduler serves; used by one thread at a time."""

    def __init__(self, *, width: int, arena_tokens: int = ARENA_TOKENS) -> None:
        """Chains have at most `width` proposals. `arena_tokens` is a power of two."""
        self._config, self._width = SuffixConfig(width=1, learns=False), width
        self._arena, self._blocks = Arena.of(arena_tokens), _Blocks(arena_tokens)
        self._windows = np.zeros((arena_tokens // _LEAST_BLOCK, 3), np.int64)
        self._free_windows: list[int] = list(range(len(self._windows)))
        self._requests = Requests.of(64, width)
        self._free_slots: list[int] = list(range(64))
        self._of_slot: dict[int, tuple[_Tenant, list[_Window | None]]] = {}
        self._tenant_sums = np.full((16, 3 * BITS, 2), WEIGHT)
        self._free_tenants: list[int] = list(range(16))
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self.num_evicted = 0
        """Evicted windows of tenants and groups, and requests' own that found no room."""
        # Compile now, so that the first request does not wait for it.
        slot = self.start([0, 0], max_answer=1, tenant="", shared=False)
        self.advance([slot], np.zeros(1, np.int64), [0, 1], [1])
        self.end(slot)

    def start(
        self, prompt: Sequence[int], *, max_answer: int, tenant: str, group_id: str = "", shared: bool = True
    ) -> int:
        """A request whose answer, of at most so many tokens, is to follow `prompt`; returns its slot, for `end`.

        With `shared` false it proposes from its own text alone and leaves nothing behind.
        """
        owner = self._tenant_of(tenant) if shared else self._new_tenant(None)
        owner.num_users += shared
        # Held before room is made for others, since eviction frees what nobody uses.
        answers = _retained(owner.answers)
        group = _retained(self._group(owner, group_id)) if shared and group_id else None
        tokens = np.array(prompt[-REQUEST_WINDOW:], np.int64)
        num_own = min(len(tokens) + min(max_answer, _ANSWER_ROOM), REQUEST_WINDOW)
        windows = [self._window(num_own), group, answers]
        slot, requests = self._slot(), self._requests
        context = tokens[-MAX_MATCH:]
        requests.tenant[slot], requests.num_context[slot], requests.sums[slot] = owner.number, len(context), WEIGHT
        requests.num_chosen[slot] = requests.num_guessed[slot] = 0
        requests.context[slot] = 0
        requests.context[slot, MAX_MATCH - len(context) :] = context
        for source, window in enumerate(windows):
            requests.windows[slot, source] = -1 if window is None else window.number
            if window is not None:
                # Shared texts begin with the prompt's last tokens: so the beginnings of answers are found too.
                before = tokens if source == OWN else context
                requests.texts[slot, source] = window.append(NEW_TEXT, before)
        self._of_slot[slot] = owner, windows
        return slot

    def group_of(self, slot: int) -> _Window | None:
        """The window of this request's prompt group; None where it has none."""
        return self._of_slot[slot][1][GROUP]

    def end(self, slot: int) -> None:
        """End a request; its text in the windows of its group and its tenant stays."""
        owner, windows = self._of_slot.pop(slot)
        for window in windows:
            if window is not None:
                self._release(window)
        self._drop_user(owner)
        self._free_slots.append(slot)

    def advance(
        self, slots: Sequence[int], committed: np.ndarray, starts: Sequence[int], limits: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Append what was committed to the answers in these slots, −1 for none, and return their next chains.

        `committed` are int64, one answer after the other, of which answer i has those from `starts[i]` to
        `starts[i + 1]`. Returns up to `limits` tokens [B, W] of each, the probability [B, W] that each is accepted,
        once reached, how many there are [B], and whose text they are from [B], as a `TextSource`.
        """
        batch, slots_B = len(slots), np.array(slots, np.int64)
        found = np.zeros((batch, self._width), np.int32)
        probabilities, counts = np.zeros((batch, self._width)), np.zeros(batch, np.int64)
        advance(
            self._arena,
            self._windows,
            self._requests,
            self._tenant_sums,
            slots_B,
            np.array(starts, np.int64),
            committed,
            np.minimum(np.array(limits, np.int64), self._width),
            self._config.alpha,
            self._config.min_reach,
            found,
            probabilities,
            counts,
        )
        return found, probabilities, counts, self._requests.kinds[slots_B, 0] // BITS

    @property
    def num_tokens(self) -> int:
        """Tokens in all windows."""
        used = self._windows[self._windows[:, 1] > 0]
        return int(np.minimum(used[:, 2], used[:, 1]).sum())

    def forget(self, tenants: Collection[str]) -> None:
        """Drop all text of these tenants; running requests use theirs until they end."""
        for name in tenants:
            if (owner := self._tenants.pop(name, None)) is not None:
                self._drop(owner)

    def drop(self, tenant: str, group_id: str) -> None:
        """Drop the text of a group that has ended; running requests use it until they end."""
        owner = self._tenants.get(tenant)
        if owner is not None and (window := owner.groups.pop(group_id, None)) is not None:
            self._release(window)

    def expire(self, ttl_s: float) -> None:
        """Drop all windows of a tenant whose first text may be older than `ttl_s`."""
        self.forget([name for name, owner in self._tenants.items() if time.monotonic() - owner.created_s > ttl_s])

    def target_updated(self) -> None:
        """Count a new target, and drop all windows of a tenant whose first text is too many targets old."""
        for owner in self._tenants.values():
            owner.target_age += 1
        self.forget([name for name, owner in self._tenants.items() if owner.target_age > self._config.max_target_age])

    # -- windows and slots

    def _tenant_of(self, name: str) -> _Tenant:
        if (owner := self._tenants.get(name)) is None:
            self._tenants[name] = self._new_tenant(self._window(TENANT_WINDOW))
        elif owner.answers is None:
            # There was no room when it came. It takes what is free: an eviction might drop this tenant itself.
            owner.answers = self._window(TENANT_WINDOW, evicts=False)
        self._tenants.move_to_end(name)
        while len(self._tenants) > self._config.max_tenants:
            self._drop(self._tenants.popitem(last=False)[1])
        return self._tenants[name]

    def _new_tenant(self, answers: _Window | None) -> _Tenant:
        if not self._free_tenants:
            self._tenant_sums, new = _doubled(self._tenant_sums, WEIGHT)
            self._free_tenants += new
        number = self._free_tenants.pop()
        self._tenant_sums[number] = WEIGHT
        return _Tenant(number, answers)

    def _group(self, owner: _Tenant, name: str) -> _Window | None:
        if name not in owner.groups:
            window = self._window(GROUP_WINDOW)
            if window is None:
                return None
            owner.groups[name] = window
        owner.groups.move_to_end(name)
        while len(owner.groups) > self._config.max_groups:
            self._release(owner.groups.popitem(last=False)[1])
        return owner.groups[name]

    def _window(self, num_tokens: int, *, evicts: bool = True) -> _Window | None:
        """A window for `num_tokens`, made by eviction where the arena is full; None where that does not help, or
        where `evicts` is false.
        """
        size = max(1 << max(num_tokens - 1, 0).bit_length(), _LEAST_BLOCK)
        place = self._blocks.allocate(size)
        while place is None:
            if not evicts:
                return None
            self.num_evicted += 1
            if not self._evict():
                return None
            place = self._blocks.allocate(size)
        number = self._free_windows.pop()
        self._windows[number] = place, size, 0
        self._arena.newest_one[place : place + size] = -1
        self._arena.newest_pair[place : place + size] = -1
        return _Window(self._arena, self._windows, number, place, size)

    def _evict(self) -> bool:
        """Drop the least recently used group, or else tenant; False where there is none."""
        for owner in self._tenants.values():
            if owner.groups:
                self._release(owner.groups.popitem(last=False)[1])
                return True
        if self._tenants:
            self._drop(self._tenants.popitem(last=False)[1])
            return True
        return False

    def _drop(self, owner: _Tenant) -> None:
        while owner.groups:
            self._release(owner.groups.popitem()[1])
        if owner.answers is not None:
            self._release(owner.answers)
        self._drop_user(owner)

    def _drop_user(self, owner: _Tenant) -> None:
        owner.num_users -= 1
        if not owner.num_users:
            self._free_tenants.append(owner.number)

    def _release(self, window: _Window) -> None:
        window.num_users -= 1
        if not window.num_users:
            self._windows[window.number] = 0
            self._free_windows.append(window.number)
            self._blocks.free(window.place, window.size)

    def _slot(self) -> int:
        if not self._free_slots:
            count = len(self._requests.tenant)
            grown = Requests.of(2 * count, self._width)
            for new, old in zip(grown, self._requests, strict=True):
                new[:count] = old
            self._requests = grown
            self._free_slots += range(count, 2 * count)
        return self._free_slots.pop()


def _retained(window: _Window | None) -> _Window | None:
    if window is not None:
        window.num_users += 1
    return window


def _doubled(table: np.ndarray, fill: Any) -> tuple[np.ndarray, range]:
    """The table with twice as many rows, and the numbers of the new ones."""
    grown = np.full((2 * len(table), *table.shape[1:]), fill, table.dtype)
    grown[: len(table)] = table
    return grown, range(len(table), len(grown))
