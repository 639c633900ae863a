"""Rounds as planned, in a world whose costs and acceptances are known: what is reached against what could be."""

from __future__ import annotations

import itertools
import math
import operator
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from speculator.proposals.planner import HeadVerdict, Plan, RoundPlanner

DEPTH = 4
DRAFT_READ_S, DRAFT_PAIR_S, DRAFT_STEP_S = 0.0014, 0.0001, 0.0015
PREFILL_S = 0.0008
"""Of a token of the prompt, by the target."""


def verify_s(batch: int, proposals: int) -> float:
    return 0.014 + 0.0025 * batch * (proposals + 1)


@dataclass
class World:
    """An engine whose head gives every proposal the probability `alpha` with which it is accepted."""

    alpha: float
    batch: int = 1
    suffix: Sequence[float] = ()
    """Probabilities of each request's suffix chain, which are true."""
    noise: float = 0.1
    seed: int = 0
    scale: float = 1.0
    """Of all times."""
    saved: float | None = None
    """Rounds that an accepted proposal of the head takes the place of; None where nobody says."""
    planner: RoundPlanner = field(default_factory=lambda: RoundPlanner(max_depth=DEPTH))
    clock_s: float = 0.0
    tokens: int = 0
    heads: int = 0
    probes: int = 0
    prompt: int = 0
    """Pairs of each request's prompt; a slot's next request comes after 60 rounds."""
    plain_s: float = 0.0
    """What as many plain rounds would have taken."""
    windows: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.unread = [1] * self.batch
        self.rounds = 0

    def run(self, rounds: int, *, head_depth: int = DEPTH) -> None:
        for _ in range(rounds):
            if self.prompt and self.rounds % 60 < self.batch:
                self.arrive(self.rounds % 60)
            self.round(head_depth)
            self.rounds += 1
            self.windows.append((self.clock_s, self.plain_s))

    def arrive(self, slot: int) -> None:
        """A new request, whose prompt is read at once where the head is awake."""
        self.unread[slot] = 1 if self.planner.is_awake else self.prompt
        self.clock_s += (PREFILL_S + (DRAFT_PAIR_S if self.planner.is_awake else 0.0)) * self.prompt
        self.plain_s += PREFILL_S * self.prompt

    def round(self, head_depth: int) -> None:
        planner, batch = self.planner, self.batch
        reaches = list(itertools.accumulate(self.suffix, operator.mul))
        plan = planner.plan(["chat"] * batch, 200 * batch, [reaches] * batch, head_depth=head_depth, unread=self.unread)
        proposals, steps = self.chain(plan, head_depth) if plan.uses_head else (plan.num_proposals, 0)
        probabilities = [self.alpha] * proposals if plan.uses_head else list(self.suffix[:proposals])
        accepted = [self.accepted(probabilities) for _ in range(batch)]
        verdicts = [self.verdict(probabilities, count) for count in accepted] if plan.uses_head else []
        read: Sequence[int] = range(batch) if plan.uses_head else ()
        if plan.probe is not None:
            steps, read = 1, [plan.probe]
            is_worth_it = planner.is_worth_verifying(plan, 0, batch * planner.head_probability(0, self.alpha))
            verdicts = [self.verdict([self.alpha], self.accepted([self.alpha]), is_worth_it)]
        pairs = sum(self.unread[slot] for slot in read)
        draft = self.scale * (DRAFT_READ_S + DRAFT_PAIR_S * pairs + DRAFT_STEP_S * (steps - 1)) if steps else 0.0
        verify = self.scale * verify_s(batch, proposals) * (1 + self.rng.uniform(-self.noise, self.noise))
        planner.observe(plan, num_proposals=proposals, num_steps=steps, num_pairs=pairs, draft_s=draft, verify_s=verify)
        planner.observe_head(verdicts)
        for slot, count in enumerate(accepted):
            self.unread[slot] = (0 if slot in read else self.unread[slot]) + count + 1
        self.clock_s += verify + draft
        self.plain_s += verify_s(batch, 0)
        self.tokens += batch + sum(accepted)
        self.heads += plan.uses_head
        self.probes += plan.probe is not None

    def chain(self, plan: Plan, head_depth: int) -> tuple[int, int]:
        """Proposals that are verified, steps that are computed."""
        reach, rule = 1.0, self.planner.chain_rule(plan, [0.0] * head_depth)
        for step in range(head_depth):
            reach *= self.planner.head_probability(step, self.alpha)
            if not self.planner.is_worth_verifying(plan, step, self.batch * reach):
                return step, step + 1
            if not rule.continues_after(step, [reach] * self.batch):
                return step + 1, step + 1
        return head_depth, head_depth

    def verdict(self, probabilities: Sequence[float], count: int, is_worth_it: bool = True) -> HeadVerdict:
        saved = None if self.saved is None else self.saved * count
        return HeadVerdict("chat", probabilities, count, is_worth_it, saved)

    def accepted(self, probabilities: Sequence[float]) -> int:
        count = 0
        while count < len(probabilities) and self.rng.random() < probabilities[count]:
            count += 1
        return count

    @property
    def rate(self) -> float:
        return self.tokens / self.clock_s

    def best_fixed(self) -> float:
        """Tokens a second of the best fixed depth."""

        def rate(depth: int) -> float:
            length = sum(self.alpha**step for step in range(depth + 1))
            reading = DRAFT_READ_S + DRAFT_PAIR_S * self.batch * length
            drafting = reading + DRAFT_STEP_S * (depth - 1) if depth else 0.0
            return self.batch * length / (verify_s(self.batch, depth) + drafting)

        return max(rate(depth) for depth in range(DEPTH + 1))


@pytest.mark.parametrize("batch", [1, 4, 8])
@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.4, 0.7, 0.95])
def test_as_fast_as_the_best_fixed_depth(alpha: float, batch: int) -> None:
    world = World(alpha, batch)
    world.run(3000)
    assert world.rate > 0.96 * world.best_fixed()


@pytest.mark.parametrize("prompt", [0, 200, 600])
@pytest.mark.parametrize("batch", [1, 8])
def test_a_useless_head_costs_next_to_nothing(batch: int, prompt: int) -> None:
    world = World(0.0, batch, noise=0.0, prompt=prompt)
    world.run(6000)
    for (start_s, plain_start_s), (end_s, plain_end_s) in zip(world.windows, world.windows[1000:], strict=False):
        assert plain_end_s - plain_start_s > 0.98 * (end_s - start_s)
    assert world.probes > 20, "it must be looked at now and then"


def test_looks_in_vain_become_rarer_until_one_is_not_or_another_version_comes() -> None:
    world = World(0.0, prompt=1)

    def probe_share(rounds: int) -> float:
        before = world.probes
        world.run(rounds)
        return (world.probes - before) / rounds

    world.run(1000)
    in_vain = probe_share(2000)
    assert in_vain > 0
    world.planner.observe_head([HeadVerdict("chat", [0.1], 1, is_worth_it=False)])
    assert probe_share(200) > 1.5 * in_vain
    world.run(1000)
    assert probe_share(2000) < 1.5 * in_vain
    world.planner.renew()
    assert probe_share(100) > 0.5


def test_looks_are_as_many_on_fast_machines_as_on_slow_ones() -> None:
    """At first, and at a new version."""
    probes = []
    for scale in (0.25, 1.0, 8.0):
        world = World(0.0, noise=0.0, scale=scale)
        world.run(100)
        first = world.probes
        world.planner.renew()
        world.run(400)
        probes.append((first, world.probes - first))
    assert probes[0] == probes[1] == probes[2]
    assert 300 > probes[0][1] > 2 * probes[0][0] > 20


def test_a_head_is_looked_at_where_it_would_be_asked_and_no_more_often_than_that() -> None:
    copying, asked_for = World(0.0, suffix=[0.9] * 12, prompt=1), World(0.0, prompt=1)
    copying.run(1000)
    assert copying.probes == 0
    plan = copying.planner.plan(["chat"] * 2, 400, [[0.9], []], head_depth=DEPTH, unread=[1, 1])
    assert plan.probe == 1
    asked_for.run(6000)
    for _ in range(1000):
        copying.suffix = ()
        copying.run(1)
        copying.suffix = [0.9] * 12
        copying.run(5)
    assert 10 < copying.probes < asked_for.probes / 3


@pytest.mark.parametrize(("saved", "least", "most"), [(None, 800, 1000), (1.0, 800, 1000), (0.5, 0, 100)])
def test_tokens_that_suffixes_would_have_brought_are_worth_less(saved: float | None, least: int, most: int) -> None:
    """With a step of 16.5 ms, and 20.4 with a proposal, a head pays that is right 0.24 times."""
    world = World(0.4, saved=saved)
    world.run(1000)
    before = world.heads
    world.run(1000)
    assert least <= world.heads - before <= most


def test_a_token_that_is_worth_less_is_verified_where_it_is_likelier_and_expected_as_often() -> None:
    plans, worlds = [], [World(0.8, saved=saved) for saved in (None, 0.6)]
    for world in worlds:
        world.run(1000)
        plans.append(world.planner.plan(["chat"], 200, [[]], head_depth=DEPTH, unread=[1]))
        assert world.planner.head_gains.gain("chat") == pytest.approx(plans[-1].expected_tokens - 1)
    assert [plan.worth for plan in plans] == [1, pytest.approx(0.6, abs=0.02)]
    for world, plan in zip(worlds, plans, strict=True):
        assert plan.rate == pytest.approx((1 + plan.worth * world.planner.head_gains.gain("chat")) / plan.expected_s)
        reaches = [number / 100 for number in range(101)]
        verified = [reach for reach in reaches if world.planner.is_worth_verifying(plan, 1, reach)]
        of_suffixes = [reach for reach in reaches if world.planner.is_worth_verifying(plan, 1, 0.0, reach)]
        assert min(verified) == pytest.approx(min(of_suffixes) / plan.worth, abs=0.02)


def test_a_chain_is_drafted_on_where_its_step_is_verified_and_the_next_one_pays_for_itself() -> None:
    rules, worlds = [], [World(0.8), World(0.8)]
    for world in worlds:
        world.run(1000)
        for steps in range(1, DEPTH + 2):  # the second one's steps take twice as long
            for _ in range(200):
                seconds = DRAFT_READ_S + DRAFT_STEP_S * (steps - 1) * (1 + (world is worlds[1]))
                world.planner.times.add_drafting(1, steps, 1, seconds)
        plan = world.planner.plan(["chat"], 200, [[]], head_depth=DEPTH, unread=[1])
        rules.append(world.planner.chain_rule(plan, [0.0] * DEPTH))
        for step, least in enumerate(rules[-1].least):
            assert 0 < least < math.inf
            assert world.planner.is_worth_verifying(plan, step, 1.001 * least)
            assert not rules[-1].continues_after(step, [0.6 * least, 0.39 * least])
            assert rules[-1].continues_after(step, [0.6 * least, 0.41 * least]) == (step < DEPTH - 1)
            reached = rules[-1].reached(step, [1.0, 0.5], [math.log(0.3)] * 2)
            assert reached == pytest.approx([world.planner.head_probability(step, 0.3) * reach for reach in (1.0, 0.5)])
        # What suffix trees earn beside the chains pays for the rows of both, and for no step of the head.
        beside = world.planner.chain_rule(plan, [0.3] * DEPTH)
        assert all(new <= old for new, old in zip(beside.least, rules[-1].least, strict=True))
    assert all(dear > cheap for cheap, dear in zip(*(rule.least for rule in rules), strict=True))


def test_a_head_that_lies_about_itself_is_found_out() -> None:
    """It says 0.9 and is right once in ten times."""
    world = World(0.1)
    honest = world.planner.head_probability
    world.planner.head_probability = lambda step, _: honest(step, 0.9)  # type: ignore[method-assign]
    observe = world.planner.observe_head
    world.planner.observe_head = lambda verdicts: observe(  # type: ignore[method-assign]
        [HeadVerdict(one.domain, [0.9] * len(one.probabilities), one.num_accepted) for one in verdicts]
    )
    world.run(3000)
    assert world.rate > 0.96 * world.best_fixed()


def test_a_new_version_is_looked_at_at_once() -> None:
    world = World(0.0)
    world.run(1000)
    assert not world.planner.is_awake
    world.alpha = 0.9
    world.planner.renew()
    world.run(60)
    assert world.planner.is_awake


def test_a_new_version_is_looked_at_where_prompts_are_too_long_to_catch_up_with() -> None:
    world = World(0.0, prompt=3000)
    world.run(600)
    assert not world.planner.is_awake
    before = world.heads
    world.alpha = 0.9
    world.planner.renew()
    world.run(400)
    assert world.heads - before > 200


def test_without_a_swap_a_head_that_has_become_good_is_found() -> None:
    world = World(0.0)
    world.run(1000)
    world.alpha = 0.9
    world.run(1500)
    assert world.planner.is_awake


def test_a_good_suffix_needs_no_head() -> None:
    world = World(0.3, suffix=[0.95] * 12)
    world.run(1000)
    assert world.rate > 2 * world.best_fixed()
    assert world.heads < 100


def _copying(seed: int, *, head_depth: int) -> float:
    """The rate of an answer that mostly copies, and for a few rounds in between does not."""
    world, lengths = World(0.6, seed=seed), random.Random(seed)
    while world.rounds < 2500:
        world.suffix = [0.9] * 12
        world.run(lengths.randint(5, 15), head_depth=head_depth)
        world.suffix = [lengths.choice([0.0, 0.1, 0.3])] * 3
        world.run(lengths.randint(2, 6), head_depth=head_depth)
    return world.rate


def test_between_long_copies_the_head_is_charged_with_reading_them() -> None:
    ratios = [_copying(seed, head_depth=DEPTH) / _copying(seed, head_depth=0) for seed in range(4)]
    assert statistics.mean(ratios) > 0.985  # 0.975 if it were charged with two pairs a request


def test_a_suffix_that_promises_little_is_not_verified() -> None:
    world = World(0.0, suffix=[0.05] * 4)
    world.run(500)
    plan = world.planner.plan(["chat"], 200, [[0.05]], head_depth=0, unread=[1])
    assert plan.num_proposals == 0


def test_the_better_source_is_taken_for_each_request() -> None:
    world = World(0.85)
    world.run(500)
    plan = world.planner.plan(["chat", "chat"], 400, [[0.01], [0.9, 0.85, 0.8, 0.75]], head_depth=DEPTH, unread=[1, 1])
    assert plan.uses_head
    assert plan.from_suffix == (False, True)


def test_domains_have_gains_of_their_own() -> None:
    planner = RoundPlanner(max_depth=DEPTH)
    for _ in range(100):
        planner.observe_head([HeadVerdict("code", [0.9] * 4, 4), HeadVerdict("chat", [0.1], 0)])
    assert planner.head_gains.gain("code") > 3.5
    assert planner.head_gains.gain("chat") < 0.2
    assert planner.head_gains.gain("never seen") == pytest.approx(2, abs=0.5)


def test_a_round_without_a_time_of_its_own_changes_no_forecast_of_seconds() -> None:
    world = World(0.85)
    world.run(500)
    planner, plan = world.planner, Plan(batch=1, num_keys=200, uses_head=True)

    def forecasts() -> list[float]:
        return [planner.times.verify_s(1, 3, 200), planner.times.verify_s(2, 1, 400)]

    before = forecasts()
    for verify_s in (None, 10.0):
        for _ in range(20):
            planner.observe(plan, num_proposals=3, num_steps=3, num_pairs=1, draft_s=0.001, verify_s=verify_s)
        assert (forecasts() == before) == (verify_s is None)


def test_domains_are_bounded() -> None:
    planner = RoundPlanner(max_depth=DEPTH)
    for number in range(1000):
        planner.observe_head([HeadVerdict(str(number), [0.5], 1)])
    assert len(planner.head_gains._records) <= 65
