"""How SGLang and the trainer share one GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from slipstream.start.gpu_memory import GpuMemoryNeeds, gpu_memory_needs
from speculator.draft.checkpoint import expected_shapes
from speculator.draft.eagle3 import DraftConfig
from speculator.draft.initialization import DEFAULT_DRAFT_VOCAB_SIZE
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


QWEN3 = {
    "Qwen3-4B": (4_022_468_096, {"hidden_size": 2560, "intermediate_size": 9728}),
    "Qwen3-8B": (WEIGHTS, {}),
    "Qwen3-14B": (
        14_768_307_200,
        {"hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 40, "num_hidden_layers": 40},
    ),
    "Qwen3-32B": (
        32_762_123_264,
        {"hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64, "num_hidden_layers": 64},
    ),
}
"""Weights, and sizes where they are not those of the 8B."""


def target_folder(folder: Path, num_weights: int, sizes: dict[str, int]) -> Path:
    """A target of these sizes in bfloat16, with holes in the place of its weights."""
    (folder / "config.json").write_text(json.dumps({**SIZES, **sizes}))
    num_files = 1 + num_weights // 2_000_000_000
    shape = num_weights // num_files
    for number in range(num_files):
        header = json.dumps(
            {f"w{number}": {"dtype": "BF16", "shape": [shape], "data_offsets": [0, 2 * shape]}}
        ).encode()
        with (folder / f"model-{number}.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + 2 * shape)
    named = {f"w{number}": f"model-{number}.safetensors" for number in range(num_files)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": named}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_folder(tmp_path_factory.mktemp("target"), *QWEN3["Qwen3-8B"])


def shares(folder: Path, free_gib: float, *, used_gib: float = 0.0, tp_size: int = 1) -> GpuMemoryNeeds:
    sizes = json.loads((folder / "config.json").read_text())
    shapes = expected_shapes(DraftConfig.for_target(sizes, draft_vocab_size=DEFAULT_DRAFT_VOCAB_SIZE))
    return gpu_memory_needs(int(free_gib * GIB), folder, shapes, used_bytes=int(used_gib * GIB), tp_size=tp_size)


def test_the_trainer_fits_into_what_sglang_leaves(folder: Path) -> None:
    for card_gib in (40, 80, 140):
        one = shares(folder, card_gib)
        static = one.fraction * one.free
        assert static >= one.target + one.draft + one.least_cache
        assert static + one.work + one.trainer <= one.free
        assert one.work >= 0.15 * one.free
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
    static_bytes = [one.fraction * one.free for one in (first, again)]
    assert static_bytes[1] >= static_bytes[0]
    assert static_bytes[1] + again.work <= again.free


def test_of_a_target_on_two_gpus_each_has_half(folder: Path) -> None:
    whole, half = shares(folder, 24), shares(folder, 24, tp_size=2)
    assert (half.target, half.least_cache) == (whole.target // 2, whole.least_cache // 2)
    assert half.trainer == whole.trainer


def test_the_documents_table_of_cards_says_what_fits(tmp_path: Path) -> None:
    needs: dict[str, GpuMemoryNeeds] = {}
    for name, sizes in QWEN3.items():
        (tmp_path / name).mkdir()
        needs[name] = shares(target_folder(tmp_path / name, *sizes), 1000)

    def need_gib(name: str, free_gib: float, *, has_trainer: bool) -> float:
        one, work = needs[name], max(0.15 * free_gib, 3)
        return (one.target + one.draft + one.least_cache + has_trainer * one.trainer) / GIB + work

    page = (Path(__file__).parents[3] / "docs" / "how-to" / "compose.md").read_text()
    row = r"\| (\d+) GB \| ([\d.]+) \| (Qwen3-\w+), ([\d.]+) \| (Qwen3-\w+), ([\d.]+) \|"
    rows = re.findall(row, page)
    assert [found[0] for found in rows] == ["24", "48", "80"]
    for _, free, *said in rows:
        for (name, need), has_trainer in zip((said[:2], said[2:]), (True, False), strict=True):
            fitting = [each for each in QWEN3 if need_gib(each, float(free), has_trainer=has_trainer) <= float(free)]
            assert name == fitting[-1]
            assert float(need) == round(need_gib(name, float(free), has_trainer=has_trainer), 1)
    smallest = rows[0][2]
    assert f"SLIPSTREAM_MODEL=Qwen/{smallest}\n" in (Path(__file__).parents[3] / ".env.example").read_text()
