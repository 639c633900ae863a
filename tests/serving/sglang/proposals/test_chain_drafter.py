"""The compiled drafter proposes what the one in Python does, within bounds, and to nobody else's requests."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from serving.sglang.proposals.chain_drafter import ChainDrafter
from speculator.proposals.suffix_drafter import SuffixConfig, SuffixDrafter, TextSource
from speculator.proposals.suffix_index import NEW_TEXT

WIDTH = 12


def advanced(
    drafter: ChainDrafter, slots: list[int], committed: list[list[int]], limits: list[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    tokens = np.array([token for of in committed for token in of], np.int64)
    return drafter.advance(slots, tokens, [0, *np.cumsum([len(of) for of in committed])], limits)


def written(dice: random.Random, phrases: list[list[int]], length: int) -> list[int]:
    """Text that repeats itself, and others, here and there."""
    text: list[int] = []
    while len(text) < length:
        phrase = dice.choice(phrases)
        text += phrase[dice.randrange(len(phrase)) :] if dice.random() < 0.8 else [dice.randrange(50)]
    return text[:length]


@pytest.mark.parametrize("seed", range(6))
def test_it_proposes_what_the_one_in_python_does(seed: int) -> None:
    dice = random.Random(seed)
    phrases = [[dice.randrange(50) for _ in range(dice.randint(3, 30))] for _ in range(12)]
    compiled, python = ChainDrafter(width=WIDTH), SuffixDrafter(SuffixConfig(width=1, learns=False))
    running: list[tuple[int, Any, list[int]]] = []
    num_proposals, seen = 0, set[TextSource]()
    for _ in range(150):
        if len(running) < 5:
            about: dict[str, Any] = {"tenant": dice.choice("ab"), "group_id": dice.choice(["", "g"])}
            prompt = written(dice, phrases, dice.randint(1, 200))
            slot = compiled.start(prompt, max_answer=300, **about)
            running.append((slot, python.start(prompt, **about), written(dice, phrases, dice.randint(1, 300))))
        came = [[rest.pop(0) for _ in range(min(dice.randint(0, 4), len(rest)))] for _, _, rest in running]
        limits = [dice.randint(0, WIDTH) for _ in running]
        # One after another: texts of one tenant may be the same window.
        for (slot, request, _), tokens, limit in zip(running, came, limits, strict=True):
            if tokens:
                request.commit(tokens)
            proposal = request.propose(limit)
            expected = proposal.tree
            found, probabilities, counts, sources = advanced(compiled, [slot], [tokens], [limit])
            assert found[0, : counts[0]].tolist() == list(expected.tokens)
            assert probabilities[0, : counts[0]].tolist() == pytest.approx(list(expected.probabilities))
            assert not proposal.sources or sources[0] == proposal.sources[0]
            seen.update(proposal.sources)
            num_proposals += len(expected.tokens)
        for ended in [one for one in running if not one[2]]:
            running.remove(ended)
            compiled.end(ended[0])
    assert num_proposals > 500
    assert seen == set(TextSource)
    assert compiled.num_evicted == 0


def test_a_window_forgets_its_oldest_text() -> None:
    compiled, python = ChainDrafter(width=WIDTH), SuffixDrafter(SuffixConfig(width=1, learns=False))
    dice = random.Random(1)
    phrases = [[dice.randrange(3000) for _ in range(40)] for _ in range(1000)]
    prompt = [3000] * 30_000
    slot, request = compiled.start(prompt, max_answer=40_000, tenant="t"), python.start(prompt, tenant="t")
    for _ in range(400):
        tokens = [token for _ in range(3) for token in dice.choice(phrases)]
        request.commit(tokens)
        expected = request.propose(WIDTH).tree
        found, _, counts, _ = advanced(compiled, [slot], [tokens], [WIDTH])
        assert found[0, : counts[0]].tolist() == list(expected.tokens)


def test_a_batch_is_as_its_requests_one_by_one() -> None:
    text = list(range(100, 140))
    drafter = ChainDrafter(width=WIDTH)
    slots = [drafter.start([*text, 5], max_answer=100, tenant=str(number)) for number in range(3)]
    found, probabilities, counts, _ = advanced(
        drafter, [slots[0], -1, slots[1], slots[2]], [text[:10], [], [7], text[:20]], [WIDTH, WIDTH, WIDTH, 3]
    )
    assert counts.tolist() == [WIDTH, 0, 0, 3]
    assert found[0].tolist() == text[10 : 10 + WIDTH]
    assert found[3, :3].tolist() == text[20:23]
    assert not found[1:3].any()
    assert (probabilities[0] > 0).all()


def test_memory_is_bounded_and_the_least_used_text_makes_room() -> None:
    text = list(range(100, 140))
    drafter = ChainDrafter(width=WIDTH, arena_tokens=1 << 17)
    for number in range(40):
        slot = drafter.start(text, max_answer=3000, tenant=f"t{number}", group_id=f"g{number % 5}")
        advanced(drafter, [slot], [text], [WIDTH])
        drafter.end(slot)
        assert drafter.num_tokens < 1 << 17
    assert drafter.num_evicted > 20
    again = drafter.start([9], max_answer=100, tenant="t39")
    _, _, counts, _ = advanced(drafter, [again], [text[:16]], [WIDTH])
    assert counts[0] == WIDTH, "the newest is there"
    drafter.end(again)
    drafter.forget([f"t{number}" for number in range(40)])
    assert drafter.num_tokens == 0
    everything = drafter.start([1], max_answer=1 << 17, tenant="x")
    assert drafter.num_tokens > 0
    drafter.end(everything)


def test_answers_without_a_limit_leave_room_for_more_requests() -> None:
    text = list(range(100, 140))
    drafter = ChainDrafter(width=WIDTH, arena_tokens=1 << 17)
    slots = [drafter.start([*text, 5], max_answer=100_000, tenant="t") for _ in range(4)]
    _, _, counts, _ = advanced(drafter, slots[3:], [text[:16]], [WIDTH])
    assert counts[0] == WIDTH
    assert drafter.num_evicted == 0


def test_a_tenant_that_came_when_all_was_full_is_remembered_once_there_is_room() -> None:
    text = list(range(100, 140))
    drafter = ChainDrafter(width=WIDTH, arena_tokens=1 << 17)
    others = [drafter.start([1] * length, max_answer=1000, tenant="a") for length in (30_000, 30_000, 15_000)]
    running = drafter.start([9], max_answer=100, tenant="b")
    assert drafter.num_evicted > 0
    for slot in others:
        drafter.end(slot)
    writing, reading = (drafter.start([9], max_answer=100, tenant="b") for _ in range(2))
    advanced(drafter, [writing], [text], [0])
    found, _, counts, _ = advanced(drafter, [reading], [text[:16]], [WIDTH])
    assert found[0, : counts[0]].tolist() == text[16 : 16 + WIDTH]
    for slot in (running, writing, reading):
        drafter.end(slot)
    drafter.forget(["b"])
    assert drafter.num_tokens == 0


def test_who_shares_nothing_is_continued_from_its_own_text_and_leaves_none() -> None:
    text = list(range(100, 140))
    drafter = ChainDrafter(width=WIDTH)
    private = drafter.start([*text, 5], max_answer=100, tenant="t", shared=False)
    _, _, counts, _ = advanced(drafter, [private], [text[:16]], [WIDTH])
    assert counts[0] == WIDTH
    other = drafter.start([9], max_answer=100, tenant="t")
    _, _, counts, _ = advanced(drafter, [other], [text[:16]], [WIDTH])
    assert counts[0] == 0


def test_running_requests_keep_what_was_evicted() -> None:
    text = list(range(100, 140))
    drafter = ChainDrafter(width=WIDTH, arena_tokens=1 << 16)
    running = drafter.start([9], max_answer=100, tenant="t")
    advanced(drafter, [running], [text], [0])
    slots = [drafter.start([1], max_answer=8000, tenant=f"other{number}") for number in range(20)]
    assert drafter.num_evicted > 0
    found, _, counts, _ = advanced(drafter, [running], [text[:16]], [WIDTH])
    assert found[0, : counts[0]].tolist() == text[16 : 16 + WIDTH]
    for slot in slots:
        drafter.end(slot)


def test_the_text_of_old_targets_and_of_long_ago_goes() -> None:
    text = list(range(100, 140))
    drafter = ChainDrafter(width=WIDTH)

    def knows() -> bool:
        slot = drafter.start([9], max_answer=100, tenant="t")
        _, _, counts, _ = advanced(drafter, [slot], [text[:16]], [WIDTH])
        drafter.end(slot)
        return bool(counts[0] > 3)

    def write() -> None:
        slot = drafter.start([9], max_answer=100, tenant="t")
        advanced(drafter, [slot], [text], [0])
        drafter.end(slot)

    write()
    drafter.expire(3600)
    assert knows()
    drafter.expire(0)
    assert not knows()
    write()
    for _ in range(4):
        drafter.target_updated()
    assert knows()
    drafter.target_updated()
    assert not knows()
    assert np.all(drafter._tenant_sums > 0)


def test_a_group_whose_window_has_gone_takes_no_more() -> None:
    """Its place may be another tenant's."""
    text = list(range(100, 140))
    drafter = ChainDrafter(width=WIDTH)
    slot = drafter.start([9], max_answer=100, tenant="t", group_id="g")
    group = drafter.group_of(slot)
    assert group is not None
    assert group.append(NEW_TEXT, text) >= 0
    found, _, counts, _ = advanced(drafter, [slot], [text[:16]], [WIDTH])
    assert found[0, : counts[0]].tolist() == text[16 : 16 + WIDTH]
    drafter.end(slot)
    drafter.forget(["t"])
    strangers = drafter.start([9], max_answer=100, tenant="u", group_id="g")
    others = drafter.group_of(strangers)
    assert others is not None
    assert others.number == group.number
    group.append(NEW_TEXT, text)
    _, _, counts, _ = advanced(drafter, [strangers], [text[:16]], [WIDTH])
    assert counts[0] == 0
