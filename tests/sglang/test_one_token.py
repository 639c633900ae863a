"""SGLang's own CPU backend: what a verification of one token calls, and that it computes and stores the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.intel_amx_backend import IntelAMXAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins.hook_registry import HookType
from torch import Tensor

from serving.sglang.plugin import contract, hooks
from serving.sglang.settings import PluginSettings
from tests.sglang.ops import sgl_kernel as ops

NUM_SLOTS, QUERY_HEADS, HEADS, HEAD_DIM = 64, 4, 2, 8
SEQ_LENS = [5, 9]
LAYER = SimpleNamespace(
    layer_id=0,
    qk_head_dim=HEAD_DIM,
    v_head_dim=HEAD_DIM,
    tp_q_head_num=QUERY_HEADS,
    is_cross_attention=False,
    attn_type=AttentionType.DECODER,
    scaling=HEAD_DIM**-0.5,
    logit_cap=0.0,
    sliding_window_size=-1,
    k_scale_float=None,
    v_scale_float=None,
)


class _Pool:
    def __init__(self) -> None:
        self.keys, self.values = torch.randn(2, NUM_SLOTS, HEADS, HEAD_DIM)

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.keys

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.values

    def set_kv_buffer(self, layer: Any, where: Any, k: Tensor, v: Tensor) -> None:
        self.keys[where.loc] = k.view(-1, HEADS, HEAD_DIM)
        self.values[where.loc] = v.view(-1, HEADS, HEAD_DIM)


def _backend(calls: list[str]) -> Any:
    """One of SGLang's, without its model: the same tensors each time."""

    def counted(name: str) -> Any:
        def call(*args: Any) -> None:
            calls.append(name)
            getattr(ops, f"{name}_attention_cpu")(*args)

        return call

    torch.manual_seed(0)
    backend = object.__new__(IntelAMXAttnBackend)
    table = torch.randperm(NUM_SLOTS).view(4, 16).int()
    attributes = {
        "device": "cpu",
        "use_mla": False,
        "use_sliding_window_kv_pool": False,
        "req_to_token_pool": SimpleNamespace(req_to_token=table),
        "token_to_kv_pool": _Pool(),
        "num_head": QUERY_HEADS,
        "v_head_dim": HEAD_DIM,
        "num_kv_splits": 8,
        "num_draft_tokens": 4,
        "draft_decode_metadata": None,
        "decode_attention_fwd": counted("decode"),
        "extend_attention_fwd": counted("extend"),
    }
    for name, value in attributes.items():
        setattr(backend, name, value)
    return backend


def _verification(backend: Any, num_tokens: int) -> SimpleNamespace:
    rows, seq_lens = torch.tensor([2, 0]), torch.tensor(SEQ_LENS)
    columns = seq_lens[:, None] + torch.arange(num_tokens)
    return SimpleNamespace(
        batch_size=len(rows),
        forward_mode=ForwardMode.TARGET_VERIFY,
        spec_info=SimpleNamespace(draft_token_num=num_tokens, tree_topk=1, custom_mask=None),
        seq_lens=seq_lens,
        req_pool_indices=rows,
        out_cache_loc=backend.req_to_token_pool.req_to_token[rows[:, None], columns].flatten().long(),
        encoder_out_cache_loc=None,
        encoder_lens=None,
    )


def _attend(backend: Any, num_tokens: int, *, hooked: bool) -> list[Tensor]:
    """The attention's output, and all keys and values afterwards."""
    batch = _verification(backend, num_tokens)
    generator = torch.Generator().manual_seed(num_tokens)
    q, k, v = (
        torch.randn(2 * num_tokens, heads * HEAD_DIM, generator=generator) for heads in (QUERY_HEADS, HEADS, HEADS)
    )
    backend.num_draft_tokens = num_tokens
    backend.init_forward_metadata(batch)
    if hooked:
        hooks.after_plan(None, backend, batch)
        out = hooks.around_extend(IntelAMXAttnBackend.forward_extend, backend, q, k, v, LAYER, batch)
    else:
        out = backend.forward_extend(q, k, v, LAYER, batch)
    pool = backend.token_to_kv_pool
    return [out, pool.keys.clone(), pool.values.clone()]


def test_the_plugin_hooks_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    hooked = {}

    def register(path: str, hook: Any, kind: HookType) -> None:
        hooked[path] = kind, hook

    hooks.add_hooks(PluginSettings(), SimpleNamespace(register=register), HookType)
    assert hooked[contract.CPU_PLAN.path] == (HookType.AFTER, hooks.after_plan)
    assert hooked[contract.CPU_EXTEND.path] == (HookType.AROUND, hooks.around_extend)


def test_one_token_attends_as_plain_decoding_does_and_several_as_before() -> None:
    calls: list[str] = []
    hooked, plain = _backend(calls), _backend([])
    for num_tokens in (1, 4, 1):
        for ours, theirs in zip(
            _attend(hooked, num_tokens, hooked=True), _attend(plain, num_tokens, hooked=False), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert calls == ["decode", "extend", "decode"]


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.DRAFT_EXTEND_V2])
def test_other_passes_read_what_they_did(mode: ForwardMode) -> None:
    backend = _backend([])
    hooks.after_plan(None, backend, _verification(backend, 1))
    assert backend.draft_decode_metadata is not None
    hooks.after_plan(None, backend, SimpleNamespace(forward_mode=mode, spec_info=None))
    assert backend.draft_decode_metadata is None


def test_latent_attention_is_left_alone() -> None:
    backend = _backend([])
    backend.use_mla = True
    hooks.after_plan(None, backend, _verification(backend, 1))
    assert backend.draft_decode_metadata is None
