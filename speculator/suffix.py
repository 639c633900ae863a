"""Suffix drafts: proposals from recent text, for requests that repeat what was written before.

SuffixDecoding (arXiv 2411.04975) matches the end of a request with its own prompt and answer and with recent answers
and proposes what followed there. Here a request looks into three places, and proposes from the longest match in the one
whose next token is the likeliest to be accepted:

* its own prompt and answer so far (code that is edited, lists that go on as they began);
* recent answers to the same prompt, running ones included (groups of rollouts; DAS, arXiv 2511.13841, and Seer, arXiv
  2511.14617, keep such a window for each problem);
* recent answers to the same tenant. A tenant's text lies in an object of its own, and a request holds that one object:
  there is no path to another tenant's.

The chain grows with the match, as SuffixDecoding's MAX_SPEC = α · match length, and ends where reaching a proposal
becomes unlikely. A proposal at effective match length L (the match and the proposals before it), where n of N places
went on with it, is taken to be accepted with probability

    p = r · n / (N + 3.5 / L)

The frequency is held back by imaginary places that went on otherwise, fewer the longer the match. r is what was
accepted lately over what was predicted, by source and by length for the tenant's requests together, times the same for
the request alone: an answer that copies its prompt copies on.
The expected number of accepted tokens of a chain is Σ_k Π_{i≤k} p_i.

Why not `arctic_inference.suffix_decoding`: it is published as source only, and to install it takes a C++ compiler,
CMake and a copy of PyTorch; it drops whole requests, not tokens; and its probabilities are plain frequencies: on the
answers of benchmarks/suffix.py it needs more proposals for the same acceptance.

The engine's loop thread is the only user. Verification decides every token, so nothing here can change an answer.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TypeVar

from speculator.calibration import Calibration
from speculator.suffix_index import NEW_TEXT, Match, SuffixIndex, Vote

T = TypeVar("T")

_DOUBT = 3.5
"""Imaginary places that disagree, at a match of one token."""
_REQUEST_MEMORY = 0.97
"""What a proposal still says about its request after another one."""


class Source(IntEnum):
    """Where a proposal comes from; of equally likely ones the first is taken."""

    OWN = 0
    GROUP = 1
    TENANT = 2


@dataclass(frozen=True, kw_only=True)
class SuffixConfig:
    """Windows are in tokens, of about 65 bytes in real text and at most 185.

    Besides the running requests' own text at most max_tenants · (tenant_window + max_groups · group_window) are kept:
    2.6 million with these defaults, or 170 MB of real text. Dropped windows live on while a request still uses them.
    """

    alpha: float = 4.0
    """Most proposals per token of match."""
    min_reach: float = 0.05
    """A chain ends before a proposal that is reached and accepted with less than this probability. Whoever pays more
    than about 3% of a round for a proposal cuts chains further: their probabilities say where."""
    max_match: int = 16
    max_places: int = 16
    request_window: int = 32_768
    group_window: int = 8_192
    tenant_window: int = 32_768
    max_groups: int = 16
    """A tenant's groups; the one that was used least recently is dropped."""
    max_tenants: int = 16
    max_target_age: int = 4
    """Changes of the target after which a tenant's windows go: text of a policy that moves ages by steps."""


@dataclass(frozen=True, kw_only=True)
class SuffixProposal:
    """A chain of proposals. Probabilities are conditional: of each, given that those before it were accepted."""

    tokens: tuple[int, ...] = ()
    probabilities: tuple[float, ...] = ()
    source: Source = Source.OWN
    match_length: int = 0

    @property
    def reaches(self) -> list[float]:
        """R_k = Π_{i≤k} p_i, that a proposal is reached and accepted, k from the first one on."""
        return list(itertools.accumulate(self.probabilities, operator.mul))

    def first(self, num_tokens: int) -> SuffixProposal:
        """The chain cut to at most `num_tokens`."""
        return replace(self, tokens=self.tokens[:num_tokens], probabilities=self.probabilities[:num_tokens])


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
        self.answers = _index(config, config.tenant_window)
        self.groups = Recent(config.max_groups, lambda: _index(config, config.group_window))
        """Answers to one prompt each, by the group's name."""
        self.calibration = Calibration()
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
        self._config, self._tenant = config, tenant
        self._indexes = {Source.OWN: _index(config, config.request_window)}
        if group is not None:
            self._indexes[Source.GROUP] = group
        self._indexes[Source.TENANT] = tenant.answers
        # Shared texts begin with the prompt's last tokens: so the beginnings of answers are found too.
        self._context = list(prompt[-config.max_match :])
        before = {Source.OWN: prompt[-config.request_window :]}
        self._texts = {
            source: index.append(NEW_TEXT, before.get(source, self._context)) for source, index in self._indexes.items()
        }
        self.publish: Callable[[Sequence[int]], None] | None = None
        """Told what is committed."""
        self._guess: list[Vote] = []
        """The newest chain and the vote at which it was cut."""
        self._guess_of = Source.OWN, 0
        self._calibration = Calibration(_REQUEST_MEMORY)
        """Of what is predicted for the tenant's requests together, in this one."""

    @property
    def group(self) -> SuffixIndex | None:
        """Recent answers to the same prompt."""
        return self._indexes.get(Source.GROUP)

    @property
    def context(self) -> Sequence[int]:
        """The last tokens."""
        return self._context

    def commit(self, tokens: Sequence[int]) -> None:
        """The answer goes on with these tokens, proposed or not: they also say how good the newest chain was.

        So a source is judged while it is not used, and used again when it has become better.
        """
        self._judge(tokens)
        for source, index in self._indexes.items():
            self._texts[source] = index.append(self._texts[source], tokens)
        self._context = [*self._context, *tokens][-self._config.max_match :]
        if self.publish is not None:
            self.publish(tokens)

    def propose(self, max_tokens: int) -> SuffixProposal:
        """At most `max_tokens` proposals."""
        source, match = self._best_match(self._context)
        votes, probabilities = self._chain(source, match, max_tokens)
        self._guess, self._guess_of = votes, (source, match.length)
        return SuffixProposal(
            tokens=tuple(vote.token for vote in votes[: len(probabilities)]),
            probabilities=tuple(probabilities),
            source=source,
            match_length=match.length,
        )

    def rounds_saved(self, tokens: Sequence[int], max_tokens: int) -> float:
        """How many rounds with these chains alone, of at most `max_tokens`, it saves to be given the next `tokens` by
        another: after each of them a round would have committed one more and what its chain promises.
        """
        saved, context = 0.0, self._context
        for token in tokens:
            context = [*context, token][-self._config.max_match :]
            _, probabilities = self._chain(*self._best_match(context), max_tokens)
            saved += 1 / (1 + sum(itertools.accumulate(probabilities, operator.mul)))
        return saved

    def _chain(self, source: Source, match: Match, max_tokens: int) -> tuple[list[Vote], list[float]]:
        """The votes up to the one at which the chain is cut, and the probabilities of those before it."""
        most = max(0, min(max_tokens, int(self._config.alpha * match.length)))
        followed: list[Vote] = []
        probabilities: list[float] = []
        reach = 1.0
        for length, vote in enumerate(itertools.islice(self._indexes[source].follow(match.places), most), match.length):
            followed.append(vote)
            probability = self._probability(source, length, vote)
            reach *= probability
            if reach < self._config.min_reach:
                break
            probabilities.append(probability)
        return followed, probabilities

    def _best_match(self, context: Sequence[int]) -> tuple[Source, Match]:
        """The match whose next token is most likely to be accepted."""
        best, best_probability = (Source.OWN, Match(0, [])), 0.0
        for source, index in self._indexes.items():
            match = index.match(context)
            for vote in itertools.islice(index.follow(match.places), 1):
                probability = self._probability(source, match.length, vote)
                if probability > best_probability:
                    best, best_probability = (source, match), probability
        return best

    def _probability(self, source: Source, length: int, vote: Vote) -> float:
        """Of a proposal at effective match length `length` to be accepted, if those before it in its chain are."""
        return self._calibration.probability(None, self._usual_probability(source, length, vote))

    def _usual_probability(self, source: Source, length: int, vote: Vote) -> float:
        """The same in any of the tenant's requests."""
        return self._tenant.calibration.probability(_kind(source, length), _frequency(vote, length))

    def _judge(self, committed: Sequence[int]) -> None:
        source, match_length = self._guess_of
        for length, (vote, token) in enumerate(zip(self._guess, committed, strict=False), match_length):
            accepted = vote.token == token
            self._calibration.add(None, self._usual_probability(source, length, vote), accepted=accepted)
            self._tenant.calibration.add(_kind(source, length), _frequency(vote, length), accepted=accepted)
            if not accepted:
                break
        self._guess = []


def _kind(source: Source, length: int) -> tuple[Source, int]:
    """Proposals that are calibrated together: of one source, at matches of about one length."""
    return source, length.bit_length()


def _frequency(vote: Vote, length: int) -> float:
    """n / (N + 3.5 / L)."""
    return vote.agreeing / (vote.total + _DOUBT / length)


def _index(config: SuffixConfig, window: int) -> SuffixIndex:
    return SuffixIndex(window, max_match=config.max_match, max_places=config.max_places)
