"""The watch on simulated traffic: what it takes back, what it keeps, and what it does not let itself be fooled by."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from serving.engine import Proposed, Stratum, Verification, WatchedRound, stratum_of
from serving.hotswap.breaker import MOVING_TARGET_PATIENCE_S, LiveWatch, TrialOutcome, Verdict, WatchRules
from speculator.draft.sampling_params import SamplingParams
from tests.serving.watching import CHAT, CODE, DEPTH, acceptance_for, rounds, run_trial, take_in

REAL_SPREAD = 0.15
"""Of requests' acceptance; an accept length of 1.7 then spreads by 20%, as that of real answers does."""


def _trial(
    seed: int, change: float, *, length: float = 1.7, spread: float = REAL_SPREAD, luck: float = 0.0, batch: int = 1
) -> Verdict:
    """An incumbent of this accept length on two strata, then a version that differs by `change`; the incumbent's record
    flatters it by `luck`.
    """
    rng = random.Random(seed)
    watch = LiveWatch(1)
    record = {CHAT: length * (1 + luck), CODE: 1.3 * length * (1 + luck)}
    take_in(watch, rounds(rng, 1, record, spread=spread, batch=batch), 1000)
    after = {CHAT: length * (1 + change), CODE: 1.3 * length * (1 + change)}
    return run_trial(watch, 2, rounds(rng, 2, after, spread=spread, batch=batch), look_every=20)


@pytest.mark.parametrize(("batch", "luck"), [(1, 0.0), (4, 0.0), (1, 0.05)])
def test_an_equal_version_is_kept(batch: int, luck: float) -> None:
    """Also where the incumbent's record flatters it. One request at a time, all of the first may be hard ones."""
    verdicts = [_trial(seed, 0.0, batch=batch, luck=luck) for seed in range(60)]
    assert sum(verdict.outcome is TrialOutcome.ROLLED_BACK for verdict in verdicts) <= 1


def test_a_better_version_is_kept() -> None:
    verdicts = [_trial(seed, 0.1) for seed in range(40)]
    assert all(verdict.outcome is TrialOutcome.PROMOTED for verdict in verdicts)


@pytest.mark.parametrize(("length", "change", "batch"), [(1.7, -0.3, 4), (1.7, -0.35, 1), (3.0, -0.5, 1)])
def test_a_version_that_accepts_a_third_of_the_incumbents_proposals_is_taken_back(
    length: float, change: float, batch: int
) -> None:
    verdicts = [_trial(seed, change, length=length, batch=batch) for seed in range(30)]
    assert all(verdict.outcome is TrialOutcome.ROLLED_BACK for verdict in verdicts)
    assert all(verdict.reason == "accepts less than the incumbent" for verdict in verdicts)
    taken = sorted(float(verdict.numbers["rounds"] or 0) for verdict in verdicts)
    assert taken[15] <= 700


def test_requests_that_differ_by_chance_alone_are_judged_the_sooner() -> None:
    """What chance does to a request's sum is no difference between requests."""
    taken = []
    for seed in range(2):
        rng, watch = random.Random(seed), LiveWatch(1)
        take_in(watch, rounds(rng, 1, {CHAT: 3.0}), 8000)
        verdict = run_trial(watch, 2, rounds(rng, 2, {CHAT: 2.3}), look_every=20)
        assert verdict.outcome is TrialOutcome.ROLLED_BACK
        taken.append(float(verdict.numbers["rounds"] or 0))
    assert sum(taken) / 2 < 475


def _looks(rng: random.Random, version: int, rate: float) -> Iterator[WatchedRound]:
    """Endless looks at a head that is not used, which are right so often."""
    stratum = Stratum(CHAT.domain, CHAT.sampling, of_probes=True)
    for number in itertools.count():
        look = Verification(f"look-{version}-{number // 20}", stratum, int(rng.random() < rate), 1)
        yield WatchedRound(version, 1, True, 0.04, 1, (look,))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("looks_before", "rate", "outcome"),
    [(200, 0.3, TrialOutcome.PROMOTED), (200, 0.02, TrialOutcome.ROLLED_BACK), (0, 0.3, TrialOutcome.PROMOTED)],
)
def test_looks_are_compared_with_looks_only(seed: int, looks_before: int, rate: float, outcome: TrialOutcome) -> None:
    """In rounds that ask it the head is right six times in ten, where it is looked at three times."""
    rng, watch = random.Random(seed), LiveWatch(1)
    take_in(watch, rounds(rng, 1, {CHAT: 1 + 0.6 + 0.36 + 0.22 + 0.13}), 1000)
    take_in(watch, _looks(rng, 1, 0.3), looks_before)
    verdict = run_trial(watch, 2, _looks(rng, 2, rate))
    assert verdict.outcome is outcome


@pytest.mark.parametrize(("batch", "most_rounds"), [(1, 100), (4, 50)])
def test_a_useless_version_is_caught_within_fifty_rounds_or_five_seconds(batch: int, most_rounds: int) -> None:
    """A round is 40 ms."""
    for seed in range(20):
        rng, watch = random.Random(seed), LiveWatch(1)
        take_in(watch, rounds(rng, 1, {CHAT: 1.8}, batch=batch, spread=0.02), 2000)
        verdict = run_trial(watch, 2, rounds(rng, 2, {CHAT: 1.0}, batch=batch), look_every=10, most_rounds=most_rounds)
        assert verdict.outcome is TrialOutcome.ROLLED_BACK


def test_another_mix_of_requests_is_no_other_draft() -> None:
    for seed in range(20):
        rng, watch = random.Random(seed), LiveWatch(1)
        lengths = {CHAT: 1.3, CODE: 2.4}
        take_in(watch, rounds(rng, 1, lengths, mix={CHAT: 0.3, CODE: 0.7}), 3000)
        verdict = run_trial(watch, 2, rounds(rng, 2, lengths, mix={CHAT: 0.95, CODE: 0.05}))
        assert verdict.outcome is TrialOutcome.PROMOTED
        assert float(verdict.numbers["accept_length"] or 0) < 1.5 < 2.0


def test_harder_requests_do_not_make_a_draft_slow() -> None:
    """Traffic moves while an equal version is on trial: to requests that the incumbent is known by, or not."""
    for seed in range(8):
        for known in (0.3, 0.0):
            rng, watch = random.Random(seed), LiveWatch(1)
            lengths, mix = {CHAT: 1.2, CODE: 2.2}, {CHAT: known, CODE: 1 - known}
            take_in(watch, rounds(rng, 1, lengths, mix=mix, control_share=0.05), 2000)
            harder = rounds(rng, 2, lengths, mix={CHAT: 1.0, CODE: 0.0}, control_share=0.05)
            verdict = run_trial(watch, 2, harder, look_every=1000)
            assert verdict.outcome is TrialOutcome.PROMOTED
            assert float(verdict.numbers["time_change"] or 0) == pytest.approx(0.0, abs=0.1)


def test_drafting_is_not_slower_than_an_incumbent_that_does_not_draft() -> None:
    rng, watch = random.Random(0), LiveWatch(1)
    for turn in range(2000):
        watch.observe(WatchedRound(1, 1, turn % 20 > 0, 0.03 * rng.uniform(0.9, 1.1), 1, ()))
    verdict = run_trial(watch, 2, rounds(rng, 2, {CHAT: 1.0}, control_share=0.05, round_s=0.06))
    assert verdict.outcome is TrialOutcome.PROMOTED
    assert "time_change" not in verdict.numbers, "none of its rounds has a like"


def mixed(
    rng: random.Random,
    version: int,
    length: float,
    *,
    asked: float,
    looked: float = 0.15,
    by_text: int = 0,
    after: float = 1.0,
    draft_s: float = 0.04,
    plain_s: float = 0.03,
    text_s: float = 0.04,
) -> Iterator[WatchedRound]:
    """One request a round, beside earlier text. The head is asked in so many rounds; in the others earlier text
    proposes or nobody, and some of these look at the head. Where earlier text is used it takes what is easy: a head
    that commits `length` tokens of everything commits 1 + `after` × (length − 1) of the rest, and half of that where
    it is looked at. One round in twenty is a control round.
    """
    share = min(int(4 * (1 - asked) + 0.99), 4)
    stratum = Stratum(CHAT.domain, CHAT.sampling, remembered=share)
    examined = Stratum(CHAT.domain, CHAT.sampling, of_probes=True, remembered=share)
    rate = acceptance_for(1 + after * (length - 1))
    for number in itertools.count():
        request, noise = f"{version}-{number // 20}", rng.uniform(0.9, 1.1)
        if rng.random() < 0.05:
            yield WatchedRound(version, 1, False, plain_s * noise, 1, ())
        elif rng.random() < asked:
            accepted = 0
            while accepted < DEPTH and rng.random() < rate:
                accepted += 1
            one = Verification(request, stratum, accepted, DEPTH)
            seconds = draft_s * noise * (1 + 0.04 * by_text)
            yield WatchedRound(version, 1, True, seconds, 1 + accepted, (one,), Proposed(DEPTH, by_text))
        elif rng.random() < looked:
            look = Verification(request, examined, int(rng.random() < rate / 2), 1)
            yield WatchedRound(version, 1, True, 0.034 * noise, 1, (look,))
        else:
            from_text = rng.random() < 0.7
            committed = rng.randint(2, 5) if from_text else 1
            yield WatchedRound(version, 1, True, (text_s if from_text else plain_s) * noise, committed, ())


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"asked": 0.9}, {"asked": 0.2, "after": 0.25}),
        ({"asked": 0.2, "after": 0.25}, {"asked": 0.9}),
        ({"asked": 0.9}, {"asked": 0.0, "after": 0.25}),
        ({"asked": 0.0, "after": 0.25}, {"asked": 0.2}),
        ({"asked": 0.5}, {"asked": 0.5, "by_text": 8}),
        ({"asked": 0.2, "text_s": 0.03}, {"asked": 0.2, "text_s": 0.06}),
    ],
)
def test_traffic_that_repeats_more_or_less_of_earlier_text_is_no_fault_of_a_better_draft(
    before: dict[str, float], now: dict[str, float]
) -> None:
    """The share of remembered text changes as the version comes; the version is 35% better on the same text."""
    for incumbent, version in ((1.0, 1.35), (1.5, 2.025)):
        for seed in range(5):
            rng, watch = random.Random(seed), LiveWatch(1)
            take_in(watch, mixed(rng, 1, incumbent, **before), 3000)  # type: ignore[arg-type]
            verdict = run_trial(watch, 2, mixed(rng, 2, version, **now), look_every=100)  # type: ignore[arg-type]
            assert verdict.outcome is TrialOutcome.PROMOTED, verdict


def test_a_slower_draft_is_found_out_where_it_takes_part_whatever_earlier_text_does() -> None:
    """It proposes in half of the rounds, and these take 40% longer."""
    for seed in range(5):
        rng, watch = random.Random(seed), LiveWatch(1)
        take_in(watch, mixed(rng, 1, 1.7, asked=0.5), 3000)
        verdict = run_trial(watch, 2, mixed(rng, 2, 1.7, asked=0.5, draft_s=0.056))
        assert (verdict.outcome, verdict.reason) == (TrialOutcome.ROLLED_BACK, "slower a token than the incumbent")


def test_deeper_chains_pay_for_themselves() -> None:
    """A round of more proposals takes longer: it is another kind of round."""
    rng, watch = random.Random(0), LiveWatch(1)
    take_in(watch, rounds(rng, 1, {CHAT: 3.0}, depth=2, control_share=0.05), 3000)
    verdict = run_trial(watch, 2, rounds(rng, 2, {CHAT: 3.0}, control_share=0.05, round_s=0.048))
    assert verdict.outcome is TrialOutcome.PROMOTED


def test_a_version_that_costs_more_for_the_same_acceptance_is_slower() -> None:
    for seed in range(5):
        rng, watch = random.Random(seed), LiveWatch(1)
        take_in(watch, rounds(rng, 1, {CHAT: 1.7}, control_share=0.05), 3000)
        verdict = run_trial(watch, 2, rounds(rng, 2, {CHAT: 1.7}, control_share=0.05, round_s=0.056))
        assert verdict.outcome is TrialOutcome.ROLLED_BACK
        assert verdict.reason == "slower a token than the incumbent"
        assert float(verdict.numbers["time_change"] or 0) == pytest.approx(0.4, abs=0.1)


def test_a_version_whose_longer_rounds_commit_more_for_it_is_not_slower() -> None:
    """A quarter longer, for half as many tokens again."""
    for seed in range(2):
        rng, watch = random.Random(seed), LiveWatch(1)
        take_in(watch, rounds(rng, 1, {CHAT: 1.7}, control_share=0.05), 3000)
        verdict = run_trial(watch, 2, rounds(rng, 2, {CHAT: 2.6}, control_share=0.05, round_s=0.05))
        assert verdict.outcome is TrialOutcome.PROMOTED, verdict


@pytest.mark.parametrize("control_share", [0.0, 0.05])
def test_a_machine_that_becomes_busy_is_not_the_drafts_fault(control_share: float) -> None:
    for seed in range(5):
        rng, watch = random.Random(seed), LiveWatch(1)
        take_in(watch, rounds(rng, 1, {CHAT: 1.7}, control_share=control_share), 3000)
        busy = rounds(rng, 2, {CHAT: 1.7}, control_share=control_share, round_s=0.08, plain_s=0.06)
        assert run_trial(watch, 2, busy).outcome is TrialOutcome.PROMOTED


def test_an_incumbent_that_never_went_so_deep_is_compared_at_its_depth() -> None:
    rng, watch = random.Random(0), LiveWatch(1)
    take_in(watch, rounds(rng, 1, {CHAT: 1.7}, depth=1), 2000)
    verdict = run_trial(watch, 2, rounds(rng, 2, {CHAT: 1.7}))
    assert verdict.outcome is TrialOutcome.PROMOTED
    # Deeper chains accept a fifth more, and that is not the draft's merit.
    assert float(verdict.numbers["accept_change"] or 0) < 0.1


def test_unknown_strata_are_counted_and_compared_with_nothing() -> None:
    rng, watch = random.Random(0), LiveWatch(1)
    take_in(watch, rounds(rng, 1, {CHAT: 2.0}), 2000)
    verdict = run_trial(watch, 2, rounds(rng, 2, {CODE: 1.0}))
    assert (verdict.outcome, verdict.reason) == (TrialOutcome.PROMOTED, "nothing to compare its accept length with")
    assert verdict.numbers["compared"] == 0
    # From now on they are known.
    assert run_trial(watch, 3, rounds(rng, 3, {CODE: 1.5})).numbers["compared"]


def test_it_is_ready_when_the_incumbent_is_known() -> None:
    rng, watch = random.Random(0), LiveWatch(1)
    assert not watch.is_ready(), "an idle engine has no need of another version"
    source = rounds(rng, 1, {CHAT: 2.0})
    take_in(watch, source, 499)
    assert not watch.is_ready()
    take_in(watch, source, 1)
    assert watch.is_ready()
    watch.restart(1)
    assert not watch.is_ready()


@pytest.mark.parametrize("num_known", [29, 30])
def test_a_stratum_that_was_hardly_seen_is_compared_with_nothing(num_known: int) -> None:
    rng, watch = random.Random(0), LiveWatch(1)
    take_in(watch, rounds(rng, 1, {CHAT: 2.0}), 1000)
    take_in(watch, rounds(rng, 1, {CODE: 2.0}), num_known)
    watch.begin(2)
    take_in(watch, rounds(rng, 2, {CODE: 2.0}), 50)
    assert watch.trial_compared == (50 if num_known == 30 else 0)


def test_a_version_under_suspicion_is_not_kept_yet() -> None:
    rng, watch = random.Random(0), LiveWatch(1, WatchRules(enough_rounds=12, enough_compared=12))
    take_in(watch, rounds(rng, 1, {CHAT: 2.0}), 1000)
    for length, outcome in ((2.0, TrialOutcome.PROMOTED), (1.0, TrialOutcome.WATCHING)):
        watch.begin(2)
        take_in(watch, rounds(rng, 2, {CHAT: length}), 12)
        assert watch.judge().outcome is outcome
        watch.end(is_kept=False)


def test_a_round_is_paired_with_one_control_round() -> None:
    """A slow round and many control rounds after it are one case, and not many."""
    rng, watch = random.Random(0), LiveWatch(1)
    take_in(watch, rounds(rng, 1, {CHAT: 1.7}, control_share=0.05), 3000)
    watch.begin(2)
    take_in(watch, rounds(rng, 2, {CHAT: 1.7}, round_s=0.2), 1)
    take_in(watch, rounds(rng, 2, {CHAT: 1.7}, control_share=1.0), 40)
    verdict = watch.judge()
    assert (verdict.numbers["draft_rounds"], verdict.numbers["rounds"]) == (1, 41)
    assert float(verdict.numbers["time_change"] or 0) > 1
    assert verdict.outcome is TrialOutcome.WATCHING


def test_rounds_count_for_the_version_that_made_them() -> None:
    rng, watch = random.Random(0), LiveWatch(1)
    take_in(watch, rounds(rng, 1, {CHAT: 3.0}), 100)
    watch.begin(2)
    take_in(watch, rounds(rng, 1, {CHAT: 3.0}), 50)
    assert watch.judge().numbers["rounds"] == 0, "it was launched before the swap"
    take_in(watch, rounds(rng, 2, {CHAT: 1.5}), 400)
    assert watch.accept_length == pytest.approx(1.5, abs=0.2), "of the version in service"
    watch.end(is_kept=True)
    assert watch.is_ready(), "its trial is part of what is known of it"
    take_in(watch, rounds(rng, 2, {CHAT: 1.5}), 50)
    assert watch.baseline_verifications == 550


def test_patience_with_a_moving_target_begins_with_its_next_move_once_the_incumbent_was_known() -> None:
    now_s = [0.0]
    rng, watch = random.Random(0), LiveWatch(1, clock=lambda: now_s[0])
    take_in(watch, rounds(rng, 1, {CHAT: 2.0}, target_version=1), 1000)
    assert watch.is_ready()
    now_s[0] = 2 * MOVING_TARGET_PATIENCE_S
    take_in(watch, rounds(rng, 1, {CHAT: 2.0}, target_version=2), 10)
    assert not watch.is_ready()
    now_s[0] += MOVING_TARGET_PATIENCE_S
    assert watch.is_ready()


@pytest.mark.parametrize(("length", "is_kept"), [(1.7, True), (1.0, False)])
def test_a_version_that_looks_no_worse_makes_room_for_a_newer_one(length: float, is_kept: bool) -> None:
    for seed in range(10):
        rng, watch = random.Random(seed), LiveWatch(1)
        take_in(watch, rounds(rng, 1, {CHAT: 1.7}), 1000)
        watch.begin(2)
        take_in(watch, rounds(rng, 2, {CHAT: length}), 600)
        if is_kept:
            assert watch.judge().outcome is TrialOutcome.WATCHING, "nobody waits for it"
        verdict = watch.judge(is_successor_waiting=True)
        assert (verdict.reason == "looks no worse, and a newer version waits") == is_kept


def test_a_version_that_is_never_asked_is_neither_taken_back_nor_found_as_good() -> None:
    rng, watch = random.Random(0), LiveWatch(1)
    take_in(watch, rounds(rng, 1, {CHAT: 1.7}, control_share=0.05), 1000)
    watch.begin(2)
    for _ in range(15):
        for turn in range(1000):
            watch.observe(WatchedRound(2, 1, turn % 20 > 0, 0.06, 1, ()))
        watch.update()
        assert watch.judge().outcome is TrialOutcome.WATCHING
    verdict = watch.judge(is_successor_waiting=True)
    assert verdict.outcome is TrialOutcome.WITHDRAWN, "there is no use for more of its time, and nothing confirms it"
    for _ in range(1000):
        watch.observe(WatchedRound(2, 1, True, 0.06, 1, ()))
    watch.update()
    verdict = watch.judge()
    assert (verdict.outcome, verdict.reason) == (TrialOutcome.PROMOTED, "nothing to compare its accept length with")


def rarely(source: Iterator[WatchedRound], every: int) -> Iterator[WatchedRound]:
    """The same version where drafting hardly pays: one round in `every` drafts."""
    for number, round_ in enumerate(source):
        yield round_ if number % every == 0 else WatchedRound(round_.version, 1, True, 0.03, 1, ())


def test_versions_that_are_hardly_used_do_not_hold_up_the_next() -> None:
    """The first of a lineage do not pay; the one that does waits behind them."""
    rng, watch = random.Random(0), LiveWatch(1)
    take_in(watch, rarely(rounds(rng, 1, {CHAT: 1.05}), 20), 600)
    assert watch.is_ready()
    watch.begin(2)
    take_in(watch, rarely(rounds(rng, 2, {CHAT: 1.1}), 10), 400)
    assert watch.judge(is_successor_waiting=True).outcome is TrialOutcome.WATCHING
    take_in(watch, rarely(rounds(rng, 2, {CHAT: 1.1}), 10), 200)
    assert watch.judge(is_successor_waiting=True).outcome is TrialOutcome.PROMOTED


def test_a_useless_version_is_found_out_though_it_is_hardly_used() -> None:
    for seed in range(10):
        rng, watch = random.Random(seed), LiveWatch(1)
        take_in(watch, rounds(rng, 1, {CHAT: 1.8}), 2000)
        verdict = run_trial(
            watch,
            2,
            itertools.chain(itertools.islice(rounds(rng, 2, {CHAT: 1.0}), 50), rarely(rounds(rng, 2, {CHAT: 1.0}), 50)),
            look_every=10,
        )
        assert verdict.outcome is TrialOutcome.ROLLED_BACK


def test_rounds_of_other_versions_say_nothing() -> None:
    rng, watch = random.Random(0), LiveWatch(1)
    take_in(watch, rounds(rng, 9, {CHAT: 2.0}), 100)
    assert not watch.is_ready()
    assert watch.baseline_verifications == 0


@pytest.mark.parametrize(
    ("sampling", "name"),
    [
        (SamplingParams(temperature=0.0), "greedy"),
        (SamplingParams(temperature=0.68), "t0.7"),
        (SamplingParams(temperature=1.0, top_p=0.9), "t1.0 cut"),
        (SamplingParams(temperature=50.0, top_k=3), "t2.0 cut"),
    ],
)
def test_sampling_is_part_of_the_stratum(sampling: SamplingParams, name: str) -> None:
    assert stratum_of("code", sampling) == Stratum("code", name)
