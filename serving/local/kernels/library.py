"""The compiled library: what its functions take, and what they are told of a model.

Suffixes: M tokens, K inputs, N outputs, P query heads of one key head, G key heads, h head size, L positions.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speculator.proposals.estimates import MOST_CERTAIN
from speculator.proposals.planner import ChainRule, Step

PANEL = 64
"""Outputs of a weight, positions of keys and numbers of values that lie together."""
LANES = 16
"""What the sizes of a layer's inputs are multiples of."""
MOST_HEAD_DIM = 256


class _Caller(threading.local):
    num_threads = 1


_caller = _Caller()


def compute_with(num_threads: int) -> None:
    """Kernels that the calling thread calls compute with so many threads, or alone where another caller has them."""
    _caller.num_threads = num_threads


_number, _pointer, _float, _double = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float, ctypes.c_double


class Norm(ctypes.Structure):
    """An RMSNorm: number of inputs, scaled weight and floor. `Norm()` is none."""

    _fields_ = (("K", _number), ("weight", _pointer), ("floor", _pointer))


class Layer(ctypes.Structure):
    """A linear layer whose weight lies in panels.

    `in_pairs`: whether a product takes two inputs at a time, for CPUs with AVX-512 BF16 alone.
    """

    _fields_ = (
        ("K", _number),
        ("N", _number),
        ("weight", _pointer),
        ("bias_N", _pointer),
        ("in_pairs", _number),
    )


class Heads(ctypes.Structure):
    _fields_ = (
        ("sharing", _number),
        ("groups", _number),
        ("size", _number),
        ("scale", _float),
        ("query", Norm),
        ("key", Norm),
    )


class Block(ctypes.Structure):
    """A decoder layer."""

    _fields_ = (
        ("input_norm", Norm),
        ("mlp_norm", Norm),
        ("heads", Heads),
        ("qkv", Layer),
        ("out", Layer),
        ("gate_up", Layer),
        ("down", Layer),
    )


class Model(ctypes.Structure):
    _fields_ = (
        ("num_blocks", _number),
        ("num_aux", _number),
        ("blocks", ctypes.POINTER(Block)),
        ("aux_blocks", ctypes.POINTER(_number)),
        ("norm", Norm),
        ("after", _pointer),
    )


class Draft(ctypes.Structure):
    """A draft; the input norm of its layer is the feature's."""

    _fields_ = (
        ("embeddings", _pointer),
        ("three_norm", Norm),
        ("feature_norms", Norm * 3),
        ("fc", Layer),
        ("embedding_norm", Norm),
        ("block", Block),
        ("norm", Norm),
        ("head", Layer),
        ("target_ids", _pointer),
        ("feeds_normed", _number),
        ("adds_to_normed", _number),
    )


class Chain(ctypes.Structure):
    """What a draft is asked for, and what it proposes. `Chain()` asks for nothing."""

    _fields_ = (
        ("num_steps", _number),
        ("most", _double),
        ("rule", ctypes.POINTER(_double)),
        ("temperatures", ctypes.POINTER(_float)),
        ("noise", ctypes.POINTER(_pointer)),
        ("ids", ctypes.POINTER(_number)),
        ("logprobs", ctypes.POINTER(_float)),
        ("output", _pointer),
        ("num_done", _number),
    )

    @classmethod
    def of(cls, rule: ChainRule, reaches: Sequence[float], output_Bd: Tensor) -> Chain:
        """Greedy chains. `output_Bd`, bfloat16, is what the first step is fed with, or holds that of the last one
        later, and has to live as long as this does.
        """
        batch, num_steps = len(reaches), rule.num_steps
        assert output_Bd.dtype == torch.bfloat16
        assert output_Bd.is_contiguous()
        num_tokens = num_steps * batch
        numbers = (_double * (2 * num_steps + batch))(*rule.factors, *rule.least, *reaches)
        ids, logprobs = (_number * num_tokens)(), (_float * num_tokens)()
        return cls(num_steps, MOST_CERTAIN, numbers, None, None, ids, logprobs, output_Bd.data_ptr())

    def sample(self, temperatures: Sequence[float], noise: Sequence[Tensor | None]) -> None:
        """Draw the only step with temperatures and the noise, float32 [D] or none, by request."""
        assert self.num_steps == 1
        assert all(one is None or (one.dtype == torch.float32 and one.is_contiguous()) for one in noise)
        self.temperatures = (_float * len(noise))(*temperatures)
        self.noise = (_pointer * len(noise))(*map(pointer, noise))

    def steps(self, batch: int) -> list[Step]:
        """Those that were computed."""
        ends = range(batch, (self.num_done + 1) * batch, batch)
        return [Step(self.ids[end - batch : end], self.logprobs[end - batch : end]) for end in ends]


class KernelWindow(ctypes.Structure):
    """New tokens of a slot, the place of the first, and the parents of those of a tree (`parents_of`), or none: each
    then follows the one before it.
    """

    _fields_ = (
        ("slot", _number),
        ("start", _number),
        ("num_tokens", _number),
        ("parents", ctypes.POINTER(_number)),
    )


def parents_of(parents: Sequence[int]) -> Any:
    """For a `KernelWindow`: of each token the place in it of the one that it follows, −1 for the first."""
    assert parents[0] == -1
    assert all(0 <= parent < place for place, parent in enumerate(parents[1:], 1))
    return (_number * len(parents))(*parents)


_WINDOWS = (_number, ctypes.POINTER(KernelWindow), _pointer, _pointer)
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "linear": (ctypes.POINTER(Layer), _number, _pointer, _pointer, _number),
    "attend": (ctypes.POINTER(Heads), *_WINDOWS, *(_pointer, _pointer, _number), *(_pointer, _number)),
    "pass": (
        *(ctypes.POINTER(Model), _number, *_WINDOWS),
        *(_pointer, _number, _number, _pointer, _pointer, _pointer, _number),
    ),
    "draft": (
        *(ctypes.POINTER(Draft), ctypes.POINTER(Chain), _number, *_WINDOWS),
        *(_pointer, _number, ctypes.POINTER(_number), _pointer, _number, _number),
    ),
    "likeliest": (_number, _number, _pointer, _pointer, _number),
    "rank": (_number, _number, _pointer, _number, _pointer, _pointer, _number),
}
"""What the library's functions take, in the order of kernels.cpp; the last is the number of threads."""


class Kernels:
    """Its functions over tensors, on as many threads as the caller has asked for (`compute_with`). They read where they
    are told, whatever is there: what a structure points to has to live as long as it is used.
    """

    in_pairs = False
    """Whether layers multiply in pairs that are not told."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.has_pairs = bool(_number.in_dll(library, "slipstream_has_pairs").value)
        """Whether it multiplies in pairs; a CPU may still lack the instruction."""
        kinds = Model, Block, Draft, Chain, KernelWindow
        sizes = (_number * len(kinds)).in_dll(library, "slipstream_sizes")
        assert list(sizes) == [ctypes.sizeof(kind) for kind in kinds]
        for name, arguments in _FUNCTIONS.items():
            function = getattr(library, f"slipstream_{name}")
            function.argtypes, function.restype = arguments, None
        self._library = library

    def linear(self, layer: Layer, x: Tensor) -> Tensor:
        """bfloat16 [..., K] → [..., N]."""
        assert x.dtype == torch.bfloat16
        assert x.shape[-1] == layer.K
        y = x.new_empty(*x.shape[:-1], layer.N)
        self._call("linear", layer, x.numel() // layer.K, x.contiguous(), y)
        return y

    def attend(
        self, heads: Heads, windows: Sequence[KernelWindow], rotation: tuple[Tensor, Tensor], qkv: Tensor, cache: Tensor
    ) -> Tensor:
        """Store keys and values of the windows' tokens in a layer's part of `PanelSlots.storage`, then attend to all up
        to each token: bfloat16 [M, (P + 2) · G · h], query heads by their place in the group first, → [M, P · G · h].
        A pass does the same by itself; alone it is for tests.
        """
        of_windows = _checked(windows, rotation, len(qkv), qkv, cache)
        assert qkv.shape[1] == (heads.sharing + 2) * heads.groups * heads.size
        out = qkv.new_empty(len(qkv), heads.sharing * heads.groups * heads.size)
        self._call("attend", heads, *of_windows, qkv, cache, cache.shape[-1] // heads.size, out)
        return out

    def run(
        self,
        model: Model,
        windows: Sequence[KernelWindow],
        rotation: tuple[Tensor, Tensor],
        x_Md: Tensor,
        storage: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """A pass over embeddings [M, d], which are overwritten: final hidden states [M, d] and the inputs of the aux
        layers side by side.
        """
        of_windows = _checked(windows, rotation, len(x_Md), x_Md, storage)
        hidden_Md, aux = torch.empty_like(x_Md), x_Md.new_empty(len(x_Md), model.num_aux * x_Md.shape[1])
        length = storage.shape[-1] // rotation[0].shape[1]
        self._call("pass", model, len(x_Md), *of_windows, storage, storage.stride(0), length, x_Md, hidden_Md, aux)
        return hidden_Md, aux

    def draft(
        self,
        draft: Draft,
        chain: Chain,
        windows: Sequence[KernelWindow],
        rotation: tuple[Tensor, Tensor],
        tokens_N: Sequence[int],
        features_SLw: Tensor | None,
        cache: Tensor,
    ) -> None:
        """Read pairs, and propose what the chain asks for, if it is something. The features are the target's, by slot
        and position, or with none the chain's output.
        """
        of_windows = _checked(windows, rotation, len(tokens_N), cache)
        three, apart = None, 0
        if features_SLw is not None:
            num_slots, room, width = features_SLw.shape
            three, apart = features_SLw.data_ptr(), features_SLw.stride(0)
            assert features_SLw.dtype == torch.bfloat16
            assert width == draft.fc.K == features_SLw.stride(1)
            assert all(one.slot < num_slots and one.start + one.num_tokens <= room for one in windows)
        tokens = (_number * len(tokens_N))(*tokens_N)
        length = cache.shape[-1] // rotation[0].shape[1]
        self._call("draft", draft, chain, len(tokens_N), *of_windows, cache, length, tokens, three, apart)

    def likeliest(self, logits_MV: Tensor) -> Tensor:
        """The first of the largest of each row, in bfloat16: int64 [M]."""
        assert logits_MV.dtype == torch.bfloat16
        ids_M = torch.empty(len(logits_MV), dtype=torch.int64)
        self._call("likeliest", *logits_MV.shape, logits_MV.contiguous(), ids_M)
        return ids_M

    def rank(self, logits_MV: Tensor, num_kept: int) -> tuple[Tensor, Tensor]:
        """The `num_kept` likeliest tokens of each row, in bfloat16, in their order, and their log-probabilities: int32
        and float32 [M, K].
        """
        assert logits_MV.dtype == torch.bfloat16
        assert 0 < num_kept <= logits_MV.shape[1]
        ids_MK = torch.empty(len(logits_MV), num_kept, dtype=torch.int32)
        logprobs_MK = torch.empty(ids_MK.shape, dtype=torch.float32)
        self._call("rank", *logits_MV.shape, logits_MV.contiguous(), num_kept, ids_MK, logprobs_MK)
        return ids_MK, logprobs_MK

    def _call(self, name: str, *arguments: Any) -> None:
        """With the addresses of tensors, and behind all else the number of threads."""
        given = (one.data_ptr() if isinstance(one, Tensor) else one for one in arguments)
        getattr(self._library, f"slipstream_{name}")(*given, _caller.num_threads)


def can_compute(*, hidden_size: int, intermediate_size: int, head_dim: int) -> bool:
    """Whether layers of these sizes come in whole registers, and their heads in panels."""
    return hidden_size % LANES == intermediate_size % LANES == head_dim % PANEL == 0 and head_dim <= MOST_HEAD_DIM


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _checked(
    windows: Sequence[KernelWindow], rotation: tuple[Tensor, Tensor], num_rows: int, *tensors: Tensor
) -> tuple[Any, ...]:
    """Number and array of windows, cosine and sine [positions, h], where everything fits to everything else; the last
    tensor is the cache.
    """
    num_slots, _, _, room = tensors[-1].shape[-4:]
    num_rotated, head_dim = rotation[0].shape
    longest = min(num_rotated, room // head_dim)
    assert head_dim <= MOST_HEAD_DIM
    assert rotation[0].shape == rotation[1].shape
    assert all(table.dtype == torch.float32 and table.is_contiguous() for table in rotation)
    assert all(tensor.dtype == torch.bfloat16 and tensor.is_contiguous() for tensor in tensors)
    assert num_rows == sum(window.num_tokens for window in windows)
    assert all(0 <= window.slot < num_slots and window.start >= 0 and window.num_tokens > 0 for window in windows)
    assert len({window.slot for window in windows}) == len(windows)
    assert all(window.start + window.num_tokens <= longest for window in windows)
    return len(windows), (KernelWindow * len(windows))(*windows), *rotation
