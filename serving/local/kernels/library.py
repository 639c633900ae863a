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


_number, _pointer, _float = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


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
    """A draft's layer; its input norm is the feature's."""

    _fields_ = (("embedding_norm", Norm), ("block", Block))


class Window(ctypes.Structure):
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
    """For a `Window`: of each token the place in it of the one that it follows, −1 for the first."""
    assert parents[0] == -1
    assert all(0 <= parent < place for place, parent in enumerate(parents[1:], 1))
    return (_number * len(parents))(*parents)


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
        kinds = Model, Block, Draft, Window
        sizes = (_number * len(kinds)).in_dll(library, "slipstream_sizes")
        assert list(sizes) == [ctypes.sizeof(kind) for kind in kinds]
        self._linear = _declared(library.slipstream_linear, ctypes.POINTER(Layer), _number, _pointer, _pointer, _number)
        of_windows = (_number, ctypes.POINTER(Window), _pointer, _pointer)
        self._attend = _declared(
            library.slipstream_attend,
            ctypes.POINTER(Heads),
            *of_windows,
            *(_pointer, _pointer, _number),
            *(_pointer, _number),
        )
        self._run = _declared(
            library.slipstream_pass,
            ctypes.POINTER(Model),
            _number,
            *of_windows,
            *(_pointer, _number, _number),
            *(_pointer, _pointer, _pointer),
            _number,
        )
        self._draft = _declared(
            library.slipstream_draft,
            ctypes.POINTER(Draft),
            _number,
            *of_windows,
            *(_pointer, _number),
            *(_pointer, _pointer, _pointer),
            _number,
        )
        self._normed_linear = _declared(
            library.slipstream_normed_linear,
            ctypes.POINTER(Norm),
            ctypes.POINTER(Layer),
            *(_number, _pointer, _pointer, _number),
        )

        self._likeliest = _declared(library.slipstream_likeliest, _number, _number, _pointer, _pointer, _number)
        self._rank = _declared(
            library.slipstream_rank, _number, _number, _pointer, _number, _pointer, _pointer, _number
        )

    def linear(self, layer: Layer, x: Tensor) -> Tensor:
        """bfloat16 [..., K] → [..., N]."""
        assert x.dtype == torch.bfloat16
        assert x.shape[-1] == layer.K
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], layer.N)
        self._linear(layer, x.numel() // layer.K, x.data_ptr(), y.data_ptr(), _caller.num_threads)
        return y

    def attend(
        self, heads: Heads, windows: Sequence[Window], rotation: tuple[Tensor, Tensor], qkv: Tensor, cache: Tensor
    ) -> Tensor:
        """Store keys and values of the windows' tokens in a layer's part of `PanelSlots.storage`, then attend to all up
        to each token: bfloat16 [M, (P + 2) · G · h], query heads by their place in the group first, → [M, P · G · h].
        A pass does the same by itself; alone it is for tests.
        """
        cos_Lh, sin_Lh = _checked(windows, rotation, qkv, cache)
        assert qkv.shape[1] == (heads.sharing + 2) * heads.groups * heads.size
        out = qkv.new_empty(len(qkv), heads.sharing * heads.groups * heads.size)
        self._attend(
            heads,
            len(windows),
            (Window * len(windows))(*windows),
            cos_Lh.data_ptr(),
            sin_Lh.data_ptr(),
            qkv.data_ptr(),
            cache.data_ptr(),
            cache.shape[-1] // heads.size,
            out.data_ptr(),
            _caller.num_threads,
        )
        return out

    def run(
        self, model: Model, windows: Sequence[Window], rotation: tuple[Tensor, Tensor], x_Md: Tensor, storage: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A pass over embeddings [M, d], which are overwritten: final hidden states [M, d] and the inputs of the aux
        layers side by side.
        """
        cos_Lh, sin_Lh = _checked(windows, rotation, x_Md, storage)
        num_tokens, width = x_Md.shape
        hidden_Md, aux = torch.empty_like(x_Md), x_Md.new_empty(num_tokens, model.num_aux * width)
        self._run(
            model,
            num_tokens,
            len(windows),
            (Window * len(windows))(*windows),
            cos_Lh.data_ptr(),
            sin_Lh.data_ptr(),
            storage.data_ptr(),
            storage.stride(0),
            storage.shape[-1] // cos_Lh.shape[1],
            x_Md.data_ptr(),
            hidden_Md.data_ptr(),
            aux.data_ptr(),
            _caller.num_threads,
        )
        return hidden_Md, aux

    def normed_linear(self, norm: Norm, layer: Layer, x_MK: Tensor) -> Tensor:
        """bfloat16 [M, K] → [M, N]."""
        assert x_MK.dtype == torch.bfloat16
        assert x_MK.shape[1] == norm.K == layer.K
        x_MK = x_MK.contiguous()
        y_MN = x_MK.new_empty(len(x_MK), layer.N)
        self._normed_linear(norm, layer, len(x_MK), x_MK.data_ptr(), y_MN.data_ptr(), _caller.num_threads)
        return y_MN

    def draft(
        self,
        draft: Draft,
        windows: Sequence[Window],
        rotation: tuple[Tensor, Tensor],
        embeddings_Nd: Tensor,
        features_Nd: Tensor,
        cache: Tensor,
    ) -> Tensor:
        """Read pairs, whose windows follow one another: the layer's output [B, d] for the newest of each window."""
        embeddings_Nd, features_Nd = embeddings_Nd.contiguous(), features_Nd.contiguous()
        cos_Lh, sin_Lh = _checked(windows, rotation, features_Nd, cache)
        assert embeddings_Nd.shape == features_Nd.shape
        assert embeddings_Nd.dtype == torch.bfloat16
        output_Bd = features_Nd.new_empty(len(windows), features_Nd.shape[1])
        self._draft(
            draft,
            len(features_Nd),
            len(windows),
            (Window * len(windows))(*windows),
            cos_Lh.data_ptr(),
            sin_Lh.data_ptr(),
            cache.data_ptr(),
            cache.shape[-1] // cos_Lh.shape[1],
            embeddings_Nd.data_ptr(),
            features_Nd.data_ptr(),
            output_Bd.data_ptr(),
            _caller.num_threads,
        )
        return output_Bd

    def likeliest(self, logits_MV: Tensor) -> Tensor:
        """The first of the largest of each row, in bfloat16: int64 [M]."""
        assert logits_MV.dtype == torch.bfloat16
        logits_MV = logits_MV.contiguous()
        ids_M = torch.empty(len(logits_MV), dtype=torch.int64)
        self._likeliest(*logits_MV.shape, logits_MV.data_ptr(), ids_M.data_ptr(), _caller.num_threads)
        return ids_M

    def rank(self, logits_MV: Tensor, num_kept: int) -> tuple[Tensor, Tensor]:
        """The `num_kept` likeliest tokens of each row, in bfloat16, in their order, and their log-probabilities: int32
        and float32 [M, K].
        """
        assert logits_MV.dtype == torch.bfloat16
        assert 0 < num_kept <= logits_MV.shape[1]
        logits_MV = logits_MV.contiguous()
        ids_MK = torch.empty(len(logits_MV), num_kept, dtype=torch.int32)
        logprobs_MK = torch.empty(ids_MK.shape, dtype=torch.float32)
        self._rank(
            *logits_MV.shape,
            *(logits_MV.data_ptr(), num_kept),
            *(ids_MK.data_ptr(), logprobs_MK.data_ptr()),
            _caller.num_threads,
        )
        return ids_MK, logprobs_MK


def can_compute(*, hidden_size: int, intermediate_size: int, head_dim: int) -> bool:
    """Whether layers of these sizes come in whole registers, and their heads in panels."""
    return hidden_size % LANES == intermediate_size % LANES == head_dim % PANEL == 0 and head_dim <= MOST_HEAD_DIM


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _checked(
    windows: Sequence[Window], rotation: tuple[Tensor, Tensor], rows: Tensor, cache: Tensor
) -> tuple[Tensor, Tensor]:
    """Cosine and sine [positions, h], where everything fits to everything else."""
    num_slots, _, _, room = cache.shape[-4:]
    num_rotated, head_dim = rotation[0].shape
    longest = min(num_rotated, room // head_dim)
    assert head_dim <= MOST_HEAD_DIM
    assert rotation[0].shape == rotation[1].shape
    assert all(table.dtype == torch.float32 and table.is_contiguous() for table in rotation)
    assert all(tensor.dtype == torch.bfloat16 and tensor.is_contiguous() for tensor in (rows, cache))
    assert len(rows) == sum(window.num_tokens for window in windows)
    assert all(0 <= window.slot < num_slots and window.start >= 0 and window.num_tokens > 0 for window in windows)
    assert len({window.slot for window in windows}) == len(windows)
    assert all(window.start + window.num_tokens <= longest for window in windows)
    return rotation


def _declared(function: Any, *arguments: Any) -> Any:
    function.argtypes, function.restype = arguments, None
    return function
