"""ctypes interface of the compiled library: structures that describe a model, and functions over tensors.

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
from speculator.proposals.planner import ChainRule, DraftStep

PANEL = 64
"""Width of a panel: outputs of a weight, positions of keys, or numbers of values that are stored together."""
LANES = 16
"""Input sizes of layers must be multiples of this."""
MOST_HEAD_DIM = 256


class _Caller(threading.local):
    num_threads = 1


_caller = _Caller()


def set_num_threads(num_threads: int) -> None:
    """Set how many threads the calling thread's kernels use; they use one while another caller has the others."""
    _caller.num_threads = num_threads


_number, _pointer, _float, _double = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float, ctypes.c_double


class Norm(ctypes.Structure):
    """An RMSNorm: number of inputs, scaled weight and floor. `Norm()` means no norm."""

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
    """A draft; the input norm of its block is that of the feature."""

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
    """Arguments and results of drafting a chain. `Chain()`: read pairs, propose nothing."""

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
        """Greedy chains. `output_Bd`, bfloat16, gets the output of the last step, and may be the input of the first; it
        must live as long as this object.
        """
        batch, num_steps = len(reaches), rule.num_steps
        assert output_Bd.dtype == torch.bfloat16
        assert output_Bd.is_contiguous()
        num_tokens = num_steps * batch
        numbers = (_double * (2 * num_steps + batch))(*rule.factors, *rule.least, *reaches)
        ids, logprobs = (_number * num_tokens)(), (_float * num_tokens)()
        return cls(num_steps, MOST_CERTAIN, numbers, None, None, ids, logprobs, output_Bd.data_ptr())

    def sample(self, temperatures: Sequence[float], noise: Sequence[Tensor | None]) -> None:
        """Sample a chain of one step: temperatures and noise (float32 [D] or None) by request."""
        assert self.num_steps == 1
        assert all(one is None or (one.dtype == torch.float32 and one.is_contiguous()) for one in noise)
        self.temperatures = (_float * len(noise))(*temperatures)
        self.noise = (_pointer * len(noise))(*map(pointer, noise))

    def steps(self, batch: int) -> list[DraftStep]:
        """The computed steps."""
        ends = range(batch, (self.num_done + 1) * batch, batch)
        return [DraftStep(self.ids[end - batch : end], self.logprobs[end - batch : end]) for end in ends]


class KernelWindow(ctypes.Structure):
    """New tokens of a slot, from position `start` on; `parents` for a tree (`parents_of`), null for a chain."""

    _fields_ = (
        ("slot", _number),
        ("start", _number),
        ("num_tokens", _number),
        ("parents", ctypes.POINTER(_number)),
    )


def parents_of(parents: Sequence[int]) -> Any:
    """`parents` of a `KernelWindow`: for each token the index of its parent in the window, −1 for the first."""
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
"""Argument types of the library's functions, in the order of kernels.cpp; the number of threads comes last."""


class Kernels:
    """The library's functions over tensors, with the caller's number of threads (`set_num_threads`). Pointers are not
    checked: memory that a structure points to must live as long as the structure is used.
    """

    in_pairs = False
    """Default of `Layer.in_pairs`."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.has_pairs = bool(_number.in_dll(library, "slipstream_has_pairs").value)
        """Whether the library has code for pairs; the CPU may still lack the instruction."""
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
        """Store keys and values of the windows' tokens in a layer's part of `PanelSlots.storage`, then attend causally:
        bfloat16 [M, (P + 2) · G · h], query heads by index in the group first, → [M, P · G · h]. For tests: `run` does
        this itself.
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
        """The target's pass over embeddings [M, d], which are overwritten: returns final hidden states [M, d] and the
        inputs of the aux layers side by side.
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
        """Read pairs, and propose the chain unless it is empty. The features are the target's, by slot and position;
        None: the chain's output.
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
        """Argmax of each bfloat16 row, the first of equal ones: int64 [M]."""
        assert logits_MV.dtype == torch.bfloat16
        ids_M = torch.empty(len(logits_MV), dtype=torch.int64)
        self._call("likeliest", *logits_MV.shape, logits_MV.contiguous(), ids_M)
        return ids_M

    def rank(self, logits_MV: Tensor, num_kept: int) -> tuple[Tensor, Tensor]:
        """Top-k of each bfloat16 row, likeliest first: token ids int32 and log-probabilities float32 [M, K]."""
        assert logits_MV.dtype == torch.bfloat16
        assert 0 < num_kept <= logits_MV.shape[1]
        ids_MK = torch.empty(len(logits_MV), num_kept, dtype=torch.int32)
        logprobs_MK = torch.empty(ids_MK.shape, dtype=torch.float32)
        self._call("rank", *logits_MV.shape, logits_MV.contiguous(), num_kept, ids_MK, logprobs_MK)
        return ids_MK, logprobs_MK

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a function with the addresses of tensors, and last the number of threads."""
        given = (one.data_ptr() if isinstance(one, Tensor) else one for one in arguments)
        getattr(self._library, f"slipstream_{name}")(*given, _caller.num_threads)


def can_compute(*, hidden_size: int, intermediate_size: int, head_dim: int) -> bool:
    """Whether the kernels support these sizes: layers in whole registers, heads in whole panels."""
    return hidden_size % LANES == intermediate_size % LANES == head_dim % PANEL == 0 and head_dim <= MOST_HEAD_DIM


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _checked(
    windows: Sequence[KernelWindow], rotation: tuple[Tensor, Tensor], num_rows: int, *tensors: Tensor
) -> tuple[Any, ...]:
    """Check types and sizes; returns number and array of windows, cosine and sine [positions, h]. The last tensor is
    the cache.
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
