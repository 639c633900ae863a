"""Something writes to the target: it is noticed, said, and nothing is learnt from what was served since."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import redis
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from serving.hotswap import DraftFollower
from serving.local.decoder import RMSNorm
from serving.local.kernels.build import found_kernels
from serving.local.packed import PackedLinear, Replaced, can_pack, pack
from serving.local.target import Target
from serving.recorder import TraceRecorder
from serving.target_guard import TargetGuard
from speculator.lifecycle import Lifecycle
from speculator.pointer import DraftPointer
from speculator.stream import TraceStream
from tests.doubles import DoubleEngine
from tests.toy import make_toy_model
from tests.traces import make_trace
from trainer.metrics import TrainerMetrics
from trainer.rollback import RollbackWatch


def flip_a_bit(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.view(-1).view(torch.uint8)[-1] ^= 1


def flip_a_packed_bit(layer: Replaced) -> None:
    if not isinstance(layer, PackedLinear):
        flip_a_bit(layer.parts[0])
        return
    dense = layer.packed.to_dense()
    flip_a_bit(dense)
    layer.packed = pack(dense)


@pytest.mark.parametrize("own_kernels", [False, True], ids=["onednn", "own_kernels"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_one_flipped_bit_anywhere_is_noticed(tmp_path: Path, dtype: torch.dtype, own_kernels: bool) -> None:
    target = Target(
        make_toy_model(tmp_path, hidden_size=256 if own_kernels else 32),  # which they fit
        num_slots=1,
        context_length=8,
        cache_margin=1,
        dtype=dtype,
    )
    modules = list(target._model.modules())
    packed = [module for module in modules if isinstance(module, Replaced)]
    assert bool(packed) == (dtype is torch.bfloat16 and (can_pack() or (own_kernels and bool(found_kernels()))))
    guard = TargetGuard(target.weights)
    target.logits(target.forward(torch.tensor([[5, 6]]), first_slot=0, starts=[0])[0])
    assert guard.look()
    for layer in packed[:: len(packed) // 3 or 1]:
        guard = TargetGuard(target.weights)
        flip_a_packed_bit(layer)
        assert not guard.look()
    norms = [module for module in modules if isinstance(module, RMSNorm)]
    assert len(norms) == 2 * 8 + 1
    for tensor in (*target._model.state_dict().values(), *norms[0].derived, *norms[-1].derived):
        guard = TargetGuard(target.weights)
        flip_a_bit(tensor)
        assert not guard.look()


def test_a_table_that_a_long_text_changes_is_no_weight(tmp_path: Path) -> None:
    folder = make_toy_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    stretched = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config["rope_parameters"] |= {**stretched, "original_max_position_embeddings": 16}
    (folder / "config.json").write_text(json.dumps(config))
    target = Target(folder, num_slots=1, context_length=64, cache_margin=1)
    guard, table = TargetGuard(target.weights), target._model.model.rotary_emb.inv_freq.clone()
    target.forward(torch.full((1, 40), 5), first_slot=0, starts=[0])
    assert not torch.equal(target._model.model.rotary_emb.inv_freq, table)
    assert guard.look()


def test_a_transposed_weight_is_read_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, read, contiguous = torch.arange(12.0).view(3, 4).t(), set[int](), Tensor.contiguous

    def noted(tensor: Tensor) -> Tensor:
        found = contiguous(tensor)
        read.add(found.data_ptr())
        return found

    monkeypatch.setattr(Tensor, "contiguous", noted)
    guard = TargetGuard(lambda: [weight])
    assert guard.look()
    weight[3, 1] = 0.5
    assert not guard.look()
    assert read == {weight.data_ptr()}, "no copy was made"


def test_a_look_that_fails_says_nothing_about_the_weights() -> None:
    weights, memory = torch.ones(9), [True]

    def read() -> list[Tensor]:
        if not memory[0]:
            raise torch.OutOfMemoryError("none left")
        return [weights]

    guard = TargetGuard(read)
    memory[0], weights[3] = False, 2.0
    assert guard.look()
    memory[0] = True
    assert not guard.look()


def test_it_is_looked_at_now_and_then_and_said_once() -> None:
    weights, now_s, said = [torch.ones(9, dtype=torch.uint8)], [0.0], []
    guard = TargetGuard(lambda: weights, on_change=lambda: said.append(1), interval_s=60, clock=lambda: now_s[0])
    weights[0][8] = 0
    now_s[0] = 59.0
    assert guard.look_at_times(), "not yet"
    now_s[0] = 60.0
    assert not guard.look_at_times()
    weights[0][8] = 1
    assert not guard.look(), "what was served meanwhile was another model's"
    assert said == [1]


def test_a_changed_target_ends_recording_and_publishing(tmp_path: Path, redis_client: redis.Redis) -> None:
    """From the flipped bit to the trainer, through a real Redis."""
    target = Target(make_toy_model(tmp_path / "toy"), num_slots=1, context_length=8, cache_margin=1)
    pointer, stream = DraftPointer(redis_client, "toy"), TraceStream(redis_client, "toy", max_bytes=10**8)
    recorder = TraceRecorder(lambda: stream, max_buffer_bytes=10**8)
    guard = TargetGuard(target.weights, on_change=recorder.distrust, interval_s=0)

    def status() -> dict[str, int]:
        return {"target_ok": int(guard.look_at_times())}

    follower = DraftFollower(DoubleEngine(draft_version=1), pointer, engine_id="e", poll_s=0, status=status)
    registry, now_s = CollectorRegistry(), [0.0]
    watch = RollbackWatch(
        Lifecycle(tmp_path),
        TrainerMetrics(registry),
        published=pointer.published,
        engines=pointer.engines,
        first_pause_s=1,
        clock=lambda: now_s[0],
    )

    def turn() -> bool:
        follower.follow()
        now_s[0] += 10
        watch.look(1)
        return watch.paused

    assert recorder.submit(make_trace())
    assert not turn()
    flip_a_bit(target.embed)
    assert turn()
    assert registry.get_sample_value("slipstream_trainer_publishing_paused") == 1
    assert not recorder.submit(make_trace())
    recorder.close(5)
    assert recorder.stats().dropped_by_reason == {"target_changed": 1}
    assert stream.lag().appended == 1
    [paused] = Lifecycle(tmp_path).events.tail(9)
    assert (paused.kind, paused.fields["num_changed_targets"]) == ("publishing_paused", 1)
    # The engine is restarted with the weights that it names.
    guard = TargetGuard(target.weights)
    assert not turn()
