"""Our kernels compute what PyTorch and oneDNN do, and a token gets the same, bit for bit, whatever is beside it."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serving.local.kernels import build
from serving.local.kernels.build import (
    AVX2,
    AVX512,
    Instructions,
    available,
    compile_library,
    find_compiler,
    found_kernels,
    kernel_folder,
    prefers_bf16_pairs,
)
from serving.local.kernels.layers import KernelLinear, PanelSlots, move_to_huge_pages
from serving.local.kernels.library import Heads, Kernels, KernelWindow, Layer, Norm, parents_of, set_num_threads
from serving.local.target.layers import PackedLinear, can_pack
from serving.local.target.model import Target
from speculator.draft.sampling_params import SamplingParams
from speculator.proposals.suffix_drafter import SuffixConfig, SuffixDrafter
from tests.fixtures.decoding import FixedPlanner, WholeTrees
from tests.fixtures.toy import make_toy_model, moved_model, random_draft, set_every_bias_and_norm
from tests.fixtures.waiting import wait_until
from tests.serving.local.harness import GREEDY, run_pass, takes_branches, toy_engine

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: make system-packages installs it"),
    pytest.mark.skipif(not available(), reason="a CPU without AVX2, or with AMX"),
]
needs_avx512 = pytest.mark.skipif(AVX512 not in available(), reason="a CPU without AVX-512")
HAS_PAIRS = bool(torch.cpu.get_capabilities().get("avx512_bf16", False))
needs_pairs = pytest.mark.skipif(not HAS_PAIRS, reason="a CPU without AVX-512 BF16")
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, top_k=20)


@pytest.fixture(scope="module", params=[pytest.param(AVX512, marks=needs_avx512), AVX2], ids=["avx512", "avx2"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """For all instructions that this CPU has."""
    return _compiled(request.param)


def _compiled(instructions: Instructions) -> Kernels:
    return Kernels(compile_library(find_compiler(), kernel_folder(), instructions))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its heads and widths are such that the kernels compute it all."""
    return make_toy_model(tmp_path_factory.mktemp("toy"), hidden_size=256)


TARGETS = [
    pytest.param((AVX512, False), marks=needs_avx512, id="avx512"),
    pytest.param((AVX512, True), marks=[needs_avx512, needs_pairs], id="avx512-pairs"),
    pytest.param((AVX2, False), id="avx2"),
]


@pytest.fixture(scope="module", params=TARGETS)
def target(model_dir: Path, request: pytest.FixtureRequest) -> Iterator[Target]:
    instructions, in_pairs = request.param
    found = _compiled(instructions)
    found.in_pairs = in_pairs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serving.local.target.model.found_kernels", lambda: found)
        patch.setattr("serving.local.draft.found_kernels", lambda: found)
        target = _target(model_dir)
        layers = [module for module in target.model.modules() if isinstance(module, KernelLinear)]
        assert len(layers) == 4 * target.config["num_hidden_layers"] + 1
        assert {bool(module.layer.in_pairs) for module in layers} == {in_pairs}
        yield target  # and drafts beside it multiply in the same way


def _target(
    model_dir: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    fused: bool = True,
) -> Target:
    target = Target(
        model_dir,
        num_slots=4,
        context_length=256,
        cache_margin=17,
        dtype=dtype,
        fused=fused,
    )
    assert target.takes_windows == (fused and dtype == torch.bfloat16)
    return target


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """That the kernels compute with."""
    set_num_threads(request.param)
    yield request.param
    set_num_threads(1)


def _ways(kernels: Kernels) -> list[bool]:
    """Whether products are in pairs: what there is, and the CPU has."""
    return [False, True] if kernels.has_pairs and HAS_PAIRS else [False]


def _tokens(target: Target, *shape: int) -> Tensor:
    return torch.randint(len(target.embed), shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_not_made_one(kernels: Kernels, broken: float) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 64).bfloat16().requires_grad_(False)
    for place in (0, 17, 63):
        x = torch.randn(3, 64).bfloat16()
        x[1, place] = broken
        for in_pairs in _ways(kernels):
            y = KernelLinear(linear, kernels, in_pairs=in_pairs)(x)
            assert not y[1].isfinite().any()
            assert y[::2].isfinite().all()
    for place in (64 + 3, 2 * 64 + 3):  # of a key, of a value
        before, after = (torch.randn(30, 3 * 64).bfloat16() for _ in range(2))
        slots = PanelSlots(1, 2, 1, 80, 64)
        before[19:21, place] = broken
        seen = [
            _attended(kernels, slots, before[token][None], [KernelWindow(1, token, 1)], sharing=1)
            for token in range(30)
        ]
        assert torch.cat(seen[:19]).isfinite().all()
        assert all(not one.isfinite().all() for one in seen[20:])
        # What is left behind the end is not seen, whether its place is the first of two or the second.
        for token in range(30):
            assert (
                _attended(kernels, slots, after[token][None], [KernelWindow(1, token, 1)], sharing=1).isfinite().all()
            )


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("in_pairs", [False, pytest.param(True, marks=needs_pairs)])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(64, 64), (80, 40), (592, 1000), (576, 1536), (1536, 100)])
def test_a_bfloat16_layer_is_as_near_as_onednns_and_each_tokens_own(
    kernels: Kernels, num_inputs: int, num_outputs: int, in_pairs: bool, bias: bool
) -> None:
    if in_pairs and not kernels.has_pairs:
        pytest.skip("AVX2 has none")
    torch.manual_seed(0)
    plain = nn.Linear(num_inputs, num_outputs, bias=bias).bfloat16().requires_grad_(False)
    ours, theirs = KernelLinear(plain, kernels, in_pairs=in_pairs), PackedLinear(plain) if can_pack() else plain
    x = torch.randn(41, num_inputs).bfloat16()
    exact = F.linear(x.double(), plain.weight.double(), plain.bias.double() if bias else None)
    with torch.inference_mode():
        all_at_once = ours(x)
        error, others = ((y.double() - exact).norm() / exact.norm() for y in (all_at_once, theirs(x)))
        assert error < 1.01 * others
        for rows in (*range(1, 14), 25):
            assert torch.equal(torch.cat([ours(some) for some in x.split(rows)]), all_at_once)
        assert torch.equal(ours(x.view(1, 41, -1)[:, ::2]), all_at_once[None, ::2])
        assert ours(x[:0]).shape == (0, num_outputs)


@needs_avx512
@pytest.mark.parametrize("sharing", [1, 3])
def test_all_instructions_give_the_same_bits(model_dir: Path, sharing: int) -> None:
    torch.manual_seed(0)
    linear, qkv = nn.Linear(576, 100).bfloat16().requires_grad_(False), torch.randn(41, (sharing + 2) * 128).bfloat16()
    angles, x = torch.randn(41, 64), torch.randn(41, 576).bfloat16()
    results = []
    for instructions in (AVX512, AVX2):
        kernels = _compiled(instructions)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("serving.local.target.model.found_kernels", lambda kernels=kernels: kernels)
            target = _target(model_dir)
        passed = run_pass(target, _tokens(target, 1, 40), first_slot=0, starts=[0])
        slots = PanelSlots(1, 1, 2, 41, 64)
        attended = _attended(kernels, slots, qkv, [KernelWindow(0, 0, 41)], sharing=sharing, scale=0.125, angles=angles)
        results.append([KernelLinear(linear, kernels)(x), attended, *passed])
    assert all(torch.equal(mine, other) for mine, other in zip(*results, strict=True))


def test_a_targets_weights_lie_one_behind_the_other(target: Target) -> None:
    layers = [module for module in target.model.modules() if isinstance(module, KernelLinear)]
    weights = [layer.parts[0] for layer in layers]
    assert [layer.layer.weight for layer in layers] == [weight.data_ptr() for weight in weights]
    sizes = [weight.nbytes for weight in weights]
    assert [weight.data_ptr() - weights[0].data_ptr() for weight in weights] == [0, *accumulate(sizes[:-1])]


def test_weights_stay_where_they_are_if_there_is_no_room(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = KernelLinear(nn.Linear(64, 64).bfloat16().requires_grad_(False), kernels)
    place, x = layer.layer.weight, torch.randn(1, 64).bfloat16()
    before = layer(x)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr("serving.local.kernels.layers.mmap.mmap", refuse)
        move_to_huge_pages([layer])
    assert layer.layer.weight == place
    move_to_huge_pages([layer])
    assert layer.layer.weight == layer.parts[0].data_ptr() != place
    assert torch.equal(layer(x), before)


def test_callers_at_the_same_time_get_what_they_get_alone(kernels: Kernels) -> None:
    """One of them has the team, of two to four; the others compute by themselves."""
    torch.manual_seed(0)
    wide = KernelLinear(nn.Linear(576, 1536, bias=False).bfloat16().requires_grad_(False), kernels)
    back = KernelLinear(nn.Linear(1536, 576, bias=False).bfloat16().requires_grad_(False), kernels)
    inputs = [torch.randn(rows, 576).bfloat16() for rows in (2, 3, 7, 13)]
    alone = [back(wide(x)) for x in inputs]

    def compute(caller: int) -> bool:
        set_num_threads(caller + 1)
        return all(torch.equal(back(wide(inputs[caller])), alone[caller]) for _ in range(200))

    with ThreadPoolExecutor(len(inputs)) as pool:
        assert list(pool.map(compute, range(len(inputs)))) == [True] * len(inputs)


def test_more_threads_than_cores_and_pieces_give_the_same(kernels: Kernels) -> None:
    """Ten panels among sixteen threads, several of which always come too late to take one."""
    torch.manual_seed(0)
    layer = KernelLinear(nn.Linear(576, 640, bias=False).bfloat16().requires_grad_(False), kernels)
    x = torch.randn(13, 576).bfloat16()
    alone = layer(x)
    try:
        set_num_threads(16)
        assert all(torch.equal(layer(x), alone) for _ in range(200))
    finally:
        set_num_threads(1)


class Timed:
    """Kernels whose layers take so many seconds, one by one and in pairs."""

    has_pairs, in_pairs = True, False

    def __init__(self, *seconds: int) -> None:
        self._seconds, self.now = seconds, 0

    def linear(self, layer: Layer, x: Tensor) -> Tensor:
        self.now += self._seconds[layer.in_pairs]
        return x


@pytest.mark.parametrize(("seconds", "is_faster"), [((10, 20), False), ((10, 9), False), ((20, 10), True)])
def test_pairs_are_taken_where_they_are_measured_to_be_faster(seconds: tuple[int, int], is_faster: bool) -> None:
    """On a CPU that has the instruction."""
    timed: Any = Timed(*seconds)
    assert prefers_bf16_pairs(timed, clock=lambda: timed.now) is (is_faster and HAS_PAIRS)
    assert (timed.now > 0) == HAS_PAIRS


def test_models_that_do_not_fit_are_left_to_onednn(tmp_path: Path) -> None:
    narrow, stretching = make_toy_model(tmp_path / "0"), make_toy_model(tmp_path / "1", hidden_size=256)
    config = json.loads((stretching / "config.json").read_text())
    # It would turn tokens by how long the longest text beside them is.
    rope = {**config["rope_parameters"], "rope_type": "dynamic", "factor": 2.0}
    (stretching / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    for model_dir in (narrow, stretching):
        target = Target(model_dir, num_slots=1, context_length=8, cache_margin=1)
        assert not any(isinstance(module, KernelLinear) for module in target.model.modules())


def _attended(
    kernels: Kernels,
    slots: PanelSlots,
    qkv: Tensor,
    windows: list[KernelWindow],
    *,
    sharing: int,
    scale: float = 1.0,
    angles: Tensor | None = None,
) -> Tensor:
    """Over the first layer; without `angles` [positions, h] nothing is rotated."""
    groups = slots.storage.shape[2]
    head_dim = qkv.shape[1] // ((sharing + 2) * groups)
    heads = Heads(sharing, groups, head_dim, scale, Norm(), Norm())
    angles = torch.zeros(slots.length, head_dim) if angles is None else angles
    return kernels.attend(heads, windows, (angles.cos(), angles.sin()), qkv, slots.storage[0])


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("num_groups", "num_sharing"), [(3, 3), (1, 8), (4, 1)])
def test_attention_is_exact_and_each_tokens_own(
    kernels: Kernels, num_groups: int, num_sharing: int, head_dim: int
) -> None:
    torch.manual_seed(0)
    num_slots, num_tokens, num_heads = 4, 140, (num_sharing + 2) * num_groups
    qkv = torch.randn(num_slots, num_tokens, num_heads, head_dim).bfloat16()
    angles = (torch.arange(num_tokens)[:, None] * torch.logspace(0, -3, head_dim // 2)).repeat(1, 2)
    exact = _exact_attention(qkv.double(), angles.double(), num_groups, head_dim**-0.5)
    outputs = []
    for sizes in ([1] * 140, [7] * 20, [5, 64, 1, 58, 12], [140]):
        slots = PanelSlots(2, num_slots, num_groups, num_tokens, head_dim)
        slots.storage.normal_(0, 100)  # leftovers
        out = torch.empty(num_slots, num_tokens, num_sharing * num_groups * head_dim, dtype=torch.bfloat16)
        # Slot by slot and together, in any order, and each with another number of tokens.
        for start, size in zip(torch.tensor([0, *sizes]).cumsum(0).tolist(), sizes, strict=False):
            for members in ((2,), (3, 0, 1)):
                windows = [KernelWindow(slot, start, size) for slot in members]
                rows = qkv[list(members), start : start + size].reshape(len(members) * size, -1)
                got = _attended(kernels, slots, rows, windows, sharing=num_sharing, scale=head_dim**-0.5, angles=angles)
                out[list(members), start : start + size] = got.view(len(members), size, -1)
        outputs.append(out)
    torch.testing.assert_close(outputs[0].double(), exact, rtol=0.02, atol=0.01)
    assert all(torch.equal(out, outputs[0]) for out in outputs[1:])


def _exact_attention(qkv_STNh: Tensor, angles_Th: Tensor, num_groups: int, scale: float) -> Tensor:
    num_slots, num_tokens, num_heads, _ = qkv_STNh.shape
    sharing = num_heads // num_groups - 2
    cos, sin = angles_Th.cos()[:, None], angles_Th.sin()[:, None]
    left, right = qkv_STNh.chunk(2, -1)
    rotated = qkv_STNh * cos + torch.cat([-right, left], -1) * sin
    queries, keys = rotated[:, :, : sharing * num_groups], rotated[:, :, sharing * num_groups : -num_groups]
    values = qkv_STNh[:, :, -num_groups:]
    out = F.scaled_dot_product_attention(
        queries.transpose(1, 2),
        keys.transpose(1, 2).repeat(1, sharing, 1, 1),
        values.transpose(1, 2).repeat(1, sharing, 1, 1),
        is_causal=True,
        scale=scale,
    )
    return out.transpose(1, 2).reshape(num_slots, num_tokens, -1)


PARENTS = [-1, 0, 1, 2, 0, 4, 1, 6, 5, 0]
"""A chain of three, and branches behind the root and behind the first of it."""


def path_to(place: int, parents: list[int] = PARENTS) -> list[int]:
    return [] if place < 0 else [*path_to(parents[place], parents), place]


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("start", [0, 1, 60, 63, 121])
def test_each_token_of_a_tree_sees_its_own_path_alone(kernels: Kernels, start: int) -> None:
    """To the last bit, whatever lies between; beside a window that is none. Its path can be kept, and only that."""
    torch.manual_seed(4)
    angles = (torch.arange(200)[:, None] * torch.logspace(0, -3, 32)).repeat(1, 2)
    before, new, last = (torch.randn(size, 5 * 2 * 64).bfloat16() for size in (max(start, 1), len(PARENTS), 1))

    def attended(windows: list[KernelWindow], rows: Tensor, slots: PanelSlots) -> Tensor:
        return _attended(kernels, slots, rows, windows, sharing=3, scale=0.125, angles=angles)

    def begun() -> PanelSlots:
        slots = PanelSlots(2, 2, 2, 150, 64)
        slots.storage.normal_(0, 100)  # leftovers
        for slot in (0, 1):
            if start:
                attended([KernelWindow(slot, 0, start)], before, slots)
        return slots

    slots = begun()
    both = [KernelWindow(0, start, len(PARENTS), parents_of(PARENTS)), KernelWindow(1, start, 2)]
    out = attended(both, torch.cat([new, new[:2]]), slots)
    for place in range(len(PARENTS)):
        path, alone, kept = path_to(place), begun(), PanelSlots(2, 2, 2, 150, 64)
        assert torch.equal(attended([KernelWindow(0, start, len(path))], new[path], alone), out[path])
        kept.storage.copy_(slots.storage)
        kept.keep_path(0, start, path)
        end = [KernelWindow(0, start + len(path), 1)]
        assert torch.equal(attended(end, last, kept), attended(end, last, alone))
        assert torch.equal(kept.storage[:, 1], slots.storage[:, 1])
    assert torch.equal(out[-2:], out[:2])


def test_attention_stays_exact_where_scores_are_extreme(kernels: Kernels) -> None:
    torch.manual_seed(2)
    qkv = torch.randn(34, 3, 64)
    qkv[:, 0] *= 30
    qkv[5, 1] *= 300
    qkv = qkv.bfloat16()
    out = _attended(kernels, PanelSlots(1, 1, 1, 40, 64), qkv.view(34, -1), [KernelWindow(0, 0, 34)], sharing=1)
    exact = _exact_attention(qkv.double()[None], torch.zeros(34, 64).double(), 1, 1.0)[0]
    torch.testing.assert_close(out.double(), exact, rtol=0.01, atol=0.01)


def test_a_slot_that_was_moved_holds_what_the_other_held(kernels: Kernels) -> None:
    torch.manual_seed(3)
    for length in (1, 63, 64, 65, 99):
        slots = PanelSlots(1, 3, 2, 100, 128)
        qkv, new = (torch.randn(size, 8 * 128).bfloat16() for size in (length, 1))
        _attended(kernels, slots, qkv, [KernelWindow(2, 0, length)], sharing=2)
        slots.move(2, 0, length)
        there, here = (_attended(kernels, slots, new, [KernelWindow(slot, length, 1)], sharing=2) for slot in (2, 0))
        assert torch.equal(there, here)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@torch.inference_mode()
def test_a_pass_is_as_near_to_the_exact_result_as_hugging_faces(tmp_path: Path, family: str) -> None:
    model_dir = make_toy_model(tmp_path, hidden_size=256, family=family)
    set_every_bias_and_norm(model_dir)
    ours = _target(model_dir)
    theirs, exact = (
        Target(model_dir, num_slots=4, context_length=256, cache_margin=17, dtype=dtype, fused=False)
        for dtype in (torch.bfloat16, torch.float64)
    )
    tokens = _tokens(ours, 4, 90)
    parts = []
    for one in (ours, theirs, exact):
        passes = [
            run_pass(one, tokens[:, start:end], first_slot=0, starts=[start] * 4) for start, end in ((0, 80), (80, 90))
        ]
        hidden, features = (torch.cat(part, 1) for part in zip(*passes, strict=True))
        parts.append([one.logits(hidden), features])
    alone = [run_pass(ours, tokens[1:2, place : place + 1], first_slot=1, starts=[place])[1] for place in range(90)]
    assert torch.equal(torch.cat(alone, 1)[0], parts[0][1][1])
    for mine, reference, ideal in zip(*parts, strict=True):
        assert mine.dtype == torch.bfloat16
        noise = (reference - ideal).norm() / ideal.norm()
        assert 0 < noise < 0.25
        assert (mine - ideal).norm() / ideal.norm() < 1.3 * noise


@pytest.mark.usefixtures("num_threads")
@torch.inference_mode()
def test_a_pass_of_several_tokens_is_bit_for_bit_that_of_one_at_a_time(target: Target) -> None:
    """Of several sizes, the largest of 54 tokens."""
    tokens = _tokens(target, 3, 25)
    for num_before in (0, 7):
        passes = []
        for num_new in (1, 2, 9, 18):
            run_pass(target, tokens[:, : num_before or 1], first_slot=0, starts=[0] * 3)
            parts = [
                run_pass(target, tokens[:, start : start + num_new], first_slot=0, starts=[start] * 3)
                for start in range(num_before, num_before + 18, num_new)
            ]
            hidden, features = (torch.cat(part, 1) for part in zip(*parts, strict=True))
            passes.append((target.logits(hidden), features))
        alone = [run_pass(target, tokens[1:2, start : start + 1], first_slot=3, starts=[start]) for start in range(25)]
        passes_alone = torch.cat([features for _, features in alone], 1)
        assert torch.equal(passes_alone[0, num_before : num_before + 18], passes[0][1][1])
        for logits, features in passes[1:]:
            assert torch.equal(logits, passes[0][0])
            assert torch.equal(features, passes[0][1])


@torch.inference_mode()
def test_rows_of_different_length_in_one_pass_are_those_of_a_pass_each(target: Target) -> None:
    tokens, starts = _tokens(target, 3, 60), (5, 0, 31)
    rows = [
        tokens[slot, start : start + num_new]
        for slot, (start, num_new) in enumerate(zip(starts, (4, 1, 29), strict=True))
    ]
    for slot, start in enumerate(starts):
        if start:
            run_pass(target, tokens[slot : slot + 1, :start], first_slot=slot, starts=[0])
    together = target.forward([row.tolist() for row in rows], first_slot=0, starts=starts)
    alone = [
        run_pass(target, row[None], first_slot=slot, starts=[start])
        for slot, (row, start) in enumerate(zip(rows, starts, strict=True))
    ]
    for part, parts in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.equal(part, torch.cat([one[0] for one in parts]))


@pytest.mark.usefixtures("num_threads")
@torch.inference_mode()
def test_a_pass_over_a_tree_is_bit_for_bit_that_over_its_paths(target: Target) -> None:
    tokens, prefix = _tokens(target, 1, len(PARENTS))[0], _tokens(target, 1, 40)
    for slot in range(2):
        run_pass(target, prefix, first_slot=slot, starts=[0])
    rows, starts, windows = [tokens.tolist(), tokens[:3].tolist()], [40, 40], [PARENTS, None]
    together = target.forward(rows, first_slot=0, starts=starts, parents=windows)
    alone = run_pass(target, tokens[None], first_slot=0, starts=[40], parents=[PARENTS])
    for place in range(len(PARENTS)):
        path = path_to(place)
        others = run_pass(target, tokens[path][None], first_slot=1, starts=[40])
        for part, of_alone, other in zip(together, alone, others, strict=True):
            assert torch.equal(part[path], other[0])
            assert torch.equal(of_alone[0, path], other[0])


@torch.inference_mode()
def test_it_is_as_near_as_onednns_and_follows_weights_that_move(
    target: Target, model_dir: Path, tmp_path: Path
) -> None:
    new_dir = moved_model(model_dir, tmp_path / "new")
    plain = _target(model_dir, fused=False)
    exact = _target(model_dir, dtype=torch.float64)
    try:
        for folder in (model_dir, new_dir):
            for one in (target, plain, exact) if folder == new_dir else ():
                one.install(one.stage(new_dir))
            tokens = _tokens(target, 4, 12)
            ours, theirs, ideal = (
                one.logits(run_pass(one, tokens, first_slot=0, starts=[0] * 4)[0]).double()
                for one in (target, plain, exact)
            )
            noise = (theirs - ideal).norm() / ideal.norm()
            assert 0 < noise < 0.2
            assert (ours - ideal).norm() / ideal.norm() < 1.5 * noise
    finally:
        target.install(target.stage(model_dir))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_the_same_with_and_without_a_draft(
    target: Target, model_dir: Path, sampling: SamplingParams
) -> None:
    texts, accepted = [], []
    for depth, planner in ((0, None), (4, None), (4, FixedPlanner()), (4, WholeTrees())):
        draft = random_draft(model_dir, seed=1)
        with toy_engine(model_dir, draft=draft, depth=depth, planner=planner, target=target) as engine:
            # The gate soon leaves out the branches of texts as regular as a toy's.
            engine.engine.texts.drafter = SuffixDrafter(SuffixConfig(learns=False))
            requests = [
                engine.request(prompt, sampling=sampling, seed=7, max_tokens=120)
                for prompt in ("hello there", "a", "a b a b a b a b")
            ]
            answers = engine.ask(*requests)
            wait_until(lambda: len(engine.traces) == len(requests))  # noqa: B023 - called at once
        texts.append([answer.token_ids for answer in answers])
        accepted.append(sum(answer.num_accepted for answer in answers))
    assert texts == [texts[0]] * len(texts)
    assert accepted[0] == 0
    assert min(accepted[2:]) > 0, "the planner may have asked nobody"
    assert takes_branches(engine.traces)


def test_without_a_compiler_that_works_there_are_none(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = tmp_path / "g++"
    # It is asked to write behind -o, the last but one.
    failing.write_text('#!/bin/bash\ntouch "${@: -2:1}"\necho no such header >&2\nexit 1\n')
    failing.chmod(0o700)
    folder = tmp_path / "compiled"
    folder.mkdir()
    with pytest.raises(RuntimeError, match="no such header"):
        compile_library(str(failing), folder, AVX2)
    assert not list(folder.iterdir())
    monkeypatch.setattr("serving.local.target.model.found_kernels", found_kernels.__wrapped__)
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    for compiler in (str(failing), "no-such-compiler"):
        monkeypatch.setenv("CXX", compiler)
        target = Target(model_dir, num_slots=4, context_length=256, cache_margin=17)
        assert any(isinstance(module, PackedLinear) for module in target.model.modules()) == can_pack()
        assert not any(isinstance(module, KernelLinear) for module in target.model.modules())
        hidden, _ = run_pass(target, _tokens(target, 1, 3), first_slot=0, starts=[0])
        assert hidden.isfinite().all()


def test_kernels_are_compiled_once_whoever_starts_first(tmp_path: Path) -> None:
    counting = tmp_path / "g++"
    counting.write_text(f'#!/bin/bash\necho >> {tmp_path / "runs"}\nexec {find_compiler()} "$@"\n')
    counting.chmod(0o700)
    folder = tmp_path / "kernels"
    folder.mkdir()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: compile_library(str(counting), folder, AVX2), range(2)))
    assert len(found) == 2
    num_runs = len((tmp_path / "runs").read_text().splitlines())
    assert num_runs in (1, 2)
    compile_library(str(counting), folder, AVX2)
    assert len((tmp_path / "runs").read_text().splitlines()) == num_runs
    assert [path.suffix for path in folder.iterdir()] == [".so"]


@pytest.mark.skipif(not available(), reason="this CPU has no kernels")
def test_a_library_that_a_power_cut_left_empty_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = compile_library(find_compiler(), kernel_folder(), available()[0])
    copying = tmp_path / "g++"
    copying.write_text(f'#!/bin/bash\ncp {made} "${{@: -2:1}}"\n')
    copying.chmod(0o700)
    monkeypatch.setenv("CXX", str(copying))
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "SHIPPED", tmp_path / "none")
    damaged = kernel_folder() / made.name
    damaged.touch()
    assert found_kernels.__wrapped__() is not None
    assert damaged.read_bytes() == made.read_bytes()


def test_of_two_libraries_in_a_process_each_calls_its_own(tmp_path: Path) -> None:
    compile_library(find_compiler(), tmp_path, AVX2)
    (library,) = tmp_path.iterdir()
    listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    symbols = [line.split()[1:] for line in listed.splitlines()]
    assert sum(name.startswith("slipstream_") for _, name in symbols) == 8
    assert not [name for kind, name in symbols if kind == "u"], "what a process has once, whoever loads it"


def test_kernels_are_kept_where_nobody_else_can_put_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = tmp_path / "cache" / "compiled"
    assert kernel_folder() == own
    assert own.stat().st_mode & 0o777 == 0o700
    assert kernel_folder() == own
    (tmp_path / "file").touch()
    for cache, mode in ((tmp_path / "file", 0o700), (tmp_path / "cache", 0o770)):
        monkeypatch.setenv("SLIPSTREAM_CACHE", str(cache))
        own.chmod(mode)
        folder = kernel_folder()
        assert folder != own
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
