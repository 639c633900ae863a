"""Suffix drafts: the index agrees with a brute-force search; tenants are apart; windows hold; estimates are honest."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from speculator.proposals.draft_tree import ROOT, DraftTree
from speculator.proposals.estimates import Calibration
from speculator.proposals.suffix_drafter import (
    CalibrationKey,
    GuessRank,
    SuffixConfig,
    SuffixDrafter,
    SuffixRequest,
    TenantText,
    TextSource,
)
from speculator.proposals.suffix_index import NEW_TEXT, Match, SuffixIndex, Vote

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=6)
APPENDS = st.lists(st.tuples(st.integers(0, 2), TOKENS), max_size=25)
CONTEXT = st.lists(st.integers(0, 3), max_size=12)


class SlowIndex:
    """The same index as plain lists of (position, token), searched from end to end."""

    def __init__(self, capacity: int, max_match: int, max_places: int) -> None:
        self.capacity, self.max_match, self.max_places = capacity, max_match, max_places
        self.texts: dict[int, list[tuple[int, int]]] = {}
        self.end = 0

    def append(self, text: int, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.texts.setdefault(text, []).append((self.end, token))
            self.end += 1
            for name, entries in self.texts.items():
                self.texts[name] = [entry for entry in entries if entry[0] >= self.end - self.capacity]

    def match(self, context: Sequence[int]) -> Match:
        """Among the newest places of the last two tokens, or else of the last one, those that agree furthest back."""
        lengths = {
            position: self._agreement(context, [token for _, token in entries[: at + 1]])
            for entries in self.texts.values()
            for at, (position, _) in enumerate(entries[:-1])
        }
        for least in (2, 1):
            newest = sorted((p for p, length in lengths.items() if length >= least), reverse=True)[: self.max_places]
            if newest:
                longest = max(lengths[place] for place in newest)
                return Match(longest, [place for place in newest if lengths[place] == longest])
        return Match(0, [])

    def _agreement(self, context: Sequence[int], text: Sequence[int]) -> int:
        limit = min(self.max_match, len(context), len(text))
        return max((n for n in range(1, limit + 1) if list(context[-n:]) == list(text[-n:])), default=0)

    def votes(self, places: Sequence[int]) -> list[Vote]:
        following = [
            next(((p, token) for p, token in entries if p > position), None)
            for position, entries in self._homes(places)
        ]
        heard = [found for found in following if found is not None]
        # Counter keeps the order in which tokens were first seen, which is newest place first.
        return [
            Vote(token, count, len(heard), [place for place, other in heard if other == token])
            for token, count in Counter(token for _, token in heard).most_common()
        ]

    def _homes(self, places: Sequence[int]) -> list[tuple[int, list[tuple[int, int]]]]:
        return [(p, next(entries for entries in self.texts.values() if p in dict(entries))) for p in places]


@example(  # the newest place of a pair leaves the window before an older one of another text
    appends=[(2, [2]), (0, [2, 2]), (2, [2, 0, 0]), (0, [0] * 6)],
    context=[2, 2],
    capacity=11,
    max_match=2,
    max_places=1,
)
@given(
    appends=APPENDS,
    context=CONTEXT,
    capacity=st.integers(1, 30),
    max_match=st.integers(1, 6),
    max_places=st.integers(1, 4),
)
def test_the_index_finds_what_a_search_from_end_to_end_finds(
    appends: list[tuple[int, list[int]]], context: list[int], capacity: int, max_match: int, max_places: int
) -> None:
    index = SuffixIndex(capacity, max_match=max_match, max_places=max_places)
    slow = SlowIndex(capacity, max_match, max_places)
    handles: dict[int, int] = {}
    for text, tokens in appends:
        handles[text] = index.append(handles.get(text, NEW_TEXT), tokens)
        slow.append(text, tokens)
        match = index.match(context)
        assert match == slow.match(context)
        places = match.places
        for _ in range(4):
            votes = index.votes(places)
            assert votes == slow.votes(places)
            places = [place for vote in votes[-1:] for place in vote.places]
    assert len(index) == min(slow.end, capacity)


@given(text=st.lists(st.integers(0, 2), min_size=2, max_size=60), context=CONTEXT)
def test_with_enough_places_the_match_is_the_longest_and_votes_count_every_occurrence(
    text: list[int], context: list[int]
) -> None:
    index = SuffixIndex(1000, max_match=32, max_places=1000)
    index.append(NEW_TEXT, text)
    match = index.match(context)
    ends = [at for at in range(1, len(text)) if match.length and text[:at][-match.length :] == context[-match.length :]]
    assert len(match.places) == len(ends)
    longer = context[-match.length - 1 :]
    assert len(context) == match.length or longer not in [text[:at][-len(longer) :] for at in range(1, len(text))]
    if ends:
        following = Counter(text[at] for at in ends)
        votes = index.votes(match.places)
        assert {vote.token: vote.agreeing for vote in votes} == following
        assert [vote.agreeing for vote in votes] == sorted(following.values(), reverse=True)
        assert {vote.total for vote in votes} == {len(ends)}


def test_the_window_forgets_the_oldest_tokens_and_memory_stays() -> None:
    index = SuffixIndex(100)
    index.append(NEW_TEXT, [7, 8, 9])
    assert index.match([7, 8]).length == 2
    text = NEW_TEXT
    for token in range(1000, 2000):
        text = index.append(text, [token])
    assert len(index) == 100
    assert index.match([7, 8]).length == 0
    assert index.match([1899, 1900]).length == 1  # the pair's first token has left the window
    assert index.match([1900, 1901]).length == 2
    assert all(len(kept) <= 256 for kept in vars(index).values() if not isinstance(kept, int))


def test_a_search_passes_over_a_bounded_number_of_ends() -> None:
    index = SuffixIndex(10_000)
    index.append(NEW_TEXT, [5, 6])
    for _ in range(200):
        index.append(NEW_TEXT, [5])
    assert index.match([5]).length == 1
    for _ in range(200):
        index.append(NEW_TEXT, [5])
    assert index.match([5]).length == 0


@pytest.mark.parametrize("name", ["capacity", "max_match", "max_places"])
def test_an_index_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SuffixIndex(**{"capacity": 1, "max_match": 1, "max_places": 1, name: 0})


# -- requests ---------------------------------------------------------------------------------------------------------

SECRET = [501, 502, 503, 504, 505, 506, 507, 508]


def ask(request: SuffixRequest, max_tokens: int = 8) -> DraftTree:
    return request.propose(max_tokens).tree


def test_a_request_proposes_from_its_prompt_and_its_own_answer() -> None:
    request = SuffixDrafter().start([1, 2, 3, 4, 5, 6], tenant="a")
    request.commit([9, 2, 3])
    assert ask(request).tokens[:3] == (4, 5, 6)
    assert set(request.propose(8).sources) == {TextSource.OWN}
    request.commit([40, 41, 42, 43, 9, 2, 3])
    proposal = request.propose(8)
    assert proposal.chosen[0].length - 1 == 3
    assert proposal.tree.tokens[0] == 40


def test_an_answer_of_the_tenant_serves_its_other_requests_while_it_is_still_written() -> None:
    drafter = SuffixDrafter()
    first = drafter.start([1], tenant="a")
    second = drafter.start([2], tenant="a")
    first.commit(SECRET)
    second.commit(SECRET[:4])
    proposal = second.propose(8)
    assert proposal.sources == (TextSource.TENANT,) * 4
    assert proposal.tree == DraftTree.chain(SECRET[4:], proposal.tree.probabilities)


def test_what_it_saves_to_be_given_tokens_is_what_rounds_after_them_would_have_earned() -> None:
    def begun() -> SuffixRequest:
        request = SuffixDrafter().start(list(range(100, 130)), tenant="a")
        request.commit([5, 100, 101, 102])
        return request

    request, promised = begun(), []
    for count in (1, 2):
        other = begun()
        other.commit([103, 104][:count])
        promised.append(sum(ask(other).reaches))
    assert min(promised) > 1
    before = ask(request)
    assert request.rounds_saved([103, 104], 8) == pytest.approx(sum(1 / (1 + promise) for promise in promised))
    assert request.rounds_saved([77, 78], 8) == 2, "where nothing follows, all that would have taken a round each"
    assert request.rounds_saved([103, 104], 0) == 2, "nothing is proposed there"
    assert ask(request) == before


def test_of_equal_matches_the_group_is_taken_before_the_tenant() -> None:
    drafter = SuffixDrafter()
    drafter.start([1], tenant="a").commit([*SECRET[:4], 7])
    drafter.start([1], tenant="a", group_id="g").commit([*SECRET[:4], 8])
    member = drafter.start([1], tenant="a", group_id="g")
    member.commit(SECRET[:4])
    proposal = member.propose(8)
    assert proposal.tree.tokens == (8, 7)
    assert proposal.tree.parents == (ROOT, ROOT)
    assert proposal.sources == (TextSource.GROUP, TextSource.TENANT)


@given(
    events=st.lists(
        st.tuples(
            st.sampled_from("ab"), st.sampled_from(["", "g"]), st.booleans(), st.lists(st.integers(0, 3), max_size=8)
        ),
        max_size=12,
    )
)
def test_no_tenant_is_ever_proposed_anothers_token(events: list[tuple[str, str, bool, list[int]]]) -> None:
    """Tenants write disjoint tokens after the same contexts and under the same group names."""
    drafter = SuffixDrafter(SuffixConfig(max_tenants=1, max_groups=1))
    foreign = {"a": 1000, "b": 2000}
    running: list[tuple[str, SuffixRequest]] = []
    for tenant, group_id, shared, tokens in events:
        request = drafter.start([0], tenant=tenant, group_id=group_id, shared=shared)
        request.commit([part for token in tokens for part in (token, foreign[tenant] + token)] + [0])
        running.append((tenant, request))
        for name, other in running:
            assert all(token < 1000 or token // 1000 * 1000 == foreign[name] for token in ask(other).tokens)


def test_a_request_that_is_not_shared_neither_takes_nor_gives() -> None:
    drafter = SuffixDrafter()
    private = drafter.start([1], tenant="a", group_id="g", shared=False)
    private.commit(SECRET)
    other = drafter.start([2], tenant="a", group_id="g")
    other.commit(SECRET[:4])
    assert ask(other).tokens == ()
    other.commit([601, 602, 603])
    private.commit([601, 602])
    assert ask(private).tokens == ()


def test_least_recently_used_tenants_and_groups_are_dropped() -> None:
    drafter = SuffixDrafter(SuffixConfig(max_tenants=2, max_groups=1))
    for tenant in ("a", "b", "a", "c"):
        drafter.start([1], tenant=tenant).commit(SECRET)
    for tenant, remembers in (("a", True), ("b", False)):
        late = drafter.start([2], tenant=tenant)
        late.commit(SECRET[:4])
        assert bool(ask(late).tokens) is remembers
    drafter.start([1], tenant="z", group_id="g").commit(SECRET[:5])
    drafter.start([1], tenant="z", group_id="h").commit(SECRET)
    late = drafter.start([2], tenant="z", group_id="g")
    late.commit(SECRET[:4])
    assert set(late.propose(8).sources) == {TextSource.TENANT}


# -- budgets and probabilities ----------------------------------------------------------------------------------------


def repeating(config: SuffixConfig, match: int) -> SuffixRequest:
    """A request whose last `match` tokens occurred before, with twenty tokens after them."""
    request = SuffixDrafter(config).start(list(range(100, 100 + match + 20)), tenant="a")
    request.commit([5, *range(100, 100 + match)])
    return request


@pytest.mark.parametrize(
    ("match", "alpha", "longest"), [(1, 2.0, 2), (3, 2.0, 6), (3, 1.0, 3), (3, 4.0, 12), (12, 2.0, 16)]
)
def test_a_chain_is_at_most_alpha_times_its_match(match: int, alpha: float, longest: int) -> None:
    proposal = repeating(SuffixConfig(alpha=alpha, min_reach=0.0), match).propose(16)
    assert proposal.chosen[0].length - 1 == match
    assert len(proposal.tree.tokens) == longest
    assert proposal.tree.is_chain


def test_a_chain_ends_where_it_is_hardly_reached() -> None:
    config = SuffixConfig(min_reach=0.3)
    proposal = ask(repeating(config, 3))
    whole = ask(repeating(SuffixConfig(min_reach=0.0), 3))
    assert 0 < len(proposal.tokens) < len(whole.tokens)
    assert whole.first(len(proposal.tokens)) == proposal
    reach = 1.0
    for probability in proposal.probabilities:
        reach *= probability
    assert reach >= 0.3 > reach * whole.probabilities[len(proposal.tokens)]


CONTEXT_OF_FORK = [100, 101, 102]


def forking(config: SuffixConfig | None = None, *tails: Sequence[int]) -> SuffixRequest:
    return forked(SuffixDrafter(config).start([100], tenant="a"), *tails)


def forked(request: SuffixRequest, *tails: Sequence[int]) -> SuffixRequest:
    """A request whose last tokens were followed by each of the `tails` before."""
    tails = tails or ((7, 1), (7, 1), (8, 2))
    for number, tail in enumerate(tails):
        request.commit([*CONTEXT_OF_FORK, *tail, 900 + number])
    request.commit(CONTEXT_OF_FORK)
    return request


def test_where_the_text_went_on_in_several_ways_the_proposal_is_a_tree() -> None:
    tree = ask(forking())
    assert tree.tokens[:2] == (7, 1)
    assert {(8, ROOT), (2, tree.tokens.index(8))} <= set(zip(tree.tokens, tree.parents, strict=True))
    assert tree.reaches == sorted(tree.reaches, reverse=True), "its first nodes are the best tree of so many"
    first = [tree.probabilities[tree.tokens.index(token)] for token in (7, 8)]
    assert sum(first) < 1


def test_of_two_matches_that_name_a_token_the_surer_one_is_believed() -> None:
    """The request's own text says 8 once in fifteen times, and other answers always."""
    drafter, fresh = SuffixDrafter(), itertools.count(1000)
    for _ in range(2):
        drafter.start([1], tenant="a").commit([40, 50, 51, 52, 8, next(fresh)])
    own = [part for tail in (7,) * 14 + (8,) for part in (next(fresh), 50, 51, 52, tail, next(fresh))]
    request = drafter.start(own, tenant="a")
    request.commit([40, 50, 51, 52])
    by_token = {guess.token: guess for guess in request.propose(16).chosen}
    assert (by_token[7].kind.source, by_token[7].kind.rank) == (TextSource.OWN, GuessRank.FIRST)
    assert (by_token[8].kind.source, by_token[8].kind.rank) == (TextSource.TENANT, GuessRank.BESIDE)
    unnamed = 1 - by_token[7].probability
    assert by_token[8].predicted == pytest.approx(unnamed * 2 / (2 + 3.5 / 4))


def test_with_a_width_of_one_trees_are_chains() -> None:
    tree = ask(forking(SuffixConfig(width=1)))
    assert tree.is_chain
    assert tree.tokens[:2] == (7, 1)
    tails = [(token,) for token in (1, 2, 3, 4, 5)]
    assert ask(forking(SuffixConfig(min_reach=0.01), *tails)).parents.count(ROOT) == 3
    assert ask(forking(SuffixConfig(min_reach=0.01, width=4), *tails)).parents.count(ROOT) == 4


def test_continuations_beside_the_most_frequent_one_are_corrected_apart() -> None:
    """Those that never come are no longer proposed; the others are not held back by them."""
    request, fresh = SuffixDrafter().start([0], tenant="a"), itertools.count(1000)
    trees = []
    for _ in range(200):
        fork = [next(fresh), next(fresh)]
        for token in (7, 8, 7):
            request.commit([*fork, token, next(fresh)])
        request.commit(fork)
        trees.append(ask(request))
        request.commit([7, next(fresh)])
    assert [tree.tokens[:1] for tree in trees] == [(7,)] * 200
    assert 8 in trees[0].tokens
    assert 8 not in trees[-1].tokens
    assert trees[-1].probabilities[0] > trees[0].probabilities[0]


def test_it_is_followed_into_any_branch() -> None:
    """A text that took the second way is judged there, too: what came behind it is right from then on."""
    judged: list[tuple[CalibrationKey, bool]] = []

    class Noted(Calibration):
        def add(self, kind: Any, predicted: float, *, accepted: bool) -> None:
            judged.append((kind, accepted))

    config = SuffixConfig(min_reach=0.01)
    tenant = TenantText(config)
    tenant.calibration = Noted()
    request = forked(SuffixRequest(config, [100], tenant, None))
    grown = ask(request)
    assert grown.child(grown.child(ROOT, 8) or 0, 2) is not None
    judged.clear()
    request.commit([8, 2, 902])
    firsts = [(kind.rank is GuessRank.FIRST, accepted) for kind, accepted in judged]
    assert firsts == [(True, False), (False, True), (True, True), (True, True)]


def test_more_agreement_and_a_longer_match_promise_more() -> None:
    def first(times: int, match: int, dissent: bool = False) -> float:
        request = SuffixDrafter().start([100], tenant="a")
        for _ in range(times):
            request.commit([*range(200, 200 + match), 7, 1])
        if dissent:
            request.commit([*range(200, 200 + match), 8, 1])
        request.commit(range(200, 200 + match))
        return ask(request).probabilities[0]

    assert first(1, 2) < first(1, 8)
    assert first(1, 2) < first(4, 2)
    assert first(4, 2, dissent=True) < first(4, 2)


def test_useless_proposals_stop_and_come_back_when_they_would_have_been_right() -> None:
    """The committed tokens judge a chain whether it was verified or not."""
    request, fresh = SuffixDrafter().start([0], tenant="a"), itertools.count(1)

    def proposed(truth_is_repeated: bool, rounds: int) -> list[int]:
        """How many tokens were proposed each time that a token seen once came again."""
        lengths = []
        for _ in range(rounds):
            seen, after, other = (next(fresh) for _ in range(3))
            request.commit([seen, after, seen])
            lengths.append(len(ask(request).tokens))
            request.commit([after if truth_is_repeated else other])
        return lengths

    useless = proposed(truth_is_repeated=False, rounds=500)
    assert useless[0] > 0
    assert sum(useless[-50:]) == 0
    assert min(proposed(truth_is_repeated=True, rounds=500)[-50:]) > 0


def test_a_request_that_copies_is_expected_to_copy_on() -> None:
    drafter, text = SuffixDrafter(), list(range(100, 200))
    copying, new = (drafter.start(text, tenant="a") for _ in range(2))
    for start in range(0, 60, 10):
        copying.commit(text[start : start + 10])
        ask(copying)
    new.commit(text[44:60])
    ours, theirs = (one.propose(1).chosen[0] for one in (copying, new))
    assert ours.usual == theirs.usual
    assert ours.probability > theirs.probability


@pytest.mark.parametrize("accepted", [0, 1])
def test_only_proposals_that_were_reached_are_judged(accepted: int) -> None:
    """Matches of 7 and of 8 tokens are of different kinds: a rejected first proposal says nothing about the second."""
    passages = [list(range(start, start + 30)) for start in (100, 200)]
    drafter = SuffixDrafter(SuffixConfig(min_reach=0.0, learns=False))
    first = drafter.start(passages[0] + passages[1], tenant="a")
    first.commit([5, *passages[0][:7]])
    before = ask(first).probabilities[:2]
    first.commit([*passages[0][7 : 7 + accepted], 99])
    # Another request: what the first itself has shown is of all kinds.
    second = drafter.start(passages[0] + passages[1], tenant="a")
    second.commit([6, *passages[1][:7]])
    after = ask(second).probabilities[:2]
    if accepted:
        assert after[0] > before[0]
        assert after[1] < before[1]
    else:
        assert after[0] < before[0]
        assert after[1] == before[1]
