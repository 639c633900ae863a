"""SGLang's own attention: what a verification of one token calls, and that it computes and stores the same.

On a CPU, and in Triton's kernels of a GPU, which Triton's interpreter runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from sglang.kernels.ops.attention import decode_attention, extend_attention
from sglang.srt.layers.attention.intel_amx_backend import IntelAMXAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.plugins.hook_registry import HookType
from torch import Tensor

from serving.sglang import one_token
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
    tp_k_head_num=HEADS,
    is_cross_attention=False,
    attn_type=AttentionType.DECODER,
    scaling=HEAD_DIM**-0.5,
    logit_cap=0.0,
    logit_capping_method="tanh",
    xai_temperature_len=-1,
    sliding_window_size=-1,
    k_scale=None,
    v_scale=None,
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

    def set_kv_buffer(self, layer: Any, where: Any, k: Tensor, v: Tensor, *scales: object) -> None:
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
        one_token.after_cpu_plan(None, backend, batch)
        out = one_token.around_cpu_extend(IntelAMXAttnBackend.forward_extend, backend, q, k, v, LAYER, batch)
    else:
        out = backend.forward_extend(q, k, v, LAYER, batch)
    pool = backend.token_to_kv_pool
    return [out, pool.keys.clone(), pool.values.clone()]


@pytest.mark.parametrize("is_cpu", [True, False])
def test_the_plugin_hooks_the_attention_of_its_device(monkeypatch: pytest.MonkeyPatch, is_cpu: bool) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", str(int(is_cpu)))
    hooked = {}

    def register(path: str, hook: Any, kind: HookType) -> None:
        hooked[path] = kind, hook

    hooks.add_hooks(PluginSettings(), SimpleNamespace(register=register), HookType)
    of_cpu = {
        contract.CPU_PLAN.path: (HookType.AFTER, one_token.after_cpu_plan),
        contract.CPU_EXTEND.path: (HookType.AROUND, one_token.around_cpu_extend),
    }
    of_gpu = {
        contract.TRITON_PLAN.path: (HookType.AROUND, one_token.around_triton_plan),
        contract.TRITON_GRAPH.path: (HookType.AROUND, one_token.around_triton_plan),
        contract.TRITON_EXTEND.path: (HookType.AROUND, one_token.around_triton_extend),
    }
    wanted, other = (of_cpu, of_gpu) if is_cpu else (of_gpu, of_cpu)
    assert wanted.items() <= hooked.items()
    assert not other.keys() & hooked.keys()


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
    one_token.after_cpu_plan(None, backend, _verification(backend, 1))
    assert backend.draft_decode_metadata is not None
    one_token.after_cpu_plan(None, backend, SimpleNamespace(forward_mode=mode, spec_info=None))
    assert backend.draft_decode_metadata is None


def test_latent_attention_is_left_alone() -> None:
    backend = _backend([])
    backend.use_mla = True
    one_token.after_cpu_plan(None, backend, _verification(backend, 1))
    assert backend.draft_decode_metadata is None


class _Translator:
    """In the place of SGLang's, which finds the slots of a batch's tokens on a GPU."""

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def pack_read_stream(
        self, plan: Any, *, req_pool_indices: Tensor, seq_lens: Tensor, indptr: Tensor, out: Tensor
    ) -> None:
        for row, length, start in zip(req_pool_indices.tolist(), seq_lens.tolist(), indptr.tolist(), strict=False):
            out[start : start + length] = self._table[row, :length]


@pytest.fixture(scope="module")
def kernels() -> Iterator[list[ModuleType]]:
    """SGLang's Triton kernels of decoding and of prompts, which the interpreter runs on a CPU."""
    modules = [decode_attention, extend_attention]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "interpret", True)
        yield [importlib.reload(module) for module in modules]
    for module in modules:
        importlib.reload(module)


def _triton(kernels: list[ModuleType], calls: list[str]) -> Any:
    """One of SGLang's, without its model: the same tensors each time."""
    decode, extend = kernels

    def counted(name: str, kernel: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            calls.append(name)
            kernel(*args, **kwargs)

        return call

    torch.manual_seed(0)
    backend = object.__new__(TritonAttnBackend)
    table = torch.randperm(NUM_SLOTS).view(4, 16).int()
    num_programs, _, _ = decode._lean_decode_launch_params(HEADS, QUERY_HEADS // HEADS)
    offsets = torch.zeros(5, dtype=torch.int32)
    attributes = {
        "device": "cpu",
        **dict.fromkeys(("use_mla", "use_sliding_window_kv_pool", "is_draft_runner", "use_pdl"), False),
        **dict.fromkeys(("use_verify_shared_kv", "use_verify_splitkv", "use_dense_fp8_chunked_prefill"), False),
        **dict.fromkeys(("enable_deterministic", "enable_lean_attention", "skip_prefill"), False),
        **dict.fromkeys(("sliding_window_size", "swa_v_head_dim", "dllm_attention", "split_tile_size"), None),
        **dict.fromkeys(("dcp_size", "page_size", "target_verify_num_tokens_per_req", "num_draft_tokens"), 1),
        "static_kv_splits": True,
        "device_core_count": 0,
        "max_kv_splits": 4,
        "max_context_len": 16,
        "num_head": QUERY_HEADS,
        "num_kv_head": HEADS,
        "v_head_dim": HEAD_DIM,
        "lean_total_programs": num_programs,
        "lean_block_m": decode._LEAN_BLOCK_M,
        "req_to_token": table,
        "req_to_token_pool": SimpleNamespace(req_to_token=table, size=4),
        "token_to_kv_pool": _Pool(),
        "kv_index_translator": _Translator(table),
        **{name: offsets.clone() for name in ("kv_indptr", "window_kv_indptr", "qo_indptr")},
        "mask_indptr": torch.zeros(5, dtype=torch.int64),
        "decode_attention_fwd": counted("decode", decode.decode_attention_fwd),
        "extend_attention_fwd": counted("extend", extend.extend_attention_fwd),
    }
    for name, value in attributes.items():
        setattr(backend, name, value)
    return backend


def _triton_attends(backend: Any, num_tokens: int, *, hooked: bool, in_graph: bool) -> list[Tensor]:
    """The attention's output, and all keys and values afterwards."""
    batch = object.__new__(ForwardBatch)
    mask = torch.ones(sum(num_tokens * (length + num_tokens) for length in SEQ_LENS), dtype=torch.bool)
    for start, length in zip((0, num_tokens * (SEQ_LENS[0] + num_tokens)), SEQ_LENS, strict=True):
        rows = mask[start : start + num_tokens * (length + num_tokens)].view(num_tokens, -1)
        rows[:, length:] = torch.ones(num_tokens, num_tokens).tril().bool()
    told = vars(_verification(backend, num_tokens)) | {"seq_lens_sum": sum(SEQ_LENS), "kv_loc_plan": None}
    for name, value in told.items():
        setattr(batch, name, value)
    batch.spec_info = SimpleNamespace(
        draft_token_num=num_tokens, num_tokens_per_req=num_tokens, custom_mask=mask, kv_indptr=None
    )
    generator = torch.Generator().manual_seed(num_tokens)
    q, k, v = (
        torch.randn(2 * num_tokens, heads, HEAD_DIM, generator=generator) for heads in (QUERY_HEADS, HEADS, HEADS)
    )
    plan, extend = TritonAttnBackend.init_forward_metadata, TritonAttnBackend.forward_extend
    if in_graph:
        backend.init_cuda_graph_state(4, 4 * num_tokens)
        plan = TritonAttnBackend.init_forward_metadata_out_graph
    # Twice for a graph: once while it is captured, and again for what it runs with.
    for given in [{"in_capture": True}, {}] if in_graph else [{}]:
        if hooked:
            one_token.around_triton_plan(plan, backend, batch, **given)
        else:
            plan(backend, batch, **given)
    query = q.flatten(1)
    if hooked:
        out = one_token.around_triton_extend(extend, backend, query, k, v, LAYER, batch)
    else:
        out = extend(backend, query, k, v, LAYER, batch)
    pool = backend.token_to_kv_pool
    return [out.view(len(query), -1), pool.keys.clone(), pool.values.clone()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU Triton compiles for it")
@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning")  # of masked scores
@pytest.mark.parametrize("in_graph", [False, True])
def test_triton_attends_to_one_token_as_in_plain_decoding(
    monkeypatch: pytest.MonkeyPatch, kernels: list[ModuleType], in_graph: bool
) -> None:
    monkeypatch.setattr(
        "sglang.srt.layers.attention.triton_backend.maybe_create_verify_mask",
        lambda **sizes: SimpleNamespace(buffer=torch.zeros(4096, dtype=torch.uint8)),
    )
    calls: list[str] = []
    hooked, plain = _triton(kernels, calls), _triton(kernels, [])
    for num_tokens in (1, 3, 1):
        for backend in (hooked, plain):
            backend.num_draft_tokens = num_tokens
        for ours, theirs in zip(
            _triton_attends(hooked, num_tokens, hooked=True, in_graph=in_graph),
            _triton_attends(plain, num_tokens, hooked=False, in_graph=in_graph),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert calls == ["decode", "extend", "decode"]


@pytest.mark.parametrize("changes", [{"use_mla": True}, {"dcp_size": 2}])
def test_what_triton_splits_otherwise_is_left_alone(changes: dict[str, Any]) -> None:
    backend = SimpleNamespace(use_mla=False, dcp_size=1, req_to_token_pool=_backend([]).req_to_token_pool)
    batch = _verification(backend, 1)
    batch.seq_lens_sum = None
    planned: list[Any] = []

    def plan(backend: Any, forward_batch: Any) -> None:
        planned.append(forward_batch)

    one_token.around_triton_plan(plan, backend, batch)
    vars(backend).update(changes)
    one_token.around_triton_plan(plan, backend, batch)
    decoded, left = planned
    assert left is batch
    assert (batch.forward_mode, batch.seq_lens.tolist()) == (ForwardMode.TARGET_VERIFY, SEQ_LENS)
    assert decoded.forward_mode is ForwardMode.DECODE
    assert decoded.seq_lens.tolist() == [length + 1 for length in SEQ_LENS]
