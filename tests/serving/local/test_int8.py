"""Layers in 8 bits compute what they say, for each token alone, and the text is the same with and without a draft."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from serving.local.int8 import Int8Linear, is_exact, whole_numbers
from serving.local.packed import PackedLinear, has_onednn
from serving.local.target import Target
from serving.target_guard import TargetGuard
from speculator.errors import ConfigError
from speculator.sampling import SamplingParams
from tests.moved import moved_model
from tests.serving.local.harness import GREEDY, toy_engine
from tests.toy import make_toy_model, random_draft

can_run = pytest.mark.skipif(not (has_onednn() and is_exact()), reason="PyTorch without oneDNN, or no VNNI")
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, top_k=20)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("toy"))


def _target(model_dir: Path, dtype: torch.dtype = torch.float64, *, int8: bool = True) -> Target:
    return Target(model_dir, num_slots=4, context_length=32, cache_margin=4, dtype=dtype, int8=int8)


@torch.inference_mode()
def _logits(target: Target, shape: tuple[int, int] = (4, 6)) -> Tensor:
    tokens = torch.randint(len(target.embed), shape, generator=torch.Generator().manual_seed(0))
    return target.logits(target.forward(tokens, first_slot=0, starts=[0] * shape[0])[0])


def _error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).double().norm() / theirs.double().norm())


def test_whole_numbers_are_the_nearest() -> None:
    x = torch.tensor([[0.0, 0.0], [-2.54, 1.0], [1e-30, 3e-30]])
    whole, scale = whole_numbers(x)
    assert whole.tolist() == [[0, 0], [-127, 50], [42, 127]]
    assert ((whole * scale - x).abs() <= scale / 2 * 1.0001).all()


@can_run
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_layer_multiplies_whole_numbers_of_each_token_alone(bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(1536, 40, bias=bias).to(dtype).requires_grad_(False)
    plain.weight[0].abs_()  # sums that need more than 24 bits
    layer = Int8Linear(plain)
    weight, of_row = whole_numbers(plain.weight)
    x = torch.randn(40, 1536, dtype=dtype).index_fill_(0, torch.tensor([2]), 1.0) * torch.logspace(-3, 3, 40)[
        :, None
    ].to(dtype)
    exact = x.double() @ (weight * of_row).double().T + (plain.bias.double() if bias else 0)
    with torch.inference_mode():
        for rows in (1, 3, 8, 40):
            ours = layer(x[:rows])
            assert ours.dtype == dtype
            off = (ours.double() - exact[:rows]).norm(dim=-1) / exact[:rows].norm(dim=-1)
            assert off.max() < (4e-3 if dtype is torch.bfloat16 else 1e-4)
            assert torch.equal(ours, torch.cat([layer(x[row : row + 1]) for row in range(rows)]))
        assert torch.equal(layer(x[None]), layer(x)[None])
    assert _error(ours, plain(x)) < 0.02


@can_run
def test_a_target_in_8_bits_is_near_the_exact_one_and_follows_weights_that_move(
    model_dir: Path, tmp_path: Path
) -> None:
    target = _target(model_dir)
    kinds = [type(module) for module in target._model.modules()]
    assert Int8Linear in kinds
    assert not {PackedLinear, nn.Linear} & set(kinds)
    exact = _logits(_target(model_dir, int8=False))
    assert 0 < _error(_logits(target), exact) < 0.15
    new_dir = moved_model(model_dir, tmp_path / "new")
    target.install(target.stage(new_dir))
    assert torch.equal(_logits(target), _logits(_target(new_dir)))
    assert _error(_logits(target), exact) > 0.2


@can_run
def test_other_models_have_8_bits_too(tmp_path: Path) -> None:
    model_dir = make_toy_model(tmp_path, family="gemma")
    assert 0 < _error(_logits(_target(model_dir)), _logits(_target(model_dir, int8=False))) < 0.15


@can_run
def test_a_flipped_bit_is_noticed(model_dir: Path) -> None:
    target = _target(model_dir)
    layers = [module for module in target._model.modules() if isinstance(module, Int8Linear)]
    guard = TargetGuard(target.weights)
    assert guard.look()
    for part in (layers[0].scale_N, layers[-1].scale_N):
        guard = TargetGuard(target.weights)
        part.view(torch.uint8)[-1] ^= 1
        assert not guard.look()
    guard = TargetGuard(target.weights)
    other = nn.Linear(target.config["hidden_size"], layers[-1].out_features, bias=False)
    layers[-1].packed.copy_(Int8Linear(other).packed)
    assert not guard.look()


@can_run
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_the_same_with_and_without_a_draft(model_dir: Path, sampling: SamplingParams) -> None:
    texts, accepted = [], []
    for depth, suffix_depth in ((0, 0), (3, 8)):
        draft = random_draft(model_dir, seed=1)
        with toy_engine(model_dir, draft=draft, depth=depth, suffix_depth=suffix_depth, int8_target=True) as engine:
            requests = [
                engine.request(prompt, sampling=sampling, seed=7) for prompt in ("hello there", "a", "a b a b a b a b")
            ]
            answers = engine.ask(*requests)
        texts.append([answer.token_ids for answer in answers])
        accepted.append(sum(answer.num_accepted for answer in answers))
    assert texts[0] == texts[1]
    assert accepted[0] == 0
    assert accepted[1] > 0


@can_run
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++: make system-packages installs it")
def test_8_bits_can_be_compiled_once_for_all_sizes(tmp_path: Path) -> None:
    model_dir = make_toy_model(tmp_path, family="qwen2")
    compiled = Target(
        model_dir,
        num_slots=4,
        context_length=32,
        cache_margin=4,
        dtype=torch.bfloat16,
        compile_threads=torch.get_num_threads(),
        int8=True,
        own_kernels=False,
    )
    with torch.compiler.set_stance("fail_on_recompile"):
        for shape in ((1, 1), (1, 2), (4, 6), (4, 1)):
            exact, plain, ours = (
                _logits(target, shape) for target in (_target(model_dir), _target(model_dir, torch.bfloat16), compiled)
            )
            noise = _error(plain, exact)
            assert 0 < noise < 0.1
            assert _error(ours, exact) < 1.5 * noise


def test_where_8_bits_cannot_be_computed_they_are_refused(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--int8-target is for the CPU"):
        Target(model_dir, num_slots=1, context_length=8, cache_margin=1, device="cuda", int8=True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    with pytest.raises(ConfigError, match=r"--int8-target needs .* a CPU with VNNI"):
        _target(model_dir)
