"""The driver of benchmarks/rollouts.py on two toy engines: batches with a barrier each, and everything together."""

from __future__ import annotations

from pathlib import Path

from benchmarks.engines import engine_with
from benchmarks.rollout_driver import Setting, Share, drive
from benchmarks.rollout_ways import dealt_batches
from serving.rollout.order import Fifo
from serving.rollout.scheduler import Policy
from serving.rollout.work import GroupRequest
from speculator.fresh import fresh_draft
from speculator.sampling import SamplingParams

SETTINGS = {"dtype": "float64", "num_slots": 2, "context_length": 64, "max_waiting": 64, "capture": False}


def groups(count: int) -> list[GroupRequest]:
    return [
        GroupRequest(group_id=str(number), prompt_token_ids=(1, 7, 8 + number), seeds=(10 * number, 1), max_tokens=9)
        for number in range(count)
    ]


def test_groups_are_dealt_in_turn_in_batches_that_fill_the_slots() -> None:
    found = dealt_batches(groups(5), 2, 4)
    assert [[[group.group_id for group in batch] for batch in batches] for batches in found] == [
        [["0", "2"], ["4"]],
        [["1", "3"]],
    ]


def test_engines_with_a_barrier_of_their_own_say_the_same_as_together(toy_model: Path) -> None:
    asked = groups(3)
    setting = Setting(sampling=SamplingParams(temperature=0.8), tenant="t", names_groups=True, slots=2)
    drafts = [fresh_draft(toy_model, draft_vocab_size=24, seed=seed) for seed in (0, 1)]
    with (
        engine_with(toy_model, drafts[0], 1, settings=SETTINGS) as one,
        engine_with(toy_model, drafts[1], 1, settings=SETTINGS) as other,
    ):
        engines = {"one": one, "other": other}
        batches = dict(zip(engines, dealt_batches(asked, 2, 2), strict=True))
        apart = [Share(engines={name: engine}, batches=batches[name]) for name, engine in engines.items()]
        policy = Policy(order=Fifo())
        divided, shared = (
            drive(shares, policy, setting) for shares in (apart, [Share(engines=engines, batches=[asked])])
        )
    assert len(divided.ends_s) == len(divided.texts) == 6
    assert divided.texts == shared.texts
    assert divided.ends_s == sorted(divided.ends_s)
