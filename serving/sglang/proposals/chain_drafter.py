"""Suffix chains of a whole batch in one compiled call, without Python's interpreter.

It proposes what `speculator.proposals.suffix_drafter` proposes with trees of width 1, from the same windows of text and
with the same probabilities (tests/serving/sglang/proposals/test_chain_drafter.py compares them). There each token of
each request costs some microseconds of Python, which a scheduler of 64 requests has not. Numba compiles this, which
SGLang itself depends on; while it runs, other threads have the interpreter.

All windows lie in one arena of arrays, in blocks whose sizes are powers of two. A window is a ring of the newest tokens
of any number of texts. `before` and `after` link the tokens of one text; hash chains link, newest first, the places
with the same token and with the same two tokens. What they lead to is compared, since a bucket may hold others too, and
a chain ends where the window does, so nothing has to be taken out of them.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numba import njit

from speculator.proposals.suffix_drafter import (
    DOUBT,
    GROUP_WINDOW,
    MAX_MATCH,
    REQUEST_MEMORY,
    REQUEST_WINDOW,
    TENANT_WINDOW,
    SuffixConfig,
)

T = TypeVar("T")
_OWN, _GROUP, _TENANT = range(3)
_BITS = 8
"""Of match lengths, that are corrected apart."""
_PLACES, _STEPS = 16, 256
"""The newest places that are looked at, and how many a chain may have on the way to them."""
_MEMORY, _WEIGHT, _CERTAIN = 0.995, 8.0, 0.998
"""Of `speculator.proposals.estimates.Calibration`."""
_LEAST_BLOCK = 512
ARENA_TOKENS = 1 << 22
"""In all windows, of 52 bytes each once they were used. Those of running requests' own text are among them."""


def _compiled(function: Callable[..., T]) -> Callable[..., T]:
    """Kept in the cache for the next start, where there is a folder for it."""
    try:
        made: Callable[..., T] = njit(nogil=True, cache=True)(function)
    except RuntimeError:
        made = njit(nogil=True)(function)
    return made


class _Arena(NamedTuple):
    """Of each token the token itself, its neighbours in its text, and the next older place in its two chains; then the
    newest place of each bucket. Places are counted from a window's first token.
    """

    token: np.ndarray
    before: np.ndarray
    after: np.ndarray
    older_one: np.ndarray
    older_pair: np.ndarray
    newest_one: np.ndarray
    newest_pair: np.ndarray

    @classmethod
    def of(cls, num_tokens: int) -> _Arena:
        # Memory that nobody has written to is not there.
        links = [np.empty(num_tokens, np.int64) for _ in range(6)]
        return cls(np.empty(num_tokens, np.int32), *links)


class _Requests(NamedTuple):
    """By slot. W proposals at most; S sources: own text, group, tenant."""

    windows: np.ndarray
    """[n, S] −1 where there is none."""
    texts: np.ndarray
    """[n, S] the place of its last token in each."""
    tenant: np.ndarray
    """[n]"""
    context: np.ndarray
    """[n, MAX_MATCH] the last tokens, the newest at the end."""
    num_context: np.ndarray
    sums: np.ndarray
    """[n, 2] predicted and accepted, of what is predicted for the tenant's requests together."""
    tokens: np.ndarray
    """[n, W + 1] its newest chain, and what was guessed behind it; `predicted`, `usual` and `kinds` of each."""
    predicted: np.ndarray
    usual: np.ndarray
    kinds: np.ndarray
    num_chosen: np.ndarray
    num_guessed: np.ndarray

    @classmethod
    def of(cls, count: int, width: int) -> _Requests:
        chain = (count, width + 1)
        return cls(
            windows=np.full((count, 3), -1, np.int64),
            texts=np.full((count, 3), -1, np.int64),
            tenant=np.zeros(count, np.int64),
            context=np.zeros((count, MAX_MATCH), np.int32),
            num_context=np.zeros(count, np.int64),
            sums=np.full((count, 2), _WEIGHT),
            tokens=np.zeros(chain, np.int32),
            predicted=np.zeros(chain),
            usual=np.zeros(chain),
            kinds=np.zeros(chain, np.int64),
            num_chosen=np.zeros(count, np.int64),
            num_guessed=np.zeros(count, np.int64),
        )


@_compiled
def _bucket(first: int, second: int, mask: int) -> int:
    mixed = (first * 0x9E3779B1 + second * 0x85EBCA77) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 15)) & mask


@_compiled
def _append(arena: _Arena, windows: np.ndarray, window: int, text: int, tokens: np.ndarray) -> int:
    """Add tokens to the text with this last place, −1 for a new one; returns its last place."""
    base, capacity, end = windows[window, 0], windows[window, 1], windows[window, 2]
    mask = capacity - 1
    for index in range(len(tokens)):
        token = tokens[index]
        at = base + (end & mask)
        arena.token[at] = token
        arena.before[at] = arena.after[at] = arena.older_pair[at] = -1
        bucket = base + _bucket(token, 0, mask)
        arena.older_one[at] = arena.newest_one[bucket]
        arena.newest_one[bucket] = end
        if text >= 0 and text > end - capacity:
            last = base + (text & mask)
            arena.before[at] = text
            arena.after[last] = end
            bucket = base + _bucket(arena.token[last], token, mask)
            arena.older_pair[at] = arena.newest_pair[bucket]
            arena.newest_pair[bucket] = end
        text = end
        end += 1
    windows[window, 2] = end
    return text


@_compiled
def _match(
    arena: _Arena, windows: np.ndarray, window: int, context: np.ndarray, num_context: int, places: np.ndarray
) -> tuple[int, int]:
    """The longest end of the context that occurs with something after it: its length, and at how many `places`."""
    base, capacity, end = windows[window, 0], windows[window, 1], windows[window, 2]
    mask, oldest, newest = capacity - 1, max(end - capacity, 0), len(context) - 1
    count = 0
    if num_context > 1:
        place = arena.newest_pair[base + _bucket(context[newest - 1], context[newest], mask)]
        for _ in range(_STEPS):
            if place < oldest or count == _PLACES:
                break
            at = base + (place & mask)
            before = arena.before[at]
            if (
                arena.token[at] == context[newest]
                and before >= oldest
                and arena.token[base + (before & mask)] == context[newest - 1]
                and arena.after[at] >= 0
            ):
                places[count] = place
                count += 1
            place = arena.older_pair[at]
        if count:
            return _extended(arena, base, mask, oldest, context, num_context, places, count)
    if num_context > 0:
        place = arena.newest_one[base + _bucket(context[newest], 0, mask)]
        for _ in range(_STEPS):
            if place < oldest or count == _PLACES:
                break
            at = base + (place & mask)
            if arena.token[at] == context[newest] and arena.after[at] >= 0:
                places[count] = place
                count += 1
            place = arena.older_one[at]
    return (1 if count else 0), count


@_compiled
def _extended(
    arena: _Arena,
    base: int,
    mask: int,
    oldest: int,
    context: np.ndarray,
    num_context: int,
    places: np.ndarray,
    count: int,
) -> tuple[int, int]:
    """Keep the places that agree with the context furthest back, from a match of two tokens on."""
    firsts = np.empty(_PLACES, np.int64)
    earlier = np.empty(_PLACES, np.int64)
    for index in range(count):
        firsts[index] = arena.before[base + (places[index] & mask)]
    length = 2
    while length < num_context:
        wanted = context[len(context) - 1 - length]
        kept = 0
        for index in range(count):
            before = arena.before[base + (firsts[index] & mask)]
            agrees = before >= oldest and arena.token[base + (before & mask)] == wanted
            earlier[index] = before if agrees else -1
            kept += agrees
        if not kept:
            break
        kept = 0
        for index in range(count):
            if earlier[index] >= 0:
                places[kept], firsts[kept] = places[index], earlier[index]
                kept += 1
        count = kept
        length += 1
    return length, count


@_compiled
def _vote(arena: _Arena, base: int, mask: int, places: np.ndarray, count: int) -> tuple[int, int, int]:
    """What comes next after these places: the most frequent token, how many say so, which `places` become, of how many.

    Of equally frequent ones that which was seen last.
    """
    heard = np.empty(_PLACES, np.int64)
    following = np.empty(_PLACES, np.int64)
    total = 0
    for index in range(count):
        after = arena.after[base + (places[index] & mask)]
        if after >= 0:
            following[total] = after
            heard[total] = arena.token[base + (after & mask)]
            total += 1
    best, best_count = 0, 0
    for index in range(total):
        votes = 0
        for other in range(total):
            votes += heard[other] == heard[index]
        if votes > best_count:
            best, best_count = heard[index], votes
    kept = 0
    for index in range(total):
        if heard[index] == best:
            places[kept] = following[index]
            kept += 1
    return best, kept, total


@_compiled
def _bits(length: int) -> int:
    bits = 0
    while length:
        length >>= 1
        bits += 1
    return bits


@_compiled
def _learn(requests: _Requests, tenants: np.ndarray, slot: int, committed: np.ndarray) -> None:
    """The text went on like this: what was guessed behind each node that it has passed was right or not."""
    tenant = requests.tenant[slot]
    for node in range(min(len(committed), requests.num_guessed[slot])):
        accepted = requests.tokens[slot, node] == committed[node]
        kind = requests.kinds[slot, node]
        own, common = requests.sums[slot], tenants[tenant, kind]
        own[0] = REQUEST_MEMORY * own[0] + requests.usual[slot, node]
        own[1] = REQUEST_MEMORY * own[1] + accepted
        common[0] = _MEMORY * common[0] + requests.predicted[slot, node]
        common[1] = _MEMORY * common[1] + accepted
        if not accepted or node >= requests.num_chosen[slot]:
            break
    requests.num_chosen[slot] = requests.num_guessed[slot] = 0


@_compiled
def _grow(
    arena: _Arena,
    windows: np.ndarray,
    requests: _Requests,
    tenants: np.ndarray,
    slot: int,
    limit: int,
    alpha: float,
    min_reach: float,
    probabilities: np.ndarray,
) -> None:
    """The chain behind a request's context: the likeliest of its sources, as far as it is likely enough."""
    tenant, sums = requests.tenant[slot], requests.sums[slot]
    places, best_places = np.empty(_PLACES, np.int64), np.empty(_PLACES, np.int64)
    best, best_count, best_window, length, deepest, source = 0.0, 0, -1, 0, 0, 0
    token, predicted, usual = 0, 0.0, 0.0
    for each in range(3):
        window = requests.windows[slot, each]
        if window < 0:
            continue
        matched, count = _match(arena, windows, window, requests.context[slot], requests.num_context[slot], places)
        base, mask = windows[window, 0], windows[window, 1] - 1
        reach = int(alpha * matched)
        if reach == 0:
            continue
        next_token, count, total = _vote(arena, base, mask, places, count)
        if total == 0:
            continue
        guess = count / (total + DOUBT / matched)
        common = tenants[tenant, each * _BITS + _bits(matched)]
        tenants_guess = min(guess * common[1] / common[0], _CERTAIN)
        probability = min(tenants_guess * sums[1] / sums[0], _CERTAIN)
        if probability > best:
            best, best_window, length, deepest, source = probability, window, matched, reach, each
            token, predicted, usual = next_token, guess, tenants_guess
            best_count = count
            for index in range(count):
                best_places[index] = places[index]
    if best_window < 0:
        return
    base, mask = windows[best_window, 0], windows[best_window, 1] - 1
    probability, reached, node = best, 1.0, 0
    while True:
        requests.tokens[slot, node], requests.predicted[slot, node] = token, predicted
        requests.usual[slot, node] = usual
        requests.kinds[slot, node] = source * _BITS + _bits(length)
        requests.num_guessed[slot] = node + 1
        reached *= probability
        if reached < min_reach:
            return
        probabilities[node] = probability
        node += 1
        requests.num_chosen[slot] = node
        if node >= deepest or node >= limit:
            return
        length += 1
        token, best_count, total = _vote(arena, base, mask, best_places, best_count)
        if total == 0:
            return
        predicted = best_count / (total + DOUBT / length)
        common = tenants[tenant, source * _BITS + _bits(length)]
        usual = min(predicted * common[1] / common[0], _CERTAIN)
        probability = min(usual * sums[1] / sums[0], _CERTAIN)


@_compiled
def _advance(
    arena: _Arena,
    windows: np.ndarray,
    requests: _Requests,
    tenants: np.ndarray,
    slots: np.ndarray,
    starts: np.ndarray,
    tokens: np.ndarray,
    limits: np.ndarray,
    alpha: float,
    min_reach: float,
    found: np.ndarray,
    probabilities: np.ndarray,
    counts: np.ndarray,
) -> None:
    for row in range(len(slots)):
        slot, came = slots[row], tokens[starts[row] : starts[row + 1]]
        if slot < 0:
            continue
        if len(came):
            _learn(requests, tenants, slot, came)
            for each in range(3):
                window = requests.windows[slot, each]
                if window >= 0:
                    requests.texts[slot, each] = _append(arena, windows, window, requests.texts[slot, each], came)
            for token in came:
                requests.context[slot, :-1] = requests.context[slot, 1:]
                requests.context[slot, -1] = token
            requests.num_context[slot] = min(requests.num_context[slot] + len(came), MAX_MATCH)
        requests.num_chosen[slot] = requests.num_guessed[slot] = 0
        if limits[row] > 0:
            _grow(arena, windows, requests, tenants, slot, limits[row], alpha, min_reach, probabilities[row])
        counts[row] = requests.num_chosen[slot]
        found[row, : counts[row]] = requests.tokens[slot, : counts[row]]


class _Blocks:
    """Gives out parts of an arena, of sizes that are powers of two (a buddy allocator)."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: dict[int, set[int]] = {size: {0}}

    def take(self, size: int) -> int | None:
        """Where it begins; None where there is no room."""
        larger = min((each for each, places in self._free.items() if each >= size and places), default=None)
        if larger is None:
            return None
        place = self._free[larger].pop()
        while larger > size:
            larger //= 2
            self._free.setdefault(larger, set()).add(place + larger)
        return place

    def give_back(self, place: int, size: int) -> None:
        while size < self._size and (place ^ size) in self._free.get(size, ()):
            self._free[size].remove(place ^ size)
            place, size = min(place, place ^ size), 2 * size
        self._free.setdefault(size, set()).add(place)


class _Window:
    """Stays as long as somebody uses it."""

    def __init__(self, number: int, place: int, size: int) -> None:
        self.number, self.place, self.size = number, place, size
        self.num_users = 1


class _Tenant:
    def __init__(self, number: int, answers: _Window | None) -> None:
        self.number, self.answers = number, answers
        self.groups: OrderedDict[str, _Window] = OrderedDict()
        self.born_s = time.monotonic()
        self.target_age = 0
        """Changes of the target since the first text."""
        self.num_users = 1


class ChainDrafter:
    """The recent text of every tenant that a scheduler serves; used by one thread."""

    def __init__(self, *, width: int, arena_tokens: int = ARENA_TOKENS, config: SuffixConfig | None = None) -> None:
        """Chains have at most `width` proposals. `arena_tokens` is a power of two."""
        self._config, self._width = config or SuffixConfig(width=1), width
        self._arena, self._blocks = _Arena.of(arena_tokens), _Blocks(arena_tokens)
        self._windows = np.zeros((64, 3), np.int64)
        self._free_windows: list[int] = list(range(64))
        self._requests = _Requests.of(64, width)
        self._free_slots: list[int] = list(range(64))
        self._of_slot: dict[int, tuple[_Tenant, list[_Window]]] = {}
        self._tenant_sums = np.full((16, 3 * _BITS, 2), _WEIGHT)
        self._free_tenants: list[int] = list(range(16))
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self.num_evicted = 0
        """Windows of tenants and groups that made room, and requests' own for which there was none."""
        # Compiled now, or taken from the cache: the first request would wait for it.
        slot = self.start([0, 0], max_answer=1, tenant="", shared=False)
        self.advance([slot], np.zeros(1, np.int64), [0, 1], [1])
        self.end(slot)

    def start(
        self, prompt: Sequence[int], *, max_answer: int, tenant: str, group_id: str = "", shared: bool = True
    ) -> int:
        """A request whose answer, of at most so many tokens, is to follow `prompt`; returns its slot, for `end`.

        With `shared` false it proposes from its own text alone and leaves nothing behind.
        """
        home = self._home(tenant) if shared else self._new_tenant(None)
        home.num_users += shared
        # Held before room is made for others, which may take that of what nobody uses.
        answers = _held(home.answers)
        group = _held(self._group(home, group_id)) if shared and group_id else None
        tokens = np.array(prompt[-REQUEST_WINDOW:], np.int64)
        windows = [self._window(min(len(tokens) + max_answer, REQUEST_WINDOW)), group, answers]
        slot, requests = self._slot(), self._requests
        context = tokens[-MAX_MATCH:]
        requests.tenant[slot], requests.num_context[slot], requests.sums[slot] = home.number, len(context), _WEIGHT
        requests.num_chosen[slot] = requests.num_guessed[slot] = 0
        requests.context[slot] = 0
        requests.context[slot, MAX_MATCH - len(context) :] = context
        for source, window in enumerate(windows):
            requests.windows[slot, source] = -1 if window is None else window.number
            if window is not None:
                # Shared texts begin with the prompt's last tokens: so the beginnings of answers are found too.
                before = tokens if source == _OWN else context
                requests.texts[slot, source] = _append(self._arena, self._windows, window.number, -1, before)
        self._of_slot[slot] = home, [window for window in windows if window is not None]
        return slot

    def end(self, slot: int) -> None:
        """The request is over; what it has written to its group and its tenant stays."""
        home, windows = self._of_slot.pop(slot)
        for window in windows:
            self._release(window)
        self._leave(home)
        self._free_slots.append(slot)

    def advance(
        self, slots: Sequence[int], committed: np.ndarray, starts: Sequence[int], limits: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The answers in these slots, −1 for none, go on with what was committed, and perhaps as the result says.

        `committed` are int64, one answer after the other, of which answer i has those from `starts[i]` to
        `starts[i + 1]`. The result is up to `limits` tokens [B, W] of each, the probability [B, W] that each is
        accepted, once reached, and how many there are [B].
        """
        batch = len(slots)
        found = np.zeros((batch, self._width), np.int32)
        probabilities, counts = np.zeros((batch, self._width)), np.zeros(batch, np.int64)
        _advance(
            self._arena,
            self._windows,
            self._requests,
            self._tenant_sums,
            np.array(slots, np.int64),
            np.array(starts, np.int64),
            committed,
            np.minimum(np.array(limits, np.int64), self._width),
            self._config.alpha,
            self._config.min_reach,
            found,
            probabilities,
            counts,
        )
        return found, probabilities, counts

    @property
    def num_tokens(self) -> int:
        """In all windows."""
        used = self._windows[self._windows[:, 1] > 0]
        return int(np.minimum(used[:, 2], used[:, 1]).sum())

    def forget(self, tenants: Collection[str]) -> None:
        """Drop all text of these tenants; what runs keeps what it reads until it ends."""
        for name in tenants:
            if (home := self._tenants.pop(name, None)) is not None:
                self._drop(home)

    def expire(self, ttl_s: float) -> None:
        """Drop a tenant's windows, whole, when the first text in them may be so old."""
        self.forget([name for name, home in self._tenants.items() if time.monotonic() - home.born_s > ttl_s])

    def target_moved(self) -> None:
        """Drop a tenant's windows, whole, when the first text in them is of a target that is too far away."""
        for home in self._tenants.values():
            home.target_age += 1
        self.forget([name for name, home in self._tenants.items() if home.target_age > self._config.max_target_age])

    # -- windows and slots

    def _home(self, name: str) -> _Tenant:
        if name not in self._tenants:
            self._tenants[name] = self._new_tenant(self._window(TENANT_WINDOW))
        self._tenants.move_to_end(name)
        while len(self._tenants) > self._config.max_tenants:
            self._drop(self._tenants.popitem(last=False)[1])
        return self._tenants[name]

    def _new_tenant(self, answers: _Window | None) -> _Tenant:
        if not self._free_tenants:
            self._tenant_sums, new = _doubled(self._tenant_sums, _WEIGHT)
            self._free_tenants += new
        number = self._free_tenants.pop()
        self._tenant_sums[number] = _WEIGHT
        return _Tenant(number, answers)

    def _group(self, home: _Tenant, name: str) -> _Window | None:
        if name not in home.groups:
            window = self._window(GROUP_WINDOW)
            if window is None:
                return None
            home.groups[name] = window
        home.groups.move_to_end(name)
        while len(home.groups) > self._config.max_groups:
            self._release(home.groups.popitem(last=False)[1])
        return home.groups[name]

    def _window(self, num_tokens: int) -> _Window | None:
        """Room for the newest so many tokens; of older text, where there is no other."""
        size = max(1 << max(num_tokens - 1, 0).bit_length(), _LEAST_BLOCK)
        place = self._blocks.take(size)
        while place is None:
            self.num_evicted += 1
            if not self._evict():
                return None
            place = self._blocks.take(size)
        if not self._free_windows:
            self._windows, new = _doubled(self._windows, 0)
            self._free_windows += new
        number = self._free_windows.pop()
        self._windows[number] = place, size, 0
        self._arena.newest_one[place : place + size] = -1
        self._arena.newest_pair[place : place + size] = -1
        return _Window(number, place, size)

    def _evict(self) -> bool:
        """Drop the group, or else the tenant, that was asked for least recently."""
        for home in self._tenants.values():
            if home.groups:
                self._release(home.groups.popitem(last=False)[1])
                return True
        if self._tenants:
            self._drop(self._tenants.popitem(last=False)[1])
            return True
        return False

    def _drop(self, home: _Tenant) -> None:
        while home.groups:
            self._release(home.groups.popitem()[1])
        if home.answers is not None:
            self._release(home.answers)
        self._leave(home)

    def _leave(self, home: _Tenant) -> None:
        home.num_users -= 1
        if not home.num_users:
            self._free_tenants.append(home.number)

    def _release(self, window: _Window) -> None:
        window.num_users -= 1
        if not window.num_users:
            self._windows[window.number] = 0
            self._free_windows.append(window.number)
            self._blocks.give_back(window.place, window.size)

    def _slot(self) -> int:
        if not self._free_slots:
            count = len(self._requests.tenant)
            grown = _Requests.of(2 * count, self._width)
            for new, old in zip(grown, self._requests, strict=True):
                new[:count] = old
            self._requests = grown
            self._free_slots += range(count, 2 * count)
        return self._free_slots.pop()


def _held(window: _Window | None) -> _Window | None:
    if window is not None:
        window.num_users += 1
    return window


def _doubled(table: np.ndarray, fill: Any) -> tuple[np.ndarray, range]:
    """With twice as many rows, and which are new."""
    grown = np.full((2 * len(table), *table.shape[1:]), fill, table.dtype)
    grown[: len(table)] = table
    return grown, range(len(table), len(grown))
