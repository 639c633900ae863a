"""Suffix drafting compiled by Numba: rings of earlier text, places that match a request's last tokens, and the chains
that follow them.

All windows lie in one arena of arrays. A window is a ring of the newest tokens of any number of texts. `before` and
`after` link the tokens of one text; hash chains link, newest first, the places with the same token and with the same
two tokens. A bucket may hold other tokens too, so each place is compared. A hash chain ends where it leaves the window,
so nothing has to be removed from it. The compiled functions release the GIL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
from numba import njit

from speculator.proposals.suffix_drafter import DOUBT, MAX_MATCH, REQUEST_MEMORY

T = TypeVar("T")
OWN, GROUP = 0, 1
"""A request's sources: its own text, its group's; then comes its tenant's."""
BITS = 8
"""Classes of match lengths, each of which is calibrated separately."""
_PLACES, _STEPS = 16, 256
"""The most places that are used, newest first, and the most links of a chain that are followed to find them."""
_MEMORY, WEIGHT, _CERTAIN = 0.995, 8.0, 0.998
"""As in `speculator.proposals.estimates.Calibration`."""


def _compiled(function: Callable[..., T]) -> Callable[..., T]:
    """Compile a function, cached for the next start where there is a folder for it."""
    try:
        made: Callable[..., T] = njit(nogil=True, cache=True)(function)
    except RuntimeError:
        made = njit(nogil=True)(function)
    return made


class Arena(NamedTuple):
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
    def of(cls, num_tokens: int) -> Arena:
        # Pages that nobody has written to take no memory.
        links = [np.empty(num_tokens, np.int64) for _ in range(6)]
        return cls(np.empty(num_tokens, np.int32), *links)


class Requests(NamedTuple):
    """The state of requests, by slot. W proposals at most; S sources: own text, group, tenant."""

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
    """[n, 2] sums of what is predicted as usual for the tenant, and of what was accepted."""
    tokens: np.ndarray
    """[n, W + 1] its newest chain, and the guess after it; of each the probability from counts (`predicted`), the same
    as calibrated for the tenant (`usual`), and its class of calibration (`kinds`).
    """
    predicted: np.ndarray
    usual: np.ndarray
    kinds: np.ndarray
    num_chosen: np.ndarray
    num_guessed: np.ndarray

    @classmethod
    def of(cls, count: int, width: int) -> Requests:
        chain = (count, width + 1)
        return cls(
            windows=np.full((count, 3), -1, np.int64),
            texts=np.full((count, 3), -1, np.int64),
            tenant=np.zeros(count, np.int64),
            context=np.zeros((count, MAX_MATCH), np.int32),
            num_context=np.zeros(count, np.int64),
            sums=np.full((count, 2), WEIGHT),
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
def append(arena: Arena, windows: np.ndarray, window: int, text: int, tokens: np.ndarray) -> int:
    """Append tokens to the text whose last place is `text`, −1 for a new one; returns its new last place."""
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
    arena: Arena, windows: np.ndarray, window: int, context: np.ndarray, num_context: int, places: np.ndarray
) -> tuple[int, int]:
    """Find the longest suffix of the context that occurs with something after it; returns its length and the number of
    `places`.
    """
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
    arena: Arena,
    base: int,
    mask: int,
    oldest: int,
    context: np.ndarray,
    num_context: int,
    places: np.ndarray,
    count: int,
) -> tuple[int, int]:
    """Keep the places with the longest match, of two tokens or more; returns its length and their number."""
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
def _vote(arena: Arena, base: int, mask: int, places: np.ndarray, count: int) -> tuple[int, int, int]:
    """The most frequent token after these places, of equals the newest; its count; and how many places have a next
    token.

    Moves `places` to the next token where it is this one.
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
def _learn(requests: Requests, tenants: np.ndarray, slot: int, committed: np.ndarray) -> None:
    """Update the calibration by committed tokens: each guess that they reached was right or wrong."""
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
    arena: Arena,
    windows: np.ndarray,
    requests: Requests,
    tenants: np.ndarray,
    slot: int,
    limit: int,
    alpha: float,
    min_reach: float,
    probabilities: np.ndarray,
) -> None:
    """Extend a request's text by a chain from its likeliest source, while that is likelier than `min_reach`."""
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
        common = tenants[tenant, each * BITS + _bits(matched)]
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
        requests.kinds[slot, node] = source * BITS + _bits(length)
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
        common = tenants[tenant, source * BITS + _bits(length)]
        usual = min(predicted * common[1] / common[0], _CERTAIN)
        probability = min(usual * sums[1] / sums[0], _CERTAIN)


@_compiled
def advance(
    arena: Arena,
    windows: np.ndarray,
    requests: Requests,
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
                    requests.texts[slot, each] = append(arena, windows, window, requests.texts[slot, each], came)
            for token in came:
                requests.context[slot, :-1] = requests.context[slot, 1:]
                requests.context[slot, -1] = token
            requests.num_context[slot] = min(requests.num_context[slot] + len(came), MAX_MATCH)
        requests.num_chosen[slot] = requests.num_guessed[slot] = 0
        if limits[row] > 0:
            _grow(arena, windows, requests, tenants, slot, limits[row], alpha, min_reach, probabilities[row])
        counts[row] = requests.num_chosen[slot]
        found[row, : counts[row]] = requests.tokens[slot, : counts[row]]
