"""Our kernels compute what PyTorch and oneDNN do, and a token gets the same, bit for bit, whatever is beside it."""

from __future__ import annotations

import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serving.local.attention import KVSlots, SlotWindow
from serving.local.compiled import find_compiler, kernel_folder
from serving.local.int8 import Int8Linear
from serving.local.kernels import Bfloat16Linear, Kernels, VnniLinear, available, compiled_kernels, found_kernels
from serving.local.packed import PackedLinear, has_onednn
from serving.local.target import Target
from speculator.sampling import SamplingParams
from tests.moved import moved_model
from tests.serving.local.harness import GREEDY, toy_engine
from tests.toy import make_toy_model, random_draft

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: make system-packages installs it"),
    pytest.mark.skipif(not (available() and has_onednn()), reason="a CPU without AVX-512 VNNI, or no oneDNN"),
]
has_bfloat16 = torch.cpu.get_capabilities().get("avx512_bf16", False)
needs_bfloat16 = pytest.mark.skipif(not has_bfloat16, reason="a CPU without bfloat16 products")
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, top_k=20)


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return compiled_kernels(find_compiler(), kernel_folder())


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its heads and widths are such that the kernels compute it all."""
    return make_toy_model(tmp_path_factory.mktemp("toy"), hidden_size=256)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((False, False), marks=needs_bfloat16, id="bfloat16"),
        pytest.param((False, True), marks=needs_bfloat16, id="bfloat16-compiled"),
        pytest.param((True, False), id="int8"),
        pytest.param((True, True), id="int8-compiled"),
    ],
)
def target(model_dir: Path, request: pytest.FixtureRequest) -> Target:
    int8, is_compiled = request.param
    target = _target(model_dir, int8=int8, compile_threads=1 if is_compiled else None)
    kind = VnniLinear if int8 else Bfloat16Linear
    layers = [module for module in target._model.modules() if isinstance(module, kind)]
    assert len(layers) == 4 * target.config["num_hidden_layers"] + 1
    return target


def _target(
    model_dir: Path,
    *,
    int8: bool,
    compile_threads: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    own_kernels: bool = True,
) -> Target:
    return Target(
        model_dir,
        num_slots=4,
        context_length=256,
        cache_margin=17,
        dtype=dtype,
        compile_threads=compile_threads,
        int8=int8,
        own_kernels=own_kernels,
    )


def _tokens(target: Target, *shape: int) -> Tensor:
    return torch.randint(len(target.embed), shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(64, 64), (576, 1536), (1536, 100)])
def test_a_layer_gives_what_onednn_gives_to_the_last_bit(
    kernels: Kernels, num_inputs: int, num_outputs: int, bias: bool, num_threads: int
) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(num_inputs, num_outputs, bias=bias).bfloat16().requires_grad_(False)
    plain.weight[0].abs_()  # sums that need more than 24 bits
    ours, theirs = VnniLinear(plain, kernels), Int8Linear(plain)
    x = torch.randn(41, num_inputs).index_fill_(0, torch.tensor([2]), 1.0) * torch.logspace(-30, 30, 41)[:, None]
    x[3] = 0
    x = x.bfloat16()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with torch.inference_mode():
            for rows in (1, 2, 3, 4, 7, 41):
                assert torch.equal(ours(x[:rows]), theirs(x[:rows]))
            assert torch.equal(ours(x.view(1, 41, -1)[:, ::2]), theirs(x[::2])[None])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_not_made_one(kernels: Kernels, broken: float) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 64).bfloat16().requires_grad_(False)
    layers = [VnniLinear(linear, kernels), *([Bfloat16Linear(linear, kernels)] if has_bfloat16 else [])]
    for place in (0, 17, 63):
        x = torch.randn(3, 64).bfloat16()
        x[1, place] = broken
        for layer in layers:
            y = layer(x)
            assert not y[1].isfinite().any()
            assert y[::2].isfinite().all()
    if math.isnan(broken):
        heads, cache = torch.randn(1, 3, 64).bfloat16(), KVSlots(1, 1, 1, 40, 64, torch.zeros(1, dtype=torch.bfloat16))
        cache.keys[..., 5, 3] = broken
        starts = torch.tensor([20])
        assert kernels.attend(heads, cache.layer(0), starts, first_slot=0, num_groups=1, scale=1.0).isnan().all()
        assert kernels.gate(torch.full((1, 64), broken).bfloat16()).isnan().all()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_what_is_gated_is_what_pytorch_gates(kernels: Kernels, num_threads: int) -> None:
    gates = torch.cat([torch.linspace(-80, 80, 960), torch.tensor([0.0, -0.0, 1e-30, -3e38] * 8)]).bfloat16()
    gate_up = torch.stack([torch.cat([gates, gates.roll(shift)]) for shift in range(7)])
    gate, up = gate_up.double().chunk(2, -1)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        out = kernels.gate(gate_up)
    finally:
        torch.set_num_threads(before)
    # Rounded twice: after the gate's function, and after the product.
    exact = (F.silu(gate).bfloat16().double() * up).bfloat16()
    torch.testing.assert_close(out, exact, rtol=2**-7, atol=1e-30)
    assert (out == exact).double().mean() > 0.99
    assert torch.equal(torch.cat([kernels.gate(row[None]) for row in gate_up]), out)


@needs_bfloat16
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(64, 64), (576, 1536), (1536, 100)])
def test_a_bfloat16_layer_is_as_near_as_onednns_and_each_tokens_own(
    kernels: Kernels, num_inputs: int, num_outputs: int, bias: bool, num_threads: int
) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(num_inputs, num_outputs, bias=bias).bfloat16().requires_grad_(False)
    ours, theirs = Bfloat16Linear(plain, kernels), PackedLinear(plain)
    x = torch.randn(41, num_inputs).bfloat16()
    exact = F.linear(x.double(), plain.weight.double(), plain.bias.double() if bias else None)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with torch.inference_mode():
            all_at_once = ours(x)
            error, others = ((y.double() - exact).norm() / exact.norm() for y in (all_at_once, theirs(x)))
            assert error < 1.01 * others
            for rows in (1, 2, 3, 4, 5, 6, 7, 13):
                assert torch.equal(torch.cat([ours(some) for some in x.split(rows)]), all_at_once)
            assert torch.equal(ours(x.view(1, 41, -1)[:, ::2]), all_at_once[None, ::2])
    finally:
        torch.set_num_threads(before)


def test_other_layers_are_left_to_onednn(kernels: Kernels) -> None:
    for int8 in (False, True):
        assert not kernels.can_multiply(nn.Linear(100, 576).bfloat16(), int8=int8)
        assert not kernels.can_multiply(nn.Linear(64, 64), int8=int8)
    assert kernels.can_multiply(nn.Linear(64, 100).bfloat16(), int8=True)
    assert kernels.can_multiply(nn.Linear(64, 100).bfloat16(), int8=False) == has_bfloat16


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("num_groups", "num_sharing"), [(3, 3), (1, 8), (4, 1)])
def test_attention_is_that_of_pytorch_and_each_tokens_own(
    kernels: Kernels, num_groups: int, num_sharing: int, head_dim: int, num_threads: int
) -> None:
    assert kernels.can_attend(torch.bfloat16, head_dim)
    assert not kernels.can_attend(torch.float32, head_dim)
    generator = torch.Generator().manual_seed(0)

    def new_cache() -> KVSlots:
        cache = KVSlots(2, 4, num_groups, 80, head_dim, torch.zeros(1, dtype=torch.bfloat16))
        cache._storage.copy_(torch.randn(cache._storage.shape, generator=torch.Generator().manual_seed(1)))
        return cache

    num_heads, scale = (num_sharing + 2) * num_groups, head_dim**-0.5
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for first, starts, num_new in ((0, [0], 1), (1, [37], 6), (0, [70, 3, 16, 15], 1), (1, [0, 31, 12], 5)):
            heads = torch.randn(len(starts) * num_new, num_heads, head_dim, generator=generator).bfloat16()
            ours, theirs = new_cache(), new_cache()
            window = SlotWindow(first, starts, num_new, heads)
            out = kernels.attend(
                heads, ours.layer(1), window.starts_B, first_slot=first, num_groups=num_groups, scale=scale
            )
            queries, kv = heads.split([num_sharing * num_groups, 2 * num_groups], 1)
            rows = queries.reshape(len(starts), -1, num_groups, head_dim)
            expected = window.attend_rows(theirs, 1, rows, kv, scale).reshape(out.shape)
            assert torch.equal(ours._storage, theirs._storage)
            torch.testing.assert_close(out, expected, rtol=0.02, atol=0.01)
            alone = new_cache()
            for row, start in enumerate(starts):
                for token in range(num_new):
                    own = row * num_new + token
                    one = kernels.attend(
                        heads[own : own + 1],
                        alone.layer(1),
                        torch.tensor([start + token]),
                        first_slot=first + row,
                        num_groups=num_groups,
                        scale=scale,
                    )
                    assert torch.equal(one[0], out[own])
    finally:
        torch.set_num_threads(before)


def test_attention_stays_exact_where_scores_are_extreme(kernels: Kernels) -> None:
    cache = KVSlots(1, 1, 1, 40, 64, torch.zeros(1, dtype=torch.bfloat16))
    cache._storage.normal_(generator=torch.Generator().manual_seed(0))
    cache.keys[:, :, :, 5] *= 300
    heads = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(2)).bfloat16() * 30
    out = kernels.attend(heads, cache.layer(0), torch.tensor([33]), first_slot=0, num_groups=1, scale=1.0)
    keys, values = cache.keys[0, 0, 0, :34].float(), cache.values[0, 0, 0, :34].float()
    exact = F.softmax(heads[0, 0].float() @ keys.T, -1) @ values
    torch.testing.assert_close(out[0].float(), exact, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("num_threads", [1, 3])
@torch.inference_mode()
def test_a_pass_of_several_tokens_is_bit_for_bit_that_of_one_at_a_time(target: Target, num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        _compare_passes(target)
    finally:
        torch.set_num_threads(before)


def _compare_passes(target: Target) -> None:
    """Of several sizes, the largest of 54 tokens."""
    tokens = _tokens(target, 3, 25)
    for num_before in (0, 7):
        passes = []
        for num_new in (1, 2, 9, 18):
            target.forward(tokens[:, : num_before or 1], first_slot=0, starts=[0] * 3)
            parts = [
                target.forward(tokens[:, start : start + num_new], first_slot=0, starts=[start] * 3)
                for start in range(num_before, num_before + 18, num_new)
            ]
            hidden, features = (torch.cat(part, 1) for part in zip(*parts, strict=True))
            passes.append((target.logits(hidden), features))
        alone = [target.forward(tokens[1:2, start : start + 1], first_slot=3, starts=[start]) for start in range(25)]
        passes_alone = torch.cat([features for _, features in alone], 1)
        assert torch.equal(passes_alone[0, num_before : num_before + 18], passes[0][1][1])
        for logits, features in passes[1:]:
            assert torch.equal(logits, passes[0][0])
            assert torch.equal(features, passes[0][1])


@torch.inference_mode()
def test_it_is_as_near_as_onednns_and_follows_weights_that_move(
    target: Target, model_dir: Path, tmp_path: Path
) -> None:
    new_dir = moved_model(model_dir, tmp_path / "new")
    plain = _target(model_dir, int8=target.is_int8, own_kernels=False)
    exact = _target(model_dir, int8=target.is_int8, dtype=torch.float64)
    try:
        for folder in (model_dir, new_dir):
            for one in (target, plain, exact) if folder == new_dir else ():
                one.install(one.stage(new_dir))
            tokens = _tokens(target, 4, 12)
            ours, theirs, ideal = (
                one.logits(one.forward(tokens, first_slot=0, starts=[0] * 4)[0]).double()
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
    for depth, suffix_depth in ((0, 0), (4, 8)):
        with toy_engine(
            model_dir,
            draft=random_draft(model_dir, seed=1),
            depth=depth,
            suffix_depth=suffix_depth,
            dtype="bfloat16",
            target=target,
        ) as engine:
            requests = [
                engine.request(prompt, sampling=sampling, seed=7, max_tokens=120)
                for prompt in ("hello there", "a", "a b a b a b a b")
            ]
            answers = engine.ask(*requests)
        texts.append([answer.token_ids for answer in answers])
        accepted.append(sum(answer.num_accepted for answer in answers))
    assert texts[0] == texts[1]
    assert accepted[0] == 0
    assert accepted[1] > 0


def test_without_a_compiler_that_works_there_are_none(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = tmp_path / "g++"
    # It is asked to write behind -o, the last but one.
    failing.write_text('#!/bin/bash\ntouch "${@: -2:1}"\necho no such header >&2\nexit 1\n')
    failing.chmod(0o700)
    folder = tmp_path / "kernels"
    folder.mkdir()
    with pytest.raises(RuntimeError, match="no such header"):
        compiled_kernels(str(failing), folder)
    assert not list(folder.iterdir())
    monkeypatch.setattr("serving.local.target.found_kernels", found_kernels.__wrapped__)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    for compiler in (str(failing), "no-such-compiler"):
        monkeypatch.setenv("CXX", compiler)
        target = _target(model_dir, int8=False)
        assert any(isinstance(module, PackedLinear) for module in target._model.modules())
        assert not any(isinstance(module, Bfloat16Linear) for module in target._model.modules())
        hidden, _ = target.forward(_tokens(target, 1, 3), first_slot=0, starts=[0])
        assert hidden.isfinite().all()


def test_kernels_are_compiled_once_whoever_starts_first(tmp_path: Path) -> None:
    counting = tmp_path / "g++"
    counting.write_text(f'#!/bin/bash\necho >> {tmp_path / "runs"}\nexec {find_compiler()} "$@"\n')
    counting.chmod(0o700)
    folder = tmp_path / "kernels"
    folder.mkdir()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: compiled_kernels(str(counting), folder), range(2)))
    assert len(found) == 2
    num_runs = len((tmp_path / "runs").read_text().splitlines())
    assert num_runs in (1, 2)
    compiled_kernels(str(counting), folder)
    assert len((tmp_path / "runs").read_text().splitlines()) == num_runs
    assert [path.suffix for path in folder.iterdir()] == [".so"]
