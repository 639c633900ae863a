"""How often traces are drawn, how proposals age, which traces answer one prompt, and the names of domains."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from speculator.trace import Trace
from tests.fixtures.traces import make_trace
from tests.trainer.stored import stored_of
from trainer.drift import DEFAULT, OTHER, DomainNames
from trainer.learning.labels import Verdicts
from trainer.replay.reservoirs import (
    MAX_REPEAT,
    TenantMix,
    capped_shares,
    priority,
    provenance_of,
    sampling_key,
    version_weight,
    without_stale,
)

masses = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 10**6), min_size=1)


@pytest.mark.parametrize(("acceptance", "expected"), [(0.4, 1.0), (0.3, 2.0), (0.5, 0.5), (0.35, 2**0.5), (0.0, 2.0)])
def test_priority_grows_with_how_far_below_its_mean_a_trace_was_accepted(acceptance: float, expected: float) -> None:
    assert priority(acceptance, 0.4, 0.1, bound=2.0) == pytest.approx(expected)
    assert priority(acceptance, 0.4, 0.0, bound=2.0) == 1.0, "not while the deviation is unknown"
    assert priority(acceptance, 0.4, 0.1, bound=1.0) == 1.0


@given(masses, st.floats(0.05, 1))
def test_shares_add_up_and_stay_below_the_cap_and_nobody_is_repeated_too_often(
    masses: dict[str, int], cap: float
) -> None:
    shares = capped_shares(masses, cap)
    total = sum(masses.values())
    if total == 0:
        return
    assert sum(shares.values()) == pytest.approx(1)
    natural = {tenant: mass / total for tenant, mass in masses.items()}
    cap = max(cap, 1 / sum(share > 0 for share in natural.values()))
    repeated = max(share / natural[tenant] for tenant, share in shares.items() if share)
    for tenant, share in shares.items():
        if share > cap + 1e-6:
            assert len(shares) == 1 or repeated >= MAX_REPEAT - 1e-6 or natural[tenant] == 1, (
                "above the cap only where the others are repeated enough"
            )
        else:
            assert share <= MAX_REPEAT * natural[tenant] + 1e-6


def test_shares() -> None:
    assert capped_shares({"a": 9.0, "b": 1.0}, 0.6) == pytest.approx({"a": 0.6, "b": 0.4})
    assert capped_shares({"a": 8.0, "b": 1.0, "c": 1.0}, 0.4) == pytest.approx({"a": 0.4, "b": 0.3, "c": 0.3})
    assert capped_shares({"a": 5.0}, 0.6) == {"a": 1.0}
    assert capped_shares({"a": 999.0, "b": 1.0}, 0.6)["b"] == pytest.approx(0.016)
    assert capped_shares({"a": 0.0}, 0.6) == {"a": 0.0}
    assert capped_shares({}, 0.6) == {}


def test_the_mix_forgets() -> None:
    mix = TenantMix()
    mix.add("a", 1000)
    assert mix.share_with("b", 1000) == pytest.approx(0.5)
    for _ in range(1000):
        mix.add("b", 1000)
    assert mix.share_with("a", 0) == 0.0
    assert TenantMix().share_with("a", 0) == 0.0


@given(st.integers(-5, 100), st.integers(0, 20))
def test_a_versions_weight_falls_from_one_at_alpha_to_nothing_at_twice_alpha(lag: int, max_lag: int) -> None:
    weight = version_weight(lag, max_lag=max_lag)
    assert 0 <= weight <= 1
    assert weight == 1 or lag > max_lag
    assert weight == 0 or lag < max(2 * max_lag, 1)
    assert version_weight(lag + 1, max_lag=max_lag) <= weight


def test_stale_verdicts_are_left_out_in_proportion() -> None:
    versions = torch.tensor([1] * 100 + [7] * 1000 + [9] * 100)
    num = len(versions)
    verdicts = Verdicts(
        bases=torch.arange(num),
        steps=torch.zeros(num, dtype=torch.int64),
        draft_ids=torch.zeros(num, dtype=torch.int64),
        logprobs=torch.zeros(num),
        accepted=torch.ones(num, dtype=torch.bool),
        versions=versions,
        committed=torch.zeros(num, dtype=torch.int64),
    )
    example = dataclasses.replace(stored_of("0").example, verdicts=verdicts)
    fresh = without_stale(example, published=10, max_lag=2, rng=random.Random(0)).verdicts.versions
    assert fresh.eq(1).sum() == 0
    assert fresh.eq(7).sum() == pytest.approx(500, abs=60)
    assert fresh.eq(9).sum() == 100
    assert without_stale(example, published=2, max_lag=2, rng=random.Random(0)) is example


def test_domain_names_are_bounded_and_survive() -> None:
    names = DomainNames(4)
    assert [names.name(label, "me") for label in ("", "math", "code", "math", "rag", "all", "other")] == [
        DEFAULT, "math", "code", "math", OTHER, OTHER, OTHER,
    ]  # fmt: skip
    assert names.name("math" + 100 * "x", "me") == OTHER
    again = DomainNames(4, names.known)
    assert again.name("code", "you") == "code"
    assert again.name("rag", "me") == OTHER, "half of them, after a restart as well"


def test_no_tenant_has_all_domain_names() -> None:
    names = DomainNames(8)
    for tenant, num_own in (("a", 4), ("b", 2), ("c", 1), ("d", 1)):
        own = {names.name(f"{tenant} {number}", tenant) for number in range(100)} - {OTHER}
        assert len(own) == num_own
    assert len(names.known) == 8
    assert names.name("new", "e") == OTHER


def test_provenance_names_the_sender_and_hashes_what_was_said() -> None:
    trace = make_trace(T=40, tenant="me", domain="math")
    source = provenance_of(trace)
    assert (source.tenant, source.domain) == ("me", "math")
    other = dataclasses.replace(trace, token_ids=trace.token_ids + 1)
    assert provenance_of(other).text_hash != source.text_hash
    assert provenance_of(make_trace(T=40)).text_hash == source.text_hash


def test_sampling_keys_are_even_and_depend_on_the_seed() -> None:
    keys = [sampling_key(f"{i}".encode(), 0) for i in range(2000)]
    assert all(0 <= key < 1 for key in keys)
    assert sum(keys) / 2000 == pytest.approx(0.5, abs=0.02)
    assert sampling_key(b"0", 0) != sampling_key(b"0", 1)


def answer(seed: int, prompt: tuple[int, ...] = (1, 2, 3, 4), **header: Any) -> Trace:
    trace = make_trace(seed, T=12, **header)
    return dataclasses.replace(trace, token_ids=np.array([*prompt, *trace.token_ids[4:]], np.int32))


def num_prompts(*traces: Trace) -> int:
    found = [provenance_of(trace) for trace in traces]
    assert len({provenance.text_hash for provenance in found}) == len(traces)
    return len({provenance.prompt_hash for provenance in found})


def test_answers_to_one_prompt_have_its_hash_whoever_asked() -> None:
    assert num_prompts(answer(1), answer(2), answer(3, tenant="anna")) == 1
    assert num_prompts(answer(1), answer(2, (1, 2, 3, 5))) == 2


def test_a_group_has_one_hash_also_where_a_sample_went_on_elsewhere() -> None:
    first, moved = answer(1, group_id="g"), answer(2, (1, 2, 3, 4), group_id="g", num_prompt_tokens=9)
    assert num_prompts(first, moved) == 1
    assert num_prompts(first, answer(2, group_id="h"), answer(3, group_id="g", tenant="anna")) == 3


def test_prompts_of_which_only_the_tail_is_known() -> None:
    def of_length(seed: int, length: int) -> Trace:
        return answer(seed, num_prompt_tokens=length, first_position=length - 4)

    assert num_prompts(of_length(1, 40), of_length(2, 40), of_length(3, 41)) == 2
    # Nothing of it: every answer is one of its own.
    assert num_prompts(*(answer(seed, num_prompt_tokens=40, first_position=40) for seed in (1, 2))) == 2
