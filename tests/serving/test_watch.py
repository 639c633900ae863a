"""The watch on simulated traffic: what it takes back, what it keeps, and what it does not let itself be fooled by."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterator

import pytest

from serving.evidence import Proposed, Stratum, Verification, WatchedRound, stratum_of
from serving.judgement import Outcome, Verdict, WatchRules
from serving.sequential import intraclass_correlation, mixture_bound
from serving.watch import LiveWatch
from speculator.sampling import SamplingParams
from tests.serving.watching import CHAT, CODE, DEPTH, acceptance_for, rounds, serve, try_out


def _trial(
    seed: int, change: float, *, baseline: int = 2000, length: float = 1.7, spread: float = 0.02, luck: float = 0.0
) -> Verdict:
    """An incumbent of this accept length on two strata, then a version that differs by `change`; the incumbent's record
    flatters it by `luck`.
    """
    rng = random.Random(seed)
    watch = LiveWatch(1)
    record = {CHAT: length * (1 + luck), CODE: 1.3 * length * (1 + luck)}
    serve(watch, rounds(rng, 1, record, spread=spread), baseline)
    after = {CHAT: length * (1 + change), CODE: 1.3 * length * (1 + change)}
    return try_out(watch, 2, rounds(rng, 2, after, spread=spread), look_every=100)


def test_an_equal_version_is_hardly_ever_rolled_back() -> None:
    verdicts = [_trial(seed, 0.0) for seed in range(200)]
    assert sum(verdict.outcome is Outcome.ROLLED_BACK for verdict in verdicts) <= 2
    assert sum(verdict.is_better for verdict in verdicts) <= 50


def test_a_better_version_is_never_rolled_back_and_mostly_found_out() -> None:
    verdicts = [_trial(seed, 0.1) for seed in range(40)]
    assert all(verdict.outcome is Outcome.PROMOTED for verdict in verdicts)
    assert sum(verdict.is_better for verdict in verdicts) >= 25


def test_an_incumbent_that_was_lucky_hardly_costs_an_equal_version_its_place() -> None:
    """Its record ended when it looked better than its own predecessor. Without the margin it costs one in nine."""
    verdicts = [_trial(seed, 0.0, baseline=1500, luck=0.03) for seed in range(60)]
    assert sum(verdict.outcome is Outcome.ROLLED_BACK for verdict in verdicts) <= 2


def test_a_version_that_is_ten_per_cent_worse_is_caught_within_four_thousand_verifications() -> None:
    verdicts = [_trial(seed, -0.1, baseline=4000) for seed in range(100)]
    caught = [verdict for verdict in verdicts if verdict.outcome is Outcome.ROLLED_BACK]
    in_time = [verdict for verdict in caught if float(verdict.numbers["verifications"] or 0) <= 4000]
    assert len(in_time) >= 95
    assert statistics.median(float(verdict.numbers["verifications"] or 0) for verdict in caught) <= 1500
    assert all(verdict.reason == "accepts less than the incumbent" for verdict in caught)


def _looks(rng: random.Random, version: int, rate: float) -> Iterator[WatchedRound]:
    """Endless looks at a head that is not used, which are right so often."""
    stratum = CHAT._replace(of_looks=True)
    for number in itertools.count():
        look = Verification(f"look-{version}-{number // 20}", stratum, int(rng.random() < rate), 1)
        yield WatchedRound(version, 1, True, 0.04, 1, (look,))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("looks_before", "rate", "outcome"),
    [(200, 0.3, Outcome.PROMOTED), (200, 0.02, Outcome.ROLLED_BACK), (0, 0.3, Outcome.PROMOTED)],
)
def test_looks_are_compared_with_looks_only(seed: int, looks_before: int, rate: float, outcome: Outcome) -> None:
    """In rounds that ask it the head is right six times in ten, where it is looked at three times."""
    rng, watch = random.Random(seed), LiveWatch(1)
    serve(watch, rounds(rng, 1, {CHAT: 1 + 0.6 + 0.36 + 0.22 + 0.13}), 1000)
    serve(watch, _looks(rng, 1, 0.3), looks_before)
    verdict = try_out(watch, 2, _looks(rng, 2, rate))
    assert verdict.outcome is outcome


@pytest.mark.parametrize(("batch", "most_rounds"), [(1, 100), (4, 50)])
def test_a_useless_version_is_caught_within_fifty_rounds_or_five_seconds(batch: int, most_rounds: int) -> None:
    """A round is 40 ms."""
    for seed in range(20):
        rng, watch = random.Random(seed), LiveWatch(1)
        serve(watch, rounds(rng, 1, {CHAT: 1.8}, batch=batch, spread=0.02), 2000)
        verdict = try_out(watch, 2, rounds(rng, 2, {CHAT: 1.0}, batch=batch), look_every=10, most_rounds=most_rounds)
        assert verdict.outcome is Outcome.ROLLED_BACK


def test_requests_that_differ_much_do_not_roll_a_good_version_back() -> None:
    """Fifty verifications of one hard request are not fifty pieces of evidence."""
    verdicts = [_trial(seed, 0.0, spread=0.15) for seed in range(30)]
    assert sum(verdict.outcome is Outcome.ROLLED_BACK for verdict in verdicts) <= 1


def test_another_mix_of_requests_is_no_other_draft() -> None:
    for seed in range(20):
        rng, watch = random.Random(seed), LiveWatch(1)
        lengths = {CHAT: 1.3, CODE: 2.4}
        serve(watch, rounds(rng, 1, lengths, mix={CHAT: 0.3, CODE: 0.7}), 3000)
        verdict = try_out(watch, 2, rounds(rng, 2, lengths, mix={CHAT: 0.95, CODE: 0.05}))
        assert verdict.outcome is Outcome.PROMOTED
        assert float(verdict.numbers["accept_length"] or 0) < 1.5 < 2.0


def test_harder_requests_do_not_make_a_draft_slow() -> None:
    """Traffic moves while an equal version is on trial: to requests that the incumbent is known by, or not."""
    for seed in range(8):
        for known in (0.3, 0.0):
            rng, watch = random.Random(seed), LiveWatch(1)
            lengths, mix = {CHAT: 1.2, CODE: 2.2}, {CHAT: known, CODE: 1 - known}
            serve(watch, rounds(rng, 1, lengths, mix=mix, control_share=0.05), 2000)
            harder = rounds(rng, 2, lengths, mix={CHAT: 1.0, CODE: 0.0}, control_share=0.05)
            verdict = try_out(watch, 2, harder, look_every=1000)
            assert verdict.outcome is Outcome.PROMOTED
            assert float(verdict.numbers["time_change"] or 0) == pytest.approx(0.0, abs=0.1)


def test_the_times_are_those_of_the_incumbents_own_requests() -> None:
    """An older version's evidence, of easier requests, is pooled with it; its times are not."""
    lengths, harder = {CHAT: 1.2, CODE: 2.2}, {CHAT: 1.0, CODE: 0.0}
    for seed in range(5):
        rng, watch = random.Random(seed), LiveWatch(1)
        serve(watch, rounds(rng, 1, lengths, control_share=0.05), 3000)
        for version in (2, 3):
            verdict = try_out(watch, version, rounds(rng, version, lengths, mix=harder, control_share=0.05))
            assert verdict.outcome is Outcome.PROMOTED
            assert float(verdict.numbers["time_change"] or 0) == pytest.approx(0.0, abs=0.1)


def test_drafting_is_not_slower_than_an_incumbent_that_does_not_draft() -> None:
    rng, watch = random.Random(0), LiveWatch(1)
    for turn in range(2000):
        watch.observe(WatchedRound(1, 1, turn % 20 > 0, 0.03 * rng.uniform(0.9, 1.1), 1, ()))
    verdict = try_out(watch, 2, rounds(rng, 2, {CHAT: 1.0}, control_share=0.05, round_s=0.06))
    assert verdict.outcome is Outcome.PROMOTED
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
    plain_s: float = 0.03,
    text_s: float = 0.04,
) -> Iterator[WatchedRound]:
    """One request a round, beside earlier text. The head is asked in so many rounds; in the others earlier text
    proposes or nobody, and some of these look at the head. Where earlier text is used it takes what is easy: a head
    that commits `length` tokens of everything commits 1 + `after` × (length − 1) of the rest, and half of that where
    it is looked at. One round in twenty is a control round.
    """
    share = min(int(4 * (1 - asked) + 0.99), 4)
    stratum = CHAT._replace(remembered=share)
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
            seconds = 0.04 * noise * (1 + 0.04 * by_text)
            yield WatchedRound(version, 1, True, seconds, 1 + accepted, (one,), Proposed(DEPTH, by_text))
        elif rng.random() < looked:
            look = Verification(request, stratum._replace(of_looks=True), int(rng.random() < rate / 2), 1)
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
        for seed in range(3):
            rng, watch = random.Random(seed), LiveWatch(1, WatchRules(max_verifications=500))
            serve(watch, mixed(rng, 1, incumbent, **before), 3000)  # type: ignore[arg-type]
            verdict = try_out(watch, 2, mixed(rng, 2, version, **now), look_every=100)  # type: ignore[arg-type]
            assert verdict.outcome is Outcome.PROMOTED, verdict


def test_a_slower_draft_is_found_out_where_it_takes_part_whatever_earlier_text_does() -> None:
    """It proposes in half of the rounds, and these take 40% longer."""
    for seed in range(5):
        rng, watch = random.Random(seed), LiveWatch(1)
        serve(watch, mixed(rng, 1, 1.7, asked=0.5), 3000)
        slow = mixed(rng, 2, 1.7, asked=0.5)
        verdict = try_out(watch, 2, (one._replace(seconds=1.4 * one.seconds) if one.proposed else one for one in slow))
        assert (verdict.outcome, verdict.reason) == (Outcome.ROLLED_BACK, "slower a token than the incumbent")


def test_deeper_chains_pay_for_themselves() -> None:
    """A round of more proposals takes longer: it is another kind of round."""
    rng, watch = random.Random(0), LiveWatch(1)
    shallow = rounds(rng, 1, {CHAT: 3.0}, control_share=0.05)
    for round_ in (next(shallow) for _ in range(3000)):
        cut = tuple(
            one._replace(accepted=min(one.accepted, 2), depth=min(one.depth, 2)) for one in round_.verifications
        )
        committed = sum(1 + one.accepted for one in cut) or round_.committed
        proposed = round_.proposed and Proposed(2)
        watch.observe(round_._replace(committed=committed, verifications=cut, proposed=proposed))
    verdict = try_out(watch, 2, rounds(rng, 2, {CHAT: 3.0}, control_share=0.05, round_s=0.048))
    assert verdict.outcome is Outcome.PROMOTED


def test_a_chain_of_slightly_worse_versions_cannot_creep() -> None:
    """Each is 3% worse than the one before, which alone would mostly pass; together they are found out."""
    reached = []
    for seed in range(12):
        rng, watch, length, version = random.Random(seed), LiveWatch(1), 2.0, 1
        serve(watch, rounds(rng, 1, {CHAT: length}), 4000)
        while version < 12:
            version += 1
            verdict = try_out(watch, version, rounds(rng, version, {CHAT: length * 0.97}))
            if verdict.outcome is Outcome.ROLLED_BACK:
                break
            length *= 0.97
        reached.append(length)
    assert min(reached) > 2.0 * 0.8
    assert sum(reached) / len(reached) > 2.0 * 0.87


def test_a_version_that_costs_more_for_the_same_acceptance_is_slower() -> None:
    for seed in range(5):
        rng, watch = random.Random(seed), LiveWatch(1)
        serve(watch, rounds(rng, 1, {CHAT: 1.7}, control_share=0.05), 3000)
        verdict = try_out(watch, 2, rounds(rng, 2, {CHAT: 1.7}, control_share=0.05, round_s=0.056))
        assert verdict.outcome is Outcome.ROLLED_BACK
        assert verdict.reason == "slower a token than the incumbent"
        assert float(verdict.numbers["time_change"] or 0) == pytest.approx(0.4, abs=0.1)


@pytest.mark.parametrize("control_share", [0.0, 0.05])
def test_a_machine_that_becomes_busy_is_not_the_drafts_fault(control_share: float) -> None:
    for seed in range(5):
        rng, watch = random.Random(seed), LiveWatch(1)
        serve(watch, rounds(rng, 1, {CHAT: 1.7}, control_share=control_share), 3000)
        busy = rounds(rng, 2, {CHAT: 1.7}, control_share=control_share, round_s=0.08, plain_s=0.06)
        assert try_out(watch, 2, busy).outcome is Outcome.PROMOTED


def test_an_incumbent_that_never_went_so_deep_is_compared_at_its_depth() -> None:
    rng, watch = random.Random(0), LiveWatch(1)
    for round_, _ in zip(rounds(rng, 1, {CHAT: 1.7}), range(2000), strict=False):
        shallow = tuple(row._replace(accepted=min(row.accepted, 1), depth=1) for row in round_.verifications)
        watch.observe(round_._replace(verifications=shallow))
    verdict = try_out(watch, 2, rounds(rng, 2, {CHAT: 1.7}))
    assert verdict.outcome is Outcome.PROMOTED
    # Deeper chains accept a fifth more, and that is not the draft's merit.
    assert float(verdict.numbers["accept_change"] or 0) < 0.1


def test_unknown_strata_are_counted_and_compared_with_nothing() -> None:
    rng, watch = random.Random(0), LiveWatch(1)
    serve(watch, rounds(rng, 1, {CHAT: 2.0}), 2000)
    verdict = try_out(watch, 2, rounds(rng, 2, {CODE: 1.0}))
    assert (verdict.outcome, verdict.reason) == (Outcome.PROMOTED, "nothing to compare its accept length with")
    assert verdict.numbers["compared"] == 0
    # From now on they are known.
    assert try_out(watch, 3, rounds(rng, 3, {CODE: 1.5})).is_better


def test_it_is_ready_when_the_incumbent_is_known() -> None:
    now = [0.0]
    rng, watch = random.Random(0), LiveWatch(1, clock=lambda: now[0])
    source = rounds(rng, 1, {CHAT: 2.0})
    serve(watch, source, 400)
    watch.expect()
    assert not watch.is_ready()
    now[0] = 20.0
    watch.expect()
    now[0] = 31.0
    assert watch.is_ready(), "one that took another's place has waited as long"
    watch.restart(1)
    serve(watch, source, 400)
    watch.expect()
    assert not watch.is_ready()
    serve(watch, source, 1600)
    assert watch.is_ready()


def test_a_version_that_looks_no_worse_makes_room_for_a_newer_one() -> None:
    """A version that is 10% worse hardly ever does, nor does one that nobody waits for."""

    def outcome(seed: int, length: float, *, is_waited_for: bool) -> str:
        rng, watch = random.Random(seed), LiveWatch(1)
        serve(watch, rounds(rng, 1, {CHAT: 1.7}), 2000)
        watch.begin(2)
        if is_waited_for:
            watch.expect()
        serve(watch, rounds(rng, 2, {CHAT: length}), 600)
        return watch.judge().reason

    room = "looks no worse, and a newer version waits"
    assert sum(outcome(seed, 1.7, is_waited_for=True) == room for seed in range(20)) >= 10
    assert sum(outcome(seed, 1.53, is_waited_for=True) == room for seed in range(20)) <= 1
    assert all(outcome(seed, 1.7, is_waited_for=False) != room for seed in range(20))


def test_a_version_that_cannot_be_compared_makes_room_for_a_newer_one() -> None:
    rng, watch = random.Random(0), LiveWatch(1)
    serve(watch, rounds(rng, 1, {CHAT: 1.7}), 2000)
    watch.begin(2)
    watch.expect()
    serve(watch, rounds(rng, 2, {CODE: 1.2}), 400)
    assert watch.judge().outcome is Outcome.WATCHING
    serve(watch, rounds(rng, 2, {CODE: 1.2}), 200)
    assert watch.judge().outcome is Outcome.PROMOTED


def test_an_idle_engine_is_not_ready_and_one_that_does_not_draft_is() -> None:
    now = [0.0]
    watch = LiveWatch(1, clock=lambda: now[0])
    watch.expect()
    assert not watch.is_ready()
    now[0] = 1e6
    assert not watch.is_ready()
    for _ in range(500):
        watch.observe(WatchedRound(1, 1, True, 0.03, 1, ()))
    assert watch.is_ready()


def rarely(source: Iterator[WatchedRound], every: int) -> Iterator[WatchedRound]:
    """The same version where drafting hardly pays: one round in `every` drafts."""
    for number, round_ in enumerate(source):
        yield round_ if number % every == 0 else WatchedRound(round_.version, 1, True, 0.03, 1, ())


def test_versions_that_are_hardly_used_do_not_hold_up_the_next() -> None:
    """The first of a lineage do not pay; the one that does waits behind them."""
    rng, watch = random.Random(0), LiveWatch(1)
    serve(watch, rarely(rounds(rng, 1, {CHAT: 1.05}), 20), 600)
    watch.expect()
    assert watch.is_ready()
    watch.begin(2)
    watch.expect()
    serve(watch, rarely(rounds(rng, 2, {CHAT: 1.1}), 10), 400)
    assert watch.judge().outcome is Outcome.WATCHING
    serve(watch, rarely(rounds(rng, 2, {CHAT: 1.1}), 10), 200)
    assert watch.judge().outcome is Outcome.PROMOTED


def test_a_version_that_fell_asleep_after_much_use_makes_room_as_soon() -> None:
    rng, watch = random.Random(0), LiveWatch(1)
    serve(watch, rounds(rng, 1, {CHAT: 1.7}), 2000)
    watch.begin(2)
    watch.expect()
    serve(watch, rounds(rng, 2, {CHAT: 1.6}), 1200)
    assert watch.judge().outcome is Outcome.WATCHING
    serve(watch, rarely(rounds(rng, 2, {CHAT: 1.6}), 20), 500)
    assert watch.judge().outcome is Outcome.PROMOTED


def test_a_useless_version_is_found_out_though_it_is_hardly_used() -> None:
    for seed in range(10):
        rng, watch = random.Random(seed), LiveWatch(1)
        serve(watch, rounds(rng, 1, {CHAT: 1.8}), 2000)
        watch.expect()
        verdict = try_out(
            watch,
            2,
            itertools.chain(itertools.islice(rounds(rng, 2, {CHAT: 1.0}), 50), rarely(rounds(rng, 2, {CHAT: 1.0}), 50)),
            look_every=10,
        )
        assert verdict.outcome is Outcome.ROLLED_BACK


def test_rounds_of_other_versions_say_nothing() -> None:
    rng, watch = random.Random(0), LiveWatch(1)
    serve(watch, rounds(rng, 9, {CHAT: 2.0}), 100)
    assert not watch.is_ready()
    assert watch.baseline_verifications == 0


def test_after_a_rollback_the_incumbent_is_looked_at_again() -> None:
    """The traffic turned hard when the version came: the incumbent does no better on it."""
    for hard, expected in ((True, True), (False, False)):
        rng, watch = random.Random(3), LiveWatch(1)
        serve(watch, rounds(rng, 1, {CHAT: 2.0}), 3000)
        assert try_out(watch, 2, rounds(rng, 2, {CHAT: 1.6})).outcome is Outcome.ROLLED_BACK
        assert watch.rollback_doubt() is None, "nothing seen yet"
        serve(watch, rounds(rng, 1, {CHAT: 1.6 if hard else 2.0}), 400)
        doubt = watch.rollback_doubt()
        assert (doubt is not None) == expected
        assert watch.rollback_doubt() is None, "said once"


def test_domains_are_bounded() -> None:
    watch = LiveWatch(1)
    for index in range(5000):
        stratum = Stratum(f"domain {index}", "greedy")
        watch.observe(WatchedRound(1, 1, True, 0.03, 2, (Verification("r", stratum, 1, DEPTH),)))
    assert watch.baseline_verifications == 0, "nothing is counted before somebody looks"
    watch.is_ready()
    assert len({verification.stratum for verification in watch._baseline.verifications}) <= 65


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


def test_the_bound_holds_at_all_times_together() -> None:
    """Random walks of 2,000 steps with unit variance: how many ever cross?"""
    rng, crossed = random.Random(0), 0
    bounds = [mixture_bound(float(step), tuned_for=300, alpha=0.05) for step in range(1, 2001)]
    for _ in range(400):
        total = 0.0
        for bound in bounds:
            total += rng.choice((-1.0, 1.0))
            if total > bound:
                crossed += 1
                break
    assert 1 <= crossed <= 20


def test_correlation_inside_requests_is_found() -> None:
    rng = random.Random(0)

    def clusters(between: float) -> list[tuple[int, float, float]]:
        rows = []
        for _ in range(300):
            shift = rng.gauss(0, between)
            values = [shift + rng.gauss(0, 1) for _ in range(rng.randint(5, 60))]
            rows.append((len(values), sum(values), sum(value * value for value in values)))
        return rows

    assert intraclass_correlation(clusters(0.0)) < 0.01
    assert intraclass_correlation(clusters(0.5)) == pytest.approx(0.2, abs=0.04)
    assert intraclass_correlation([(10, 1.0, 5.0)]) == 0.02
