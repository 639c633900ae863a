"""How SGLang and the trainer share one GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.start.card import CardShares, card_shares
from speculator.draft.checkpoint import expected_shapes
from speculator.draft.eagle3 import DraftConfig
from speculator.errors import ConfigError

GIB = 2**30
SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
WEIGHTS = 8_190_735_360


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sizes of Qwen3-8B in bfloat16, and a hole in the place of its weights."""
    folder = tmp_path_factory.mktemp("target")
    (folder / "config.json").write_text(json.dumps(SIZES))
    header = json.dumps({"weight": {"dtype": "BF16", "shape": [WEIGHTS], "data_offsets": [0, 2 * WEIGHTS]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * WEIGHTS)
    return folder


def shares(folder: Path, free_gib: float, *, used_gib: float = 0.0, tp_size: int = 1) -> CardShares:
    shapes = expected_shapes(DraftConfig.for_target(SIZES, draft_vocab_size=32000))
    return card_shares(int(free_gib * GIB), folder, shapes, used_bytes=int(used_gib * GIB), tp_size=tp_size)


def test_the_trainer_fits_into_what_sglang_leaves(folder: Path) -> None:
    for card_gib in (40, 80, 140):
        one = shares(folder, card_gib)
        static = one.fraction * one.card
        assert static >= one.target + one.draft + one.least_cache
        assert static + one.work + one.trainer <= one.card
        assert one.work >= 0.15 * one.card
    assert shares(folder, 80).fraction > shares(folder, 40).fraction


def test_what_does_not_fit_is_refused_with_the_sum(folder: Path) -> None:
    one = shares(folder, 24)
    with pytest.raises(ConfigError, match=r"24\.0 GiB of the GPU are free") as refused:
        _ = one.fraction
    said = str(refused.value)
    for size in (one.target, one.draft, one.least_cache, one.work, one.trainer):
        assert f" {size / GIB:.1f}" in said
    total = one.target + one.draft + one.least_cache + one.work + one.trainer
    assert f"need {total / GIB:.1f} (" in said
    assert "SLIPSTREAM_TRAINER_GPU" in said


def test_sglang_that_starts_again_beside_its_trainer_counts_it_once(folder: Path) -> None:
    first = shares(folder, 40, used_gib=0.5)
    trainer_gib = first.trainer / GIB
    again = shares(folder, 40 - trainer_gib, used_gib=trainer_gib)
    assert (first.trainer > 0, again.trainer) == (True, 0)
    static_bytes = [one.fraction * one.card for one in (first, again)]
    assert static_bytes[1] >= static_bytes[0]
    assert static_bytes[1] + again.work <= again.card


def test_of_a_target_on_two_gpus_each_has_half(folder: Path) -> None:
    whole, half = shares(folder, 24), shares(folder, 24, tp_size=2)
    assert (half.target, half.least_cache) == (whole.target // 2, whole.least_cache // 2)
    assert half.trainer == whole.trainer
