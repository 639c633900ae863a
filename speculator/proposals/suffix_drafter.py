"""Suffix drafts: proposals from recent text, for requests that repeat what was written before.

SuffixDecoding (arXiv 2411.04975) matches the end of a request with its own prompt and answer and with recent answers
and proposes what followed there. Here a request looks into three texts, and proposes first of all from the longest
match in the one whose next token is the likeliest to be accepted:

* its own prompt and answer so far (code that is edited, lists that go on as they began);
* recent answers to the same prompt, running ones included (groups of rollouts; DAS, arXiv 2511.13841, and Seer, arXiv
  2511.14617, keep such a window for each problem);
* recent answers to the same tenant. A tenant's text lies in an object of its own, and a request holds that one object:
  there is no path to another tenant's.

Where the matches name several next tokens, the proposal is a tree. It grows by the node that is the likeliest to be
reached and accepted, no deeper than α · match length (the MAX_SPEC of SuffixDecoding), and ends where that becomes
unlikely. A proposal at effective match length L (the match and the proposals before it), where n of N places went on
with it, is taken to be accepted with probability

    p = r · n / (N + 3.5 / L)

Imaginary places that went on otherwise lower the frequency, fewer of them the longer the match. r is what was accepted
lately over what was predicted: by source, length and rank for all requests of the tenant, times the same by rank for
the request alone. An answer that copies its prompt copies on. A gate that learns from each verdict then corrects p
(speculator/proposals/acceptance_gate.py). What other matches name beside the best one is predicted
(1 − p₁) times as often, p₁ being the probability of the first proposal. The expected number of accepted tokens of a
tree is the sum of R over its nodes, R_k being the product of p over node k and those before it on its path.

Why not `arctic_inference.suffix_decoding`: it is published as source only, and to install it takes a C++ compiler,
CMake and a copy of PyTorch; it drops whole requests, not tokens; and its probabilities are plain frequencies: on the
answers of benchmarks/results/suffix.md it needs more proposals for the same acceptance.

The engine's loop thread is the only user. Verification decides every token, so nothing here can change an answer.
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

from speculator.proposals.acceptance_gate import NOBODY_ASKED, AcceptanceGate, Features
from speculator.proposals.draft_tree import NO_PROPOSALS, ROOT, DraftTree
from speculator.proposals.estimates import Calibration
from speculator.proposals.suffix_index import NEW_TEXT, SuffixIndex, Vote

DOUBT = 3.5
"""Imaginary places that disagree, at a match of one token."""
REQUEST_MEMORY = 0.97
"""What a proposal still says about its request after another one."""
_HOPELESS = 0.5
"""Of the least reach: below it the gate is not asked."""


class TextSource(IntEnum):
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

    source: TextSource
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


class Judged(NamedTuple):
    """A guess, and what the gate says of it."""

    guess: Guess
    probability: float
    """That it is accepted, once reached: by the gate while that is used, else as calibrated."""
    learned: float
    """By the gate."""
    features: Features


@dataclass(frozen=True)
class SuffixProposal:
    """A tree with its nodes in the order of their R, so that its first ones are the best tree of so many."""

    tree: DraftTree = NO_PROPOSALS
    chosen: Sequence[Guess] = ()
    """The nodes."""
    judged: Mapping[int, Sequence[Judged]] = field(default_factory=dict)
    """What was guessed behind each node, taken or not."""

    @property
    def sources(self) -> tuple[TextSource, ...]:
        """Of the nodes."""
        return tuple(guess.kind.source for guess in self.chosen)


Support = dict[int, list[tuple[TextSource, int]]]
"""The texts that name a token first, and how long they match."""


class TreeGrower:
    """Grows the trees of one request, and learns from what became of them."""

    def __init__(
        self,
        indexes: Mapping[TextSource, SuffixIndex],
        tenants: Calibration,
        gate: AcceptanceGate | None,
        *,
        alpha: float,
        width: int,
        min_reach: float,
    ) -> None:
        """From these texts; `tenants` is what became of proposals in all of the tenant's requests, and `gate` what was
        learned of them, if anything is.
        """
        self._indexes, self._alpha, self._width, self._min_reach = indexes, alpha, width, min_reach
        self._tenants, self._gate = tenants, gate
        self._request = Calibration(REQUEST_MEMORY)
        """Of what is predicted for the tenant's requests together, in this one."""

    def grow(self, context: Sequence[int], max_nodes: int) -> SuffixProposal:
        """The tree of the nodes that are the likeliest to be reached and accepted behind `context`."""
        if max_nodes <= 0:
            return SuffixProposal()
        parents: list[int] = []
        chosen: list[Judged] = []
        behind: dict[int, list[Judged]] = {}
        numbers = itertools.count()  # of equally likely ones the first is taken
        waiting: list[tuple[float, int, int, int, Judged]] = []

        def guess_behind(
            node: int, depth: int, reach: float, before: int, guesses: Sequence[Guess], support: Support | None = None
        ) -> None:
            behind[node] = self._judge(guesses, before, reach, support)
            for one in behind[node]:
                if (reached := reach * one.probability) >= self._min_reach:
                    heappush(waiting, (-reached, next(numbers), node, depth, one))

        guesses, support = self._first_guesses(context)
        guess_behind(ROOT, 1, 1.0, context[-1] if context else 0, guesses, support)
        while waiting and len(chosen) < max_nodes:
            minus_reach, _, parent, depth, judged = heappop(waiting)
            node, guess = len(chosen), judged.guess
            parents.append(parent)
            chosen.append(judged)
            if depth < guess.deepest and len(chosen) < max_nodes:
                source, length = guess.kind.source, guess.length
                votes = self._indexes[source].votes(guess.places)
                guesses = self._guesses(source, length, guess.deepest, votes)
                guess_behind(node, depth + 1, -minus_reach, guess.token, guesses)
        tokens, probabilities = [one.guess.token for one in chosen], [one.probability for one in chosen]
        tree = DraftTree(tuple(tokens), tuple(parents), tuple(probabilities))
        return SuffixProposal(tree, [one.guess for one in chosen], behind)

    def learn(self, proposal: SuffixProposal, committed: Sequence[int]) -> None:
        """The text went on like this: what was guessed behind each node that it has passed was right or not."""
        node, tree = ROOT, proposal.tree
        for token in committed:
            for guess, _, learned, features in proposal.judged.get(node, ()):
                accepted = guess.token == token
                if self._gate is not None and features:
                    self._gate.add(guess.probability, learned, features, accepted=accepted)
                self._request.add(guess.kind.rank, guess.usual, accepted=accepted)
                self._tenants.add(guess.kind, guess.predicted, accepted=accepted)
            if (child := tree.child(node, token)) is None:
                break
            node = child

    def _judge(self, guesses: Sequence[Guess], before: int, reach: float, support: Support | None) -> list[Judged]:
        """What may follow the token `before`, which is reached so often; `support` is known where all texts were asked.

        Where calibration says that a tree would end far above a guess, nobody asks the gate.
        """
        judged, gate = list[Judged](), self._gate
        is_used = gate is not None and gate.is_used
        for guess in guesses:
            if gate is None or reach * guess.probability < _HOPELESS * self._min_reach:
                judged.append(Judged(guess, guess.probability, guess.probability, ()))
                continue
            source, longest = guess.kind.source, NOBODY_ASKED
            if support is not None:
                named_by = support.get(guess.token, ())
                longest = max((length for other, length in named_by if other is not source), default=0)
            learned, features = gate.judge(
                guess.token,
                before,
                guess.probability,
                is_first=guess.kind.rank is Rank.FIRST,
                age=self._indexes[source].age(guess.places[0]),
                source=source,
                support=longest,
            )
            judged.append(Judged(guess, learned if is_used else guess.probability, learned, features))
        return judged

    def _first_guesses(self, context: Sequence[int]) -> tuple[list[Guess], Support]:
        """What may come next: by the match whose next token is most likely to be accepted, and what others name."""
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
            kind = Kind(other.kind.source, other.kind.length_bits, Rank.BESIDE)
            predicted = unnamed * other.predicted
            beside = self._guess(other.token, predicted, kind, other.length, other.deepest, other.places)
            known = by_token.get(other.token)
            if known is None or beside.probability > known.probability:
                by_token[other.token] = beside
        return list(by_token.values()), support

    def _guesses(self, source: TextSource, length: int, deepest: int, votes: Sequence[Vote]) -> list[Guess]:
        """By the votes behind a match of so many tokens."""
        guesses, doubt, bits, rank = [], DOUBT / length, length.bit_length(), Rank.FIRST
        for token, agreeing, total, places in votes[: self._width]:
            kind = Kind(source, bits, rank)
            guesses.append(self._guess(token, agreeing / (total + doubt), kind, length + 1, deepest, places))
            rank = Rank.LATER
        return guesses

    def _guess(self, token: int, predicted: float, kind: Kind, length: int, deepest: int, places: list[int]) -> Guess:
        usual = self._tenants.probability(kind, predicted)
        probability = self._request.probability(kind.rank, usual)
        return Guess(token, probability, usual, predicted, kind, length, deepest, places)


T = TypeVar("T")


MAX_MATCH = 16
REQUEST_WINDOW = 32_768
GROUP_WINDOW = 8_192
TENANT_WINDOW = 32_768
"""Tokens of text that are kept, of about 65 bytes in real text and at most 185."""


@dataclass(frozen=True, kw_only=True)
class SuffixConfig:
    """How trees grow, and how much text is kept.

    Besides the running requests' own text at most max_tenants · (TENANT_WINDOW + max_groups · GROUP_WINDOW) tokens
    are kept: 2.6 million with these defaults, or 170 MB of real text. Dropped windows live on while a request still
    uses them.
    """

    alpha: float = 4.0
    """Depth of a tree per token of match."""
    width: int = 3
    """Most proposals beside each other behind the same tokens, by one match; with 1 trees are chains, of one match."""
    min_reach: float = 0.05
    """A tree ends before a proposal that is reached and accepted with less than this probability. Whoever pays more
    than about 3% of a round for a proposal cuts it further: their probabilities say where."""
    learns: bool = True
    """Whether a gate learns to correct what calibration says; else that alone decides."""
    max_groups: int = 16
    """A tenant's groups; the one that was used least recently is dropped."""
    max_tenants: int = 16
    max_target_age: int = 4
    """Changes of the target after which a tenant's windows go: text of a policy that moves ages by steps."""


class Recent(OrderedDict[str, T]):
    """At most `size` things, each made when it is first asked for; the least recently asked for is dropped."""

    def __init__(self, size: int, make: Callable[[], T]) -> None:
        super().__init__()
        self._size, self._make = size, make

    def of(self, name: str) -> T:
        if name not in self:
            self[name] = self._make()
        self.move_to_end(name)
        while len(self) > self._size:
            self.popitem(last=False)
        return self[name]


class Tenant:
    """Everything that one tenant's requests may propose from, and what became of such proposals."""

    def __init__(self, config: SuffixConfig) -> None:
        self.answers = SuffixIndex(TENANT_WINDOW, max_match=MAX_MATCH)
        self.groups = Recent(config.max_groups, lambda: SuffixIndex(GROUP_WINDOW, max_match=MAX_MATCH))
        """Answers to one prompt each, by the group's name."""
        self.calibration = Calibration()
        self.gate = AcceptanceGate() if config.learns else None
        self.born_s = time.monotonic()
        self.target_age = 0
        """Changes of the target since the first text."""


class SuffixDrafter:
    """The recent text of every tenant that an engine serves."""

    def __init__(self, config: SuffixConfig | None = None) -> None:
        self._config = config or SuffixConfig()
        self._tenants = Recent(self._config.max_tenants, lambda: Tenant(self._config))

    def start(self, prompt: Sequence[int], *, tenant: str, group_id: str = "", shared: bool = True) -> SuffixRequest:
        """A request whose answer is to follow `prompt`; indexing takes about a microsecond a token.

        With `shared` false the request proposes from its own text alone and leaves nothing behind.
        """
        home = self._tenants.of(tenant) if shared else Tenant(self._config)
        return SuffixRequest(self._config, prompt, home, home.groups.of(group_id) if shared and group_id else None)

    def drop(self, tenant: str, group_id: str) -> None:
        """Drop the text of a group that has ended."""
        if tenant in self._tenants:
            self._tenants[tenant].groups.pop(group_id, None)

    @property
    def num_tokens(self) -> int:
        """In all windows that are kept; those of running requests' own text come on top."""
        return sum(
            len(tenant.answers) + sum(len(group) for group in tenant.groups.values())
            for tenant in self._tenants.values()
        )

    def forget(self, tenants: Collection[str]) -> None:
        """Drop all text of these tenants; what runs keeps what it reads until it ends."""
        for tenant in tenants:
            self._tenants.pop(tenant, None)

    def expire(self, ttl_s: float) -> None:
        """Drop a tenant's windows, whole, when the first text in them may be so old."""
        self.forget([name for name, tenant in self._tenants.items() if time.monotonic() - tenant.born_s > ttl_s])

    def target_moved(self) -> None:
        """Drop a tenant's windows, whole, when the first text in them is of a target that is too far away."""
        for tenant in self._tenants.values():
            tenant.target_age += 1
        max_age = self._config.max_target_age
        self.forget([name for name, tenant in self._tenants.items() if tenant.target_age > max_age])


class SuffixRequest:
    """One running answer: its own text, and the texts of its tenant and group that it reads and extends."""

    def __init__(self, config: SuffixConfig, prompt: Sequence[int], tenant: Tenant, group: SuffixIndex | None) -> None:
        self._indexes = {TextSource.OWN: SuffixIndex(REQUEST_WINDOW, max_match=MAX_MATCH)}
        if group is not None:
            self._indexes[TextSource.GROUP] = group
        self._indexes[TextSource.TENANT] = tenant.answers
        # Shared texts begin with the prompt's last tokens: so the beginnings of answers are found too.
        self._context = list(prompt[-MAX_MATCH:])
        before = {TextSource.OWN: prompt[-REQUEST_WINDOW:]}
        self._texts = {
            source: index.append(NEW_TEXT, before.get(source, self._context)) for source, index in self._indexes.items()
        }
        self.publish: Callable[[Sequence[int]], None] | None = None
        """Told what is committed."""
        self._newest = SuffixProposal()
        self._grower = TreeGrower(
            self._indexes,
            tenant.calibration,
            tenant.gate,
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
        """The last tokens."""
        return self._context

    def commit(self, tokens: Sequence[int]) -> None:
        """The answer goes on with these tokens, proposed or not: they also say how good the newest tree was.

        So a source is judged while it is not used, and used again when it has become better.
        """
        self._grower.learn(self._newest, tokens)
        self._newest = SuffixProposal()
        for source, index in self._indexes.items():
            self._texts[source] = index.append(self._texts[source], tokens)
        self._context = [*self._context, *tokens][-MAX_MATCH:]
        if self.publish is not None:
            self.publish(tokens)

    def propose(self, max_tokens: int) -> SuffixProposal:
        """At most `max_tokens` proposals."""
        self._newest = self._grower.grow(self._context, max_tokens)
        return self._newest

    def rounds_saved(self, tokens: Sequence[int], max_tokens: int) -> float:
        """How many rounds with these trees alone, of at most `max_tokens`, it saves to be given the next `tokens` by
        another: after each of them a round would have committed one more and what its tree promises.
        """
        saved, context = 0.0, self._context
        for token in tokens:
            context = [*context, token][-MAX_MATCH:]
            saved += 1 / (1 + sum(self._grower.grow(context, max_tokens).tree.reaches))
        return saved
