"""Requests that name no lineage go where answers like theirs were accepted most."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from serving.gateway import choice as choosing
from serving.gateway.choice import Choice
from speculator.lineages import BASE


def served(choice: Choice, rng: random.Random, lengths: dict[str, float], num: int, domain: str = "d") -> Counter[str]:
    """Requests of one tenant and domain, each answer's length spread by 20%; where they went."""
    went: Counter[str] = Counter()
    for _ in range(num):
        name = choice.pick("t", domain)
        went[name] += 1
        length = max(lengths[name] * rng.gauss(1, 0.2), 1.0)
        choice.learn("t", domain, name, num_tokens=20 * length, num_verifications=20)
    return went


def test_while_nothing_is_measured_the_base_answers() -> None:
    choice = Choice(["code"], rng=random.Random(0))
    for _ in range(100):
        assert choice.pick("t", "d") == BASE
        choice.learn("t", "d", BASE, num_tokens=0, num_verifications=0)


def test_every_domain_finds_its_lineage_and_most_requests_go_there() -> None:
    choice, rng = Choice(["code", "math"], rng=random.Random(0)), random.Random(1)
    for best in ("code", "math", BASE):
        lengths = {name: 1.65 if name == best else 1.5 for name in (BASE, "code", "math")}
        served(choice, rng, lengths, 300, domain=best)
        went = served(choice, rng, lengths, 1000, domain=best)
        assert went[best] > 750
        assert min(went.values()) > 5, "the others are asked now and then"


def test_a_lineage_that_becomes_the_best_is_found() -> None:
    choice, rng = Choice(["code"], rng=random.Random(2)), random.Random(3)
    served(choice, rng, {BASE: 1.6, "code": 1.4}, 1000)
    for code, better in ((2.0, "code"), (1.2, BASE)):
        served(choice, rng, {BASE: 1.6, "code": code}, 1000)
        assert served(choice, rng, {BASE: 1.6, "code": code}, 500)[better] > 400


def test_what_is_measured_of_one_tenant_says_nothing_of_another() -> None:
    choice, rng = Choice(["code"], rng=random.Random(4)), random.Random(5)
    served(choice, rng, {BASE: 1.2, "code": 2.0}, 200)
    assert {choice.pick("another", "d") for _ in range(50)} == {BASE}


def test_estimates_are_bounded() -> None:
    choice = Choice(["code"], rng=random.Random(6))
    for number in range(choosing.MAX_KINDS + 10):
        choice.learn("t", str(number), BASE, num_tokens=1, num_verifications=1)
        choice.pick("t", "0")
    kept = choice._domains["t"]
    assert len(kept) == choosing.MAX_KINDS
    assert "0" in kept, "what is asked for stays"
    assert "1" not in kept


def test_one_tenants_labels_push_out_no_other_tenants_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "MAX_KINDS", 8)
    choice = Choice(["code"], rng=random.Random(7))
    for domain in ("one", "two"):
        for lineage, num_tokens in ((BASE, 1), ("code", 9)):
            choice.learn("quiet", domain, lineage, num_tokens=num_tokens, num_verifications=1)
    for number in range(100):
        choice.learn("flooding", f"label-{number}", "code", num_tokens=1, num_verifications=1)
    assert [choice.pick("quiet", domain) for domain in ("one", "two")] == ["code", "code"]
    assert choice.pick("flooding", "label-0") == BASE, "nothing is known of it any more"
    for number in range(100):
        choice.learn(f"tenant-{number}", "", "code", num_tokens=1, num_verifications=1)
    assert [len(domains) for domains in choice._domains.values()] == [1] * 8
    assert "tenant-99" in choice._domains
