"""Attention over the slots of SGLang's key-value cache.

Suffixes: T tokens of the batch, B requests, E new tokens of each, L keys of the longest request, S slots of the cache,
H query heads, G key-value heads, D head dimension; R and P as in slots.py. Query heads h … h + H/G - 1 share one
key-value head.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def decode_attention_cpu(
    query_THD: Tensor,
    key_buffer_SGD: Tensor,
    value_buffer_SGD: Tensor,
    key_scale: float,
    value_scale: float,
    out_THD: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    new_slots_T: Tensor,
    scratch: Tensor,
    req_to_token_RP: Tensor,
    rows_T: Tensor,
    seq_lens_T: Tensor,
    scale: float,
    logit_cap: float,
    is_cross_attention: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Store each request's new key and value, if given, and let its one query see all its `seq_lens_T` keys."""
    _refuse_unsupported(key_scale, value_scale, logit_cap, is_cross_attention, sliding_window, sinks)
    if key is not None and value is not None:
        key_buffer_SGD[new_slots_T] = key.reshape(-1, *key_buffer_SGD.shape[1:])
        value_buffer_SGD[new_slots_T] = value.reshape(-1, *value_buffer_SGD.shape[1:])
    slots_TL, mask_T1L = _keys_and_mask(req_to_token_RP, rows_T, seq_lens_T, 1, None)
    _attend(query_THD[:, None], key_buffer_SGD, value_buffer_SGD, slots_TL, mask_T1L, scale, out_THD[:, None])


def extend_attention_cpu(
    query_THD: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    out_THD: Tensor,
    key_buffer_SGD: Tensor,
    value_buffer_SGD: Tensor,
    key_scale: float,
    value_scale: float,
    req_to_token_RP: Tensor,
    rows_B: Tensor,
    seq_lens_B: Tensor,
    num_new_B: Tensor,
    start_B: Tensor,
    max_num_new: int,
    scale: float,
    logit_cap: float,
    is_cross_attention: bool,
    sliding_window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """Attention of the last `num_new_B` tokens of each request, whose keys the caller has stored already.

    `tree_mask` (flattened [B, E, E], with the same number of new tokens in all requests) replaces the causal order
    among the new tokens. `start_B` is where each request's tokens begin in the batch.
    """
    _refuse_unsupported(key_scale, value_scale, logit_cap, is_cross_attention or not is_causal, sliding_window, sinks)
    if max_num_new == 1 and len(query_THD) == len(num_new_B):
        # A tree of one node is a chain: a verification without proposals is plain decoding, and as cheap.
        slots_BL, mask_B1L = _keys_and_mask(req_to_token_RP, rows_B, seq_lens_B, 1, None)
        _attend(query_THD[:, None], key_buffer_SGD, value_buffer_SGD, slots_BL, mask_B1L, scale, out_THD[:, None])
        return
    if len(query_THD) == max_num_new * len(num_new_B):
        # As many new tokens in each: the usual case, and its tensors are the same ones in every layer.
        parts = [(slice(0, len(query_THD)), max_num_new, rows_B, seq_lens_B)]
    else:
        assert tree_mask is None
        parts = [
            (slice(start, start + count), count, rows_B[index : index + 1], seq_lens_B[index : index + 1])
            for index, (start, count) in enumerate(zip(start_B.tolist(), num_new_B.tolist(), strict=True))
        ]
    for tokens, num_tokens, rows, seq_lens in parts:
        slots_BL, mask_BEL = _keys_and_mask(req_to_token_RP, rows, seq_lens, num_tokens, tree_mask)
        query_BEHD, out_BEHD = (x[tokens].unflatten(0, (-1, num_tokens)) for x in (query_THD, out_THD))
        _attend(query_BEHD, key_buffer_SGD, value_buffer_SGD, slots_BL, mask_BEL, scale, out_BEHD)


def _attend(
    query_BEHD: Tensor,
    key_buffer_SGD: Tensor,
    value_buffer_SGD: Tensor,
    slots_BL: Tensor,
    mask_BEL: Tensor | None,
    scale: float,
    out_BEHD: Tensor,
) -> None:
    """The queries of one key-value head stand side by side like the tokens of a chunk, which spares copying keys."""
    num_groups = key_buffer_SGD.shape[1]
    num_new, num_shared = query_BEHD.shape[1], query_BEHD.shape[2] // num_groups
    query_BGQD = query_BEHD.unflatten(2, (num_groups, num_shared)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = None if mask_BEL is None else mask_BEL[:, None].repeat(1, 1, num_shared, 1)
    out_BGQD = scaled_dot_product_attention(
        query_BGQD,
        _gather(key_buffer_SGD, slots_BL),
        _gather(value_buffer_SGD, slots_BL),
        attn_mask=mask,
        scale=scale,
    )
    out_BEHD.copy_(out_BGQD.unflatten(2, (num_shared, num_new)).permute(0, 3, 1, 2, 4).flatten(2, 3))


_last: tuple[object, Tensor, Tensor | None] | None = None


def _keys_and_mask(
    req_to_token_RP: Tensor, rows_B: Tensor, seq_lens_B: Tensor, num_new: int, tree_mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Slots of the keys [B, L], and who sees which of them [B, E, L], None for all.

    All layers of one pass ask for the same: the answer to the last question is kept.
    """
    global _last
    tensors = (req_to_token_RP, rows_B, seq_lens_B, tree_mask)
    question = _Question(tensors, num_new)
    if _last is not None and _last[0] == question:
        return _last[1], _last[2]
    num_keys = int(seq_lens_B.max())
    slots_BL = req_to_token_RP[rows_B, :num_keys]
    mask_BEL = None
    if num_new > 1 or len(seq_lens_B) > 1 or tree_mask is not None:
        mask_BEL = _visible(seq_lens_B, num_new, num_keys, tree_mask)
    _last = question, slots_BL, mask_BEL
    return slots_BL, mask_BEL


class _Question:
    """Equal where the very same tensors are asked about, unchanged; holds them, so that no other takes their place."""

    def __init__(self, tensors: tuple[Tensor | None, ...], num_new: int) -> None:
        self._tensors, self._num_new = tensors, num_new
        self._versions = [_version(tensor) for tensor in tensors]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Question)
            and self._num_new == other._num_new
            and self._versions == other._versions
            and all(mine is its for mine, its in zip(self._tensors, other._tensors, strict=True))
        )

    __hash__ = None


def _version(tensor: Tensor | None) -> int:
    """Counts in-place changes; tensors made in inference mode do not count, and are never taken for unchanged."""
    if tensor is None:
        return 0
    if tensor.is_inference():
        return next(_never_equal)
    return tensor._version


_never_equal = itertools.count(1)


def _visible(seq_lens_B: Tensor, num_new: int, num_keys: int, tree_mask: Tensor | None) -> Tensor:
    """Which of the keys each new token sees [B, E, L]: the prefix, and of the new tokens those before it or above it.

    Example, 2 new tokens, sequence lengths 4 and 3: the keys count from the first new token as -2 -1 0 1 and -1 0 1 2.
    """
    from_new_B1L = (torch.arange(num_keys) - (seq_lens_B[:, None] - num_new))[:, None, :]
    if tree_mask is None:
        return from_new_B1L <= torch.arange(num_new)[:, None]
    tree_BEE = tree_mask.view(-1, num_new, num_new)
    inside_B1L = from_new_B1L.clamp(0, num_new - 1)
    among_new = tree_BEE.gather(2, inside_B1L.expand(-1, num_new, -1)) & (from_new_B1L < num_new)
    return (from_new_B1L < 0) | among_new


def _gather(buffer_SGD: Tensor, slots_BL: Tensor) -> Tensor:
    """The buffer's rows in the given slots, as [B, G, L, D]."""
    rows = buffer_SGD.index_select(0, slots_BL.flatten())
    return rows.unflatten(0, slots_BL.shape).transpose(1, 2)


def _refuse_unsupported(
    key_scale: float, value_scale: float, logit_cap: float, is_other: bool, sliding_window: int, sinks: Tensor | None
) -> None:
    """Only what Llama- and Qwen-like models with full attention use is written here."""
    if (key_scale, value_scale) != (1.0, 1.0) or logit_cap or is_other or sliding_window > 0 or sinks is not None:
        raise NotImplementedError("quantised cache, logit cap, cross attention, sliding window or attention sinks")
