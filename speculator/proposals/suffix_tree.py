"""How the tree of a suffix proposal grows, and how likely each of its nodes is to be accepted.

Where the places of a match went on in several ways, or other matches name other tokens, the proposal is a tree. It
grows by the node that is the likeliest to be reached and accepted, no deeper than α · match length (the MAX_SPEC of
SuffixDecoding, arXiv 2411.04975), and ends where that becomes unlikely. A proposal at effective match length L (the
match and the proposals before it), where n of N places went on with it, is taken to be accepted with probability

    p = r · n / (N + 3.5 / L)

The frequency is held back by imaginary places that went on otherwise, fewer the longer the match. r is what was
accepted lately over what was predicted, by source and by length for the tenant's requests together, times the same for
the request alone: an answer that copies its prompt copies on. The most frequent continuation of a match has an r of its
own, as have less frequent ones, and what other matches name beside them. That is predicted (1 − p₁) times as often, p₁
being the probability of the first proposal. The expected number of accepted tokens of a tree is the sum of R over its
nodes, R_k being the product of p over node k and those before it on its path.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heappop, heappush
from typing import NamedTuple

from speculator.proposals.calibration import Calibration
from speculator.proposals.draft_tree import NO_PROPOSALS, ROOT, DraftTree
from speculator.proposals.suffix_index import SuffixIndex, Vote

_DOUBT = 3.5
"""Imaginary places that disagree, at a match of one token."""
_REQUEST_MEMORY = 0.97
"""What a proposal still says about its request after another one."""


class Source(IntEnum):
    """Where a proposal comes from; of equally likely ones the first is taken."""

    __hash__ = int.__hash__  # an enum's own is slow, and every guess is looked up by its kind
    OWN = 0
    GROUP = 1
    TENANT = 2


class Rank(IntEnum):
    """How a guess stands to the others behind the same tokens."""

    __hash__ = int.__hash__
    FIRST = 0
    """The most frequent continuation of a match."""
    LATER = 1
    """A less frequent one."""
    BESIDE = 2
    """What another match names."""


class Kind(NamedTuple):
    """Guesses that are corrected together: of one source, at matches of about one length, and of one rank."""

    source: Source
    length_bits: int
    rank: Rank


class Guess(NamedTuple):
    """A token that may come next behind a node, or behind the root."""

    token: int
    probability: float
    usual: float
    """Its probability in any of the tenant's requests."""
    predicted: float
    """Before it was corrected."""
    kind: Kind
    length: int
    """Of the match that ends with it."""
    deepest: int
    """How deep its tree may grow."""
    places: list[int]


@dataclass(frozen=True)
class SuffixProposal:
    """A tree with its nodes in the order of their R, so that its first ones are the best tree of so many."""

    tree: DraftTree = NO_PROPOSALS
    chosen: Sequence[Guess] = ()
    """The nodes."""
    guesses: Mapping[int, Sequence[Guess]] = field(default_factory=dict)
    """What was guessed behind each node, taken or not."""

    @property
    def sources(self) -> tuple[Source, ...]:
        """Of the nodes."""
        return tuple(guess.kind.source for guess in self.chosen)


class TreeGrower:
    """Grows the trees of one request, and learns from what became of them."""

    def __init__(
        self,
        indexes: Mapping[Source, SuffixIndex],
        tenants: Calibration,
        *,
        alpha: float,
        width: int,
        min_reach: float,
    ) -> None:
        """From these texts; `tenants` is what became of proposals in all of the tenant's requests."""
        self._indexes, self._alpha, self._width, self._min_reach = indexes, alpha, width, min_reach
        self._tenants = tenants
        self._request = Calibration(_REQUEST_MEMORY)
        """Of what is predicted for the tenant's requests together, in this one."""

    def grow(self, context: Sequence[int], max_nodes: int) -> SuffixProposal:
        """The tree of the nodes that are the likeliest to be reached and accepted behind `context`."""
        if max_nodes <= 0:
            return SuffixProposal()
        parents: list[int] = []
        chosen: list[Guess] = []
        behind: dict[int, list[Guess]] = {}
        numbers = itertools.count()  # of equally likely ones the first is taken
        waiting: list[tuple[float, int, int, int, Guess]] = []

        def guess_behind(node: int, depth: int, reach: float, guesses: list[Guess]) -> None:
            behind[node] = guesses
            for guess in guesses:
                if (reached := reach * guess.probability) >= self._min_reach:
                    heappush(waiting, (-reached, next(numbers), node, depth, guess))

        guess_behind(ROOT, 1, 1.0, self._first_guesses(context))
        while waiting and len(chosen) < max_nodes:
            minus_reach, _, parent, depth, guess = heappop(waiting)
            node = len(chosen)
            parents.append(parent)
            chosen.append(guess)
            if depth < guess.deepest and len(chosen) < max_nodes:
                source, length = guess.kind.source, guess.length
                votes = self._indexes[source].votes(guess.places)
                guess_behind(node, depth + 1, -minus_reach, self._guesses(source, length, guess.deepest, votes))
        tokens, probabilities = [guess.token for guess in chosen], [guess.probability for guess in chosen]
        return SuffixProposal(DraftTree(tuple(tokens), tuple(parents), tuple(probabilities)), chosen, behind)

    def judge(self, proposal: SuffixProposal, committed: Sequence[int]) -> None:
        """The text went on like this: what was guessed behind each node that it has passed was right or not."""
        node, tree = ROOT, proposal.tree
        for token in committed:
            for guess in proposal.guesses.get(node, ()):
                accepted = guess.token == token
                self._request.add(guess.kind.rank, guess.usual, accepted=accepted)
                self._tenants.add(guess.kind, guess.predicted, accepted=accepted)
            if (child := tree.child(node, token)) is None:
                break
            node = child

    def _first_guesses(self, context: Sequence[int]) -> list[Guess]:
        """What may come next: by the match whose next token is most likely to be accepted, and what others name."""
        found: list[list[Guess]] = []
        for source, index in self._indexes.items():
            match = index.match(context)
            deepest = int(self._alpha * match.length)
            if deepest and (votes := index.votes(match.places)):
                found.append(self._guesses(source, match.length, deepest, votes))
        if not found:
            return []
        best = max(found, key=lambda guesses: guesses[0].probability)
        if self._width == 1:
            return best
        by_token = {guess.token: guess for guess in best}
        unnamed = 1 - best[0].probability
        for other in itertools.chain(*(guesses for guesses in found if guesses is not best)):
            kind = Kind(other.kind.source, other.kind.length_bits, Rank.BESIDE)
            predicted = unnamed * other.predicted
            beside = self._guess(other.token, predicted, kind, other.length, other.deepest, other.places)
            known = by_token.get(other.token)
            if known is None or beside.probability > known.probability:
                by_token[other.token] = beside
        return list(by_token.values())

    def _guesses(self, source: Source, length: int, deepest: int, votes: Sequence[Vote]) -> list[Guess]:
        """By the votes behind a match of so many tokens."""
        guesses, doubt, bits, rank = [], _DOUBT / length, length.bit_length(), Rank.FIRST
        for token, agreeing, total, places in votes[: self._width]:
            kind = Kind(source, bits, rank)
            guesses.append(self._guess(token, agreeing / (total + doubt), kind, length + 1, deepest, places))
            rank = Rank.LATER
        return guesses

    def _guess(self, token: int, predicted: float, kind: Kind, length: int, deepest: int, places: list[int]) -> Guess:
        usual = self._tenants.probability(kind, predicted)
        probability = self._request.probability(kind.rank, usual)
        return Guess(token, probability, usual, predicted, kind, length, deepest, places)
