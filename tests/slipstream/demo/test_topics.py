"""Prompts of the demo, and who asks them."""

from __future__ import annotations

from collections import Counter

from slipstream.demo import TENANTS
from slipstream.demo.topics import Prompt, TenantTraffic, built_in_prompts, cycle_prompts


def test_built_in_prompts_are_of_several_domains_in_an_order_that_a_seed_fixes() -> None:
    prompts = built_in_prompts()
    assert Counter(prompt.domain for prompt in prompts) == {"math": 2000, "code": 100, "qa": 80, "rag": 80}
    assert len({prompt.text for prompt in prompts}) == len(prompts)
    first, again, other = (cycle_prompts(prompts, seed) for seed in (1, 1, 2))
    drawn = [next(first) for _ in range(len(prompts) + 5)]
    assert drawn == [next(again) for _ in drawn]
    assert drawn != [next(other) for _ in drawn]
    assert set(drawn[: len(prompts)]) == set(prompts)


def test_tenants_take_turns_and_change_their_topics_together() -> None:
    traffic = TenantTraffic(built_in_prompts(), TENANTS, seed=0)
    assert traffic.can_shift
    before = [next(traffic) for _ in range(5 * len(TENANTS))]
    assert set(Counter(prompt.tenant for prompt in before).values()) == {5}
    assert {prompt.domain for prompt in before} == set(traffic.topics()) == {"math"}
    traffic.shift(to_second=True)
    after = [next(traffic) for _ in range(5 * len(TENANTS))]
    assert {prompt.domain for prompt in after} == {"code", "qa", "rag"}
    for tenant in TENANTS:
        assert len({prompt.domain for prompt in after if prompt.tenant == tenant}) == 1, "a topic of its own"
    traffic.shift(to_second=False)
    assert next(traffic).domain == "math"


def test_no_prompt_comes_twice_while_there_are_others_of_any_topic() -> None:
    prompts = [Prompt("a", f"a{number}") for number in range(30)] + [Prompt("b", f"b{number}") for number in range(9)]
    traffic = TenantTraffic(prompts, TENANTS[:4], seed=0)
    traffic.shift(to_second=True)
    asked = [next(traffic) for _ in range(len(prompts))]
    assert [prompt.domain for prompt in asked[:9]] == ["b"] * 9
    assert {prompt.text for prompt in asked} == {prompt.text for prompt in prompts}
    assert next(traffic).domain == "b", "then they begin again"


def test_prompts_of_one_domain_have_no_second_topic() -> None:
    traffic = TenantTraffic([Prompt("a", "only")], TENANTS, seed=0)
    traffic.shift(to_second=True)
    assert not traffic.can_shift
    assert [next(traffic).text for _ in range(3)] == ["only"] * 3
