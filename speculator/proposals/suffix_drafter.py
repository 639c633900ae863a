"""Suffix drafts: propose the continuation of earlier text that ended in the same tokens.

SuffixDecoding (arXiv 2411.04975) matches the end of a request with its own prompt and answer and with recent answers
and proposes what followed there. Here a request searches three texts, and starts its proposal from the longest match in
the text whose next token is the most likely to be accepted:

* its own prompt and answer so far (code that is edited, lists that go on as they began);
* recent answers to the same prompt, running ones included (groups of rollouts; DAS, arXiv 2511.13841, and Seer, arXiv
  2511.14617, keep such a window for each problem);
* recent answers to the same tenant. Each tenant has a separate object for its text, and a request has a reference to
  its own tenant's only.

If the matches have several next tokens, the proposal is a tree. It grows by the node that is the most likely to be
reached and accepted, no deeper than α · match length (the MAX_SPEC of SuffixDecoding), until that becomes unlikely. The
acceptance probability of a token at effective match length L (the match plus the proposals before it), with which n of
N matching places continued, is

    p = r · n / (N + 3.5 / L)

The 3.5 / L pseudo-counts lower the frequency, less for a longer match. r is recently accepted over predicted proposals:
by source, length and rank for all requests of the tenant, times the same by rank for the request alone, since an answer
that copies its prompt keeps copying. An online model then corrects p (speculator/proposals/suffix_acceptance.py).
Tokens that only other matches than the best one name get their probability times (1 − p₁), with p₁ the probability of
the first proposal. A tree's expected accepted tokens are the sum of R over its nodes, where R_k is the product of p
along the path to node k.

Why not `arctic_inference.suffix_decoding`: it is published as source only, and its installation needs a C++ compiler,
CMake and a copy of PyTorch; it drops whole requests, not tokens; and its probabilities are plain frequencies, so that
it needs more proposals for the same acceptance (benchmarks/results/suffix.md).

Used by the engine's thread alone. Verification decides every token, so suffix drafts cannot change an answer.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heappop, heappush
from typing import NamedTuple, TypeVar

from speculator.proposals.draft_tree import NO_PROPOSALS, ROOT, DraftTree
from speculator.proposals.estimates import Calibration
from speculator.proposals.suffix_acceptance import NOBODY_ASKED, Features, SuffixAcceptance
from speculator.proposals.suffix_index import NEW_TEXT, SuffixIndex, Vote

DOUBT = 3.5
"""Pseudo-count of disagreeing places, at a match of one token."""
REQUEST_MEMORY = 0.97
"""Decay of a request's own calibration per proposal."""
_HOPELESS = 0.5
"""Share of `min_reach` below which the learned model is not evaluated, to save time."""


class TextSource(IntEnum):
    """Text that a proposal is from; of equally likely proposals the first source wins."""

    __hash__ = int.__hash__  # faster than the enum's own, which every lookup by `CalibrationKey` would use
    OWN = 0
    GROUP = 1
    TENANT = 2


class GuessRank(IntEnum):
    """Rank of a guess among the guesses after the same tokens."""

    __hash__ = int.__hash__
    FIRST = 0
    """The most frequent continuation of a match."""
    LATER = 1
    """A less frequent continuation of the match."""
    BESIDE = 2
    """A continuation of a match in another text."""


class CalibrationKey(NamedTuple):
    """Key of calibration: source, match length in bits, rank."""

    source: TextSource
    length_bits: int
    rank: GuessRank


class Guess(NamedTuple):
    """A candidate token after a node, or after the root."""

    token: int
    probability: float
    usual: float
    """Probability calibrated over all of the tenant's requests."""
    predicted: float
    """Probability before calibration."""
    kind: CalibrationKey
    length: int
    """Length of the match, this token included."""
    deepest: int
    """How deep its tree may grow."""
    places: list[int]


class ScoredGuess(NamedTuple):
    """A guess with its probability by the learned model."""

    guess: Guess
    probability: float
    """Probability that it is accepted once reached: learned while the model is used, else calibrated."""
    learned: float
    """The model's probability."""
    features: Features


@dataclass(frozen=True)
class SuffixProposal:
    """A tree with its nodes sorted by R, so that its first n nodes are the best tree of n nodes."""

    tree: DraftTree = NO_PROPOSALS
    chosen: Sequence[Guess] = ()
    """The guesses that became nodes."""
    scored: Mapping[int, Sequence[ScoredGuess]] = field(default_factory=dict)
    """All guesses after each node, chosen or not."""

    @property
    def sources(self) -> tuple[TextSource, ...]:
        """Source of each node."""
        return tuple(guess.kind.source for guess in self.chosen)


Support = dict[int, list[tuple[TextSource, int]]]
"""For each token: (source, match length) of the texts whose most frequent continuation it is."""


class TreeGrower:
    """Grows the suffix trees of one request, and learns from their verification."""

    def __init__(
        self,
        indexes: Mapping[TextSource, SuffixIndex],
        tenants: Calibration,
        acceptance: SuffixAcceptance | None,
        *,
        alpha: float,
        width: int,
        min_reach: float,
    ) -> None:
        """`indexes`: the texts to propose from; `tenants`: calibration over all of the tenant's requests; `acceptance`:
        the tenant's online model, or None.
        """
        self._indexes, self._alpha, self._width, self._min_reach = indexes, alpha, width, min_reach
        self._tenants, self._acceptance = tenants, acceptance
        self._request = Calibration(REQUEST_MEMORY)
        """Calibration of this request alone, on top of the tenant's."""

    def grow(self, context: Sequence[int], max_nodes: int) -> SuffixProposal:
        """The tree of the nodes that are most likely to be reached and accepted after `context`."""
        if max_nodes <= 0:
            return SuffixProposal()
        parents: list[int] = []
        chosen: list[ScoredGuess] = []
        behind: dict[int, list[ScoredGuess]] = {}
        numbers = itertools.count()  # of equally likely ones the first is taken
        waiting: list[tuple[float, int, int, int, ScoredGuess]] = []

        def guess_behind(
            node: int, depth: int, reach: float, before: int, guesses: Sequence[Guess], support: Support | None = None
        ) -> None:
            behind[node] = self._score(guesses, before, reach, support)
            for one in behind[node]:
                if (reached := reach * one.probability) >= self._min_reach:
                    heappush(waiting, (-reached, next(numbers), node, depth, one))

        guesses, support = self._first_guesses(context)
        guess_behind(ROOT, 1, 1.0, context[-1] if context else 0, guesses, support)
        while waiting and len(chosen) < max_nodes:
            minus_reach, _, parent, depth, scored = heappop(waiting)
            node, guess = len(chosen), scored.guess
            parents.append(parent)
            chosen.append(scored)
            if depth < guess.deepest and len(chosen) < max_nodes:
                source, length = guess.kind.source, guess.length
                votes = self._indexes[source].votes(guess.places)
                guesses = self._guesses(source, length, guess.deepest, votes)
                guess_behind(node, depth + 1, -minus_reach, guess.token, guesses)
        tokens, probabilities = [one.guess.token for one in chosen], [one.probability for one in chosen]
        tree = DraftTree(tuple(tokens), tuple(parents), tuple(probabilities))
        return SuffixProposal(tree, [one.guess for one in chosen], behind)

    def learn(self, proposal: SuffixProposal, committed: Sequence[int]) -> None:
        """Learn from the committed continuation: judge the guesses after each node on its path."""
        node, tree = ROOT, proposal.tree
        for token in committed:
            for guess, _, learned, features in proposal.scored.get(node, ()):
                accepted = guess.token == token
                if self._acceptance is not None and features:
                    self._acceptance.add(guess.probability, learned, features, accepted=accepted)
                self._request.add(guess.kind.rank, guess.usual, accepted=accepted)
                self._tenants.add(guess.kind, guess.predicted, accepted=accepted)
            if (child := tree.child(node, token)) is None:
                break
            node = child

    def _score(self, guesses: Sequence[Guess], before: int, reach: float, support: Support | None) -> list[ScoredGuess]:
        """Apply the model to guesses after the token `before`, whose reach is `reach`; `support` is known if all texts
        were searched. Guesses whose calibrated reach is far too small skip the model.
        """
        scored, model = list[ScoredGuess](), self._acceptance
        is_used = model is not None and model.is_used
        for guess in guesses:
            if model is None or reach * guess.probability < _HOPELESS * self._min_reach:
                scored.append(ScoredGuess(guess, guess.probability, guess.probability, ()))
                continue
            source, longest = guess.kind.source, NOBODY_ASKED
            if support is not None:
                named_by = support.get(guess.token, ())
                longest = max((length for other, length in named_by if other is not source), default=0)
            learned, features = model.predict(
                guess.token,
                before,
                guess.probability,
                is_first=guess.kind.rank is GuessRank.FIRST,
                age=self._indexes[source].age(guess.places[0]),
                source=source,
                support=longest,
            )
            scored.append(ScoredGuess(guess, learned if is_used else guess.probability, learned, features))
        return scored

    def _first_guesses(self, context: Sequence[int]) -> tuple[list[Guess], Support]:
        """Guesses after `context`: of the match whose first token is most likely accepted, and of other matches."""
        found: list[list[Guess]] = []
        for source, index in self._indexes.items():
            match = index.match(context)
            deepest = int(self._alpha * match.length)
            if deepest and (votes := index.votes(match.places)):
                found.append(self._guesses(source, match.length, deepest, votes))
        if not found:
            return [], {}
        best = max(found, key=lambda guesses: guesses[0].probability)
        support: Support = {}
        for first, *_ in found:
            support.setdefault(first.token, []).append((first.kind.source, first.length - 1))
        if self._width == 1:
            return best, support
        by_token = {guess.token: guess for guess in best}
        unnamed = 1 - best[0].probability
        for other in itertools.chain(*(guesses for guesses in found if guesses is not best)):
            kind = CalibrationKey(other.kind.source, other.kind.length_bits, GuessRank.BESIDE)
            predicted = unnamed * other.predicted
            beside = self._guess(other.token, predicted, kind, other.length, other.deepest, other.places)
            known = by_token.get(other.token)
            if known is None or beside.probability > known.probability:
                by_token[other.token] = beside
        return list(by_token.values()), support

    def _guesses(self, source: TextSource, length: int, deepest: int, votes: Sequence[Vote]) -> list[Guess]:
        """Guesses from the votes after a match of `length` tokens."""
        guesses, doubt, bits, rank = [], DOUBT / length, length.bit_length(), GuessRank.FIRST
        for token, agreeing, total, places in votes[: self._width]:
            kind = CalibrationKey(source, bits, rank)
            guesses.append(self._guess(token, agreeing / (total + doubt), kind, length + 1, deepest, places))
            rank = GuessRank.LATER
        return guesses

    def _guess(
        self, token: int, predicted: float, kind: CalibrationKey, length: int, deepest: int, places: list[int]
    ) -> Guess:
        usual = self._tenants.probability(kind, predicted)
        probability = self._request.probability(kind.rank, usual)
        return Guess(token, probability, usual, predicted, kind, length, deepest, places)


T = TypeVar("T")


MAX_MATCH = 16
REQUEST_WINDOW = 32_768
GROUP_WINDOW = 8_192
TENANT_WINDOW = 32_768
"""Tokens of text that are kept for a tenant; one takes about 65 bytes in real text, at most 185."""


@dataclass(frozen=True, kw_only=True)
class SuffixConfig:
    """Settings of suffix trees, and of how much text is kept.

    Besides the running requests' own text at most max_tenants · (TENANT_WINDOW + max_groups · GROUP_WINDOW) tokens
    are kept: 2.6 million with these defaults, or 170 MB of real text. A dropped window is freed once no request uses
    it.
    """

    alpha: float = 4.0
    """Depth of a tree per token of match."""
    width: int = 3
    """Most children of a node from one match; with 1, trees are chains of one match."""
    min_reach: float = 0.05
    """A tree leaves out proposals with a smaller R. Where a proposal costs more than about 3% of a round, the caller
    cuts the tree further, by R."""
    learns: bool = True
    """Whether to use `SuffixAcceptance`; without it calibration alone decides."""
    max_groups: int = 16
    """Groups kept for a tenant; the least recently used one is dropped."""
    max_tenants: int = 16
    max_target_age: int = 4
    """Target versions after which a tenant's text is dropped: in RL, text of old policies goes stale."""


class LRUCache(OrderedDict[str, T]):
    """LRU cache of at most `size` values, each made at its first use."""

    def __init__(self, size: int, make: Callable[[], T]) -> None:
        super().__init__()
        self._size, self._make = size, make

    def get_or_create(self, name: str) -> T:
        if name not in self:
            self[name] = self._make()
        self.move_to_end(name)
        while len(self) > self._size:
            self.popitem(last=False)
        return self[name]


class TenantText:
    """One tenant's text, and the calibration of its proposals."""

    def __init__(self, config: SuffixConfig) -> None:
        self.answers = SuffixIndex(TENANT_WINDOW, max_match=MAX_MATCH)
        self.groups = LRUCache(config.max_groups, lambda: SuffixIndex(GROUP_WINDOW, max_match=MAX_MATCH))
        """Recent answers by prompt group."""
        self.calibration = Calibration()
        self.acceptance = SuffixAcceptance() if config.learns else None
        self.created_s = time.monotonic()
        self.target_age = 0
        """Target versions since the first text."""


class SuffixDrafter:
    """The recent text of every tenant that an engine serves."""

    def __init__(self, config: SuffixConfig | None = None) -> None:
        self._config = config or SuffixConfig()
        self._tenants = LRUCache(self._config.max_tenants, lambda: TenantText(self._config))

    def start(self, prompt: Sequence[int], *, tenant: str, group_id: str = "", shared: bool = True) -> SuffixRequest:
        """Start a request with this prompt; indexing takes about a microsecond a token.

        With `shared` false the request proposes from its own text alone, and its text is not kept for others.
        """
        texts = self._tenants.get_or_create(tenant) if shared else TenantText(self._config)
        return SuffixRequest(
            self._config, prompt, texts, texts.groups.get_or_create(group_id) if shared and group_id else None
        )

    def drop(self, tenant: str, group_id: str) -> None:
        """Drop the text of a group that has ended."""
        if tenant in self._tenants:
            self._tenants[tenant].groups.pop(group_id, None)

    @property
    def num_tokens(self) -> int:
        """Tokens in all kept windows, without running requests' own text."""
        return sum(
            len(tenant.answers) + sum(len(group) for group in tenant.groups.values())
            for tenant in self._tenants.values()
        )

    def forget(self, tenants: Collection[str]) -> None:
        """Drop all text of these tenants; running requests keep what they use until they end."""
        for tenant in tenants:
            self._tenants.pop(tenant, None)

    def expire(self, ttl_s: float) -> None:
        """Drop all windows of a tenant whose oldest text may be older than `ttl_s`."""
        self.forget([name for name, tenant in self._tenants.items() if time.monotonic() - tenant.created_s > ttl_s])

    def target_updated(self) -> None:
        """Count a new target version; drop all windows of a tenant whose oldest text is of a too old version."""
        for tenant in self._tenants.values():
            tenant.target_age += 1
        max_age = self._config.max_target_age
        self.forget([name for name, tenant in self._tenants.items() if tenant.target_age > max_age])


class SuffixRequest:
    """One running answer: its own text, and the texts of its tenant and group that it reads and extends."""

    def __init__(
        self, config: SuffixConfig, prompt: Sequence[int], tenant: TenantText, group: SuffixIndex | None
    ) -> None:
        self._indexes = {TextSource.OWN: SuffixIndex(REQUEST_WINDOW, max_match=MAX_MATCH)}
        if group is not None:
            self._indexes[TextSource.GROUP] = group
        self._indexes[TextSource.TENANT] = tenant.answers
        # Shared texts begin with the prompt's last tokens, so that beginnings of answers match, too.
        self._context = list(prompt[-MAX_MATCH:])
        before = {TextSource.OWN: prompt[-REQUEST_WINDOW:]}
        self._texts = {
            source: index.append(NEW_TEXT, before.get(source, self._context)) for source, index in self._indexes.items()
        }
        self.publish: Callable[[Sequence[int]], None] | None = None
        """Called with committed tokens, to share them with other engines."""
        self._newest = SuffixProposal()
        self._grower = TreeGrower(
            self._indexes,
            tenant.calibration,
            tenant.acceptance,
            alpha=config.alpha,
            width=config.width,
            min_reach=config.min_reach,
        )

    @property
    def group(self) -> SuffixIndex | None:
        """Recent answers to the same prompt."""
        return self._indexes.get(TextSource.GROUP)

    @property
    def context(self) -> Sequence[int]:
        """The last tokens of the request, to be matched."""
        return self._context

    def commit(self, tokens: Sequence[int]) -> None:
        """Append committed tokens, proposed or not, and learn from them how good the newest tree was.

        So an unused source is also scored, and used again when it has become better.
        """
        self._grower.learn(self._newest, tokens)
        self._newest = SuffixProposal()
        for source, index in self._indexes.items():
            self._texts[source] = index.append(self._texts[source], tokens)
        self._context = [*self._context, *tokens][-MAX_MATCH:]
        if self.publish is not None:
            self.publish(tokens)

    def propose(self, max_tokens: int) -> SuffixProposal:
        """Propose at most `max_tokens` tokens."""
        self._newest = self._grower.grow(self._context, max_tokens)
        return self._newest

    def rounds_saved(self, tokens: Sequence[int], max_tokens: int) -> float:
        """Rounds with suffix trees alone (of at most `max_tokens`) that are saved if another proposer brings the next
        `tokens`. A round after each token would have committed one token and its tree's expected acceptances.
        """
        saved, context = 0.0, self._context
        for token in tokens:
            context = [*context, token][-MAX_MATCH:]
            saved += 1 / (1 + sum(self._grower.grow(context, max_tokens).tree.reaches))
        return saved
