"""What is kept from learning: the held-out pool, which each trace leaves again, and the golden set, which none does."""

from __future__ import annotations

from pathlib import Path

import pytest

from speculator.draft.eagle3 import Eagle3Draft
from speculator.draft.initialization import fresh_draft
from speculator.errors import ConfigError
from speculator.trace import Trace
from tests.fixtures.drafts import make_draft
from tests.trainer.examples import config_for, example_of, record
from tests.trainer.stored import stored_of
from trainer.ranks import Ranks
from trainer.replay.eval_sets import GoldenSet, HeldOut, golden_set
from trainer.replay.reservoirs import Stored, sampling_key

MANY = 1 << 40


def pool(max_traces: int = 4, *, max_bytes: float = MANY, max_tenant_share: float = 0.5) -> HeldOut:
    return HeldOut(share=0.25, max_traces=max_traces, max_bytes=max_bytes, max_tenant_share=max_tenant_share, seed=3)


def fill(held_out: HeldOut, traces: list[Stored]) -> list[str]:
    """What leaves meanwhile."""
    left = []
    for stored in traces:
        held_out.keep(stored)
        left += [one.trace_id for one in held_out.release()]
    return left


def test_a_fixed_share_of_texts_is_held_out_whoever_sends_them() -> None:
    held_out, texts = pool(), [f"text-{number}" for number in range(2000)]
    chosen = [text for text in texts if held_out.holds_out(stored_of("first", text=text))]
    assert 0.22 < len(chosen) / len(texts) < 0.28
    assert chosen == [text for text in texts if held_out.holds_out(stored_of("again", text=text, tenant="another"))]


def test_they_are_not_the_texts_that_the_replay_keeps_longest() -> None:
    held_out, chosen = pool(), []
    for number in range(2000):
        stored = stored_of(str(number))
        if held_out.holds_out(stored):
            chosen.append(sampling_key(stored.provenance.text_hash, 3))
    assert 0.45 < sum(chosen) / len(chosen) < 0.55


def test_the_oldest_leaves_first_and_each_leaves() -> None:
    held_out, names = pool(), [str(number) for number in range(10)]
    assert held_out.is_young
    assert fill(held_out, [stored_of(name) for name in names[:4]]) == []
    assert held_out.is_young
    assert fill(held_out, [stored_of(name) for name in names[4:]]) == names[:6]
    assert not held_out.is_young
    assert held_out.trace_ids == names[6:]
    assert stored_of("again", text="9").provenance.text_hash in held_out
    assert stored_of("again", text="0").provenance.text_hash not in held_out


def test_a_flood_of_one_tenant_leaves_the_others_in() -> None:
    held_out = pool()
    fill(held_out, [stored_of("mine", tenant="small"), stored_of("mine-too", tenant="small")])
    left = fill(held_out, [stored_of(f"flood-{number}", tenant="large") for number in range(10)])
    assert left == [f"flood-{number}" for number in range(8)]
    assert held_out.trace_ids == ["mine", "mine-too", "flood-8", "flood-9"]
    assert fill(held_out, [stored_of("mine-three", tenant="small")]) == ["mine"]


def test_bytes_are_bounded_too() -> None:
    size = stored_of("any").num_bytes
    held_out = pool(max_bytes=2.5 * size)
    assert fill(held_out, [stored_of(str(number)) for number in range(4)]) == ["0", "1"]
    assert fill(pool(max_bytes=size / 2), [stored_of("large")]) == ["large"]


def taken(golden: GoldenSet, traces: list[Stored]) -> list[str]:
    names = []
    for stored in traces:
        if golden.accepts(stored):
            golden.keep(stored)
            names.append(stored.trace_id)
    return names


def test_the_golden_set_leaves_places_for_domains_that_come_later() -> None:
    golden = GoldenSet(max_traces=12, max_bytes=MANY, max_tenant_share=1.0)
    first = taken(golden, [stored_of(f"a{number}", domain="a") for number in range(50)])
    assert first == [f"a{number}" for number in range(6)]
    assert len(taken(golden, [stored_of(f"b{number}", domain="b") for number in range(50)])) == 4
    assert len(taken(golden, [stored_of(f"c{number}", domain="c") for number in range(50)])) == 2
    assert taken(golden, [stored_of("d0", domain="d")]) == []
    assert golden.trace_ids[:6] == first


def test_nobody_owns_the_golden_set() -> None:
    golden = GoldenSet(max_traces=10, max_bytes=MANY, max_tenant_share=0.3)
    assert len(taken(golden, [stored_of(f"x{number}", tenant="x", domain=str(number)) for number in range(50)])) == 3
    assert len(taken(golden, [stored_of(f"y{number}", tenant="y", domain="0") for number in range(50)])) == 2


def test_the_golden_set_is_bounded_in_bytes() -> None:
    size = stored_of("any").num_bytes
    golden = GoldenSet(max_traces=100, max_bytes=2.5 * size, max_tenant_share=1.0)
    assert taken(golden, [stored_of(str(number)) for number in range(9)]) == ["0", "1"]
    assert stored_of("again", text="0").provenance.text_hash in golden


def test_an_operators_recording_takes_the_place_of_traffic(
    model_dir: Path, traces: list[Trace], tmp_path: Path
) -> None:
    fitting, fingerprint = fresh_draft(model_dir, draft_vocab_size=40, seed=0), traces[0].header.target_fingerprint
    config = config_for(model_dir, tmp_path, golden=record(tmp_path / "golden.rec", traces), golden_traces=5)

    def read(ranks: Ranks, draft: Eagle3Draft = fitting, target: str = fingerprint) -> GoldenSet:
        return golden_set(config, lambda trace: example_of(trace, draft), ranks, target_fingerprint=target)

    names = [trace.header.trace_id for trace in traces[:5]]
    assert read(Ranks()).trace_ids == names
    assert sorted(read(Ranks(0, 2)).trace_ids + read(Ranks(1, 2)).trace_ids) == names
    assert not read(Ranks()).accepts(stored_of("of traffic"))
    with pytest.raises(ConfigError, match="SLIPSTREAM_TRAINER_GOLDEN"):
        read(Ranks(), target="another")
    with pytest.raises(ConfigError, match="SLIPSTREAM_TRAINER_GOLDEN"):
        read(Ranks(), draft=make_draft())


def test_siblings_leave_before_other_prompts_do() -> None:
    """A whole group, or two, would otherwise be all that a draft is judged by."""
    siblings = [stored_of(f"a{number}", prompt_hash=b"a") for number in range(8)]
    held_out = pool(4, max_tenant_share=1.0)
    assert fill(held_out, [stored_of("b"), stored_of("c"), *siblings]) == [f"a{number}" for number in range(6)]
    assert fill(held_out, [stored_of("d"), stored_of("e")]) == ["a6", "b"]
    assert [one.trace_id for one in held_out] == ["c", "a7", "d", "e"]


def test_in_the_golden_set_siblings_take_one_place() -> None:
    golden = GoldenSet(max_traces=8, max_bytes=MANY, max_tenant_share=1.0)
    for number in range(4):
        sibling = stored_of(f"a{number}", prompt_hash=b"a")
        assert golden.accepts(sibling) == (number == 0)
        if number == 0:
            golden.keep(sibling)
    assert golden.accepts(stored_of("b"))
