"""Index of the newest tokens of growing texts: finds where the end of a context occurred before, and what followed.

The tokens of all texts share one ring buffer, in the order in which they are appended: the window is exactly the newest
`capacity` tokens of all texts. `before` and `after` link the tokens of one text. Chains link, newest first, the places
that end with the same two tokens, and those with the same one (the hash chains of LZ77 compressors, RFC 1951 section
4). A search follows a chain for a few places, then keeps those whose texts agree with the context further back. At the
window's edge `before` and `after` are −1, and a chain ends at the first place outside.

Why not a suffix tree or automaton: forgetting a token here is overwriting one slot; tokens are not Python objects, so
the garbage collector has nothing to walk; a token takes 36 bytes in the arrays and at most 150 in the dictionaries; and
searching only the newest few places costs no acceptance.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

NEW_TEXT = -1
"""Handle to pass with the first tokens of a text."""
_GROWTH = 256
_MOST_STEPS = 256
"""Most places of a chain that a search visits; ends of texts, which have no next token, are skipped."""


class Match(NamedTuple):
    """Match of the last `length` tokens of a context: they end at each of `places`, newest first, with a next token."""

    length: int
    places: list[int]


class Vote(NamedTuple):
    """A next token: it follows `agreeing` of the `total` matching places, namely `places`."""

    token: int
    agreeing: int
    total: int
    places: list[int]


class SuffixIndex:
    """The newest `capacity` tokens of any number of texts; a match is at most `max_match` tokens long.

    A search visits the `max_places` newest places of the last two tokens, or else of the last one. Token ids are below
    2³¹. For one thread.
    """

    def __init__(self, capacity: int, *, max_match: int = 16, max_places: int = 16) -> None:
        if min(capacity, max_match, max_places) < 1:
            raise ValueError("capacity, max_match and max_places must be at least 1")
        self._capacity, self._max_match, self._max_places = capacity, max_match, max_places
        self._end = 0
        """Position of the next token; position p is in slot p % capacity, and forgotten if p < `_end − capacity`."""
        self._token = array("i")
        self._before, self._after = array("q"), array("q")
        # The newest place by token and by pair of tokens, and from each place the one before it in its chain.
        self._ones: dict[int, int] = {}
        self._pairs: dict[int, int] = {}
        self._older_one, self._older_pair = array("q"), array("q")

    def __len__(self) -> int:
        """Tokens in the window."""
        return min(self._end, self._capacity)

    def age(self, place: int) -> int:
        """Tokens appended since the one at this place, itself included."""
        return self._end - place

    def append(self, text: int, tokens: Sequence[int]) -> int:
        """Add tokens to the text with this handle (`NEW_TEXT` for a new text); returns its new handle."""
        capacity, token_at, before, after = self._capacity, self._token, self._before, self._after
        ones, pairs, older_one, older_pair = self._ones, self._pairs, self._older_one, self._older_pair
        for token in tokens:
            position = self._end
            slot = position % capacity
            if position >= capacity:
                self._forget(position - capacity)
            elif slot == len(token_at):
                self._grow()
            self._end = position + 1
            token_at[slot], before[slot], after[slot] = token, -1, -1
            older_one[slot] = ones.get(token, -1)
            ones[token] = position
            if text > position - capacity and text >= 0:
                last = text % capacity
                pair = token_at[last] << 32 | token
                before[slot], after[last] = text, position
                older_pair[slot] = pairs.get(pair, -1)
                pairs[pair] = position
            text = position
        return text

    def match(self, context: Sequence[int]) -> Match:
        """The longest end of `context` that occurs with a next token; length 0 where none does."""
        limit = min(self._max_match, len(context))
        if limit == 0:
            return Match(0, [])
        if limit > 1:
            pair = context[-2] << 32 | context[-1]
            if places := self._chain(self._pairs.get(pair, -1), self._older_pair, needs_before=True):
                return self._extend(context, places, limit)
        places = self._chain(self._ones.get(context[-1], -1), self._older_one, needs_before=False)
        return Match(1 if places else 0, places)

    def votes(self, places: Sequence[int]) -> list[Vote]:
        """The next tokens after these places, most frequent first, of equally frequent ones the newest first."""
        after, token, capacity = self._after, self._token, self._capacity
        following = [q for p in places if (q := after[p % capacity]) >= 0]
        heard = [token[q % capacity] for q in following]
        total = len(heard)
        if heard and heard.count(heard[0]) == total:
            return [Vote(heard[0], total, total, following)]
        found: dict[int, list[int]] = {}
        for place, next_token in zip(following, heard, strict=True):
            found.setdefault(next_token, []).append(place)
        return [
            Vote(next_token, len(agreeing), total, agreeing)
            for next_token, agreeing in sorted(found.items(), key=lambda item: -len(item[1]))
        ]

    def _grow(self) -> None:
        """Enlarge the arrays, up to the ring's capacity, so that short texts take little memory."""
        room = min(_GROWTH, self._capacity - len(self._token))
        for column in (self._token, self._before, self._after, self._older_one, self._older_pair):
            column.extend([-1] * room)

    def _forget(self, position: int) -> None:
        """Unlink the oldest token; chains that lead to it end by themselves at the edge of the window."""
        slot = position % self._capacity
        token, following = self._token[slot], self._after[slot]
        if self._ones.get(token) == position:
            del self._ones[token]
        if following >= 0:
            self._before[following % self._capacity] = -1
            pair = token << 32 | self._token[following % self._capacity]
            if self._pairs.get(pair) == following:
                self._drop_newest(pair, following, oldest=position + 1)

    def _drop_newest(self, pair: int, place: int, *, oldest: int) -> None:
        """Remove the newest place of a pair, whose first token was forgotten; older places of other texts may stay."""
        while place >= oldest and self._before[place % self._capacity] < 0:
            place = self._older_pair[place % self._capacity]
        if place >= oldest:
            self._pairs[pair] = place
        else:
            del self._pairs[pair]

    def _chain(self, place: int, older: array[int], *, needs_before: bool) -> list[int]:
        """The newest places of a chain that have a next token and, if `needs_before`, a token before in the window."""
        oldest, capacity = max(self._end - self._capacity, 0), self._capacity
        places: list[int] = []
        for _ in range(_MOST_STEPS):
            if place < oldest or len(places) == self._max_places:
                break
            slot = place % capacity
            if self._after[slot] >= 0 and (not needs_before or self._before[slot] >= 0):
                places.append(place)
            place = older[slot]
        return places

    def _extend(self, context: Sequence[int], places: list[int], limit: int) -> Match:
        """Keep the places that agree with the context furthest back, from a match of two tokens on."""
        before, token, capacity = self._before, self._token, self._capacity
        length = 2
        firsts = [before[place % capacity] for place in places]
        while len(places) > 1 and length < limit:
            wanted = context[-1 - length]
            agreeing = [
                (place, earlier)
                for place, first in zip(places, firsts, strict=True)
                if (earlier := before[first % capacity]) >= 0 and token[earlier % capacity] == wanted
            ]
            if not agreeing:
                return Match(length, places)
            places, firsts = [place for place, _ in agreeing], [first for _, first in agreeing]
            length += 1
        first = firsts[0]
        while length < limit:
            first = before[first % capacity]
            if first < 0 or token[first % capacity] != context[-1 - length]:
                break
            length += 1
        return Match(length, places)
