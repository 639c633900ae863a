"""SGLang's CPU operators in plain PyTorch, so that real SGLang serves EAGLE-3 on any machine.

SGLang's CPU path imports a package `sgl_kernel`, whose wheel is CUDA only. With this folder's parent first on
`PYTHONPATH` it finds the same names here: scheduler, radix cache, EAGLE-3 worker and OpenAI server run unchanged, on
the operators below instead of compiled ones. They are written for tests of the integration, not for speed.

`torch.ops.sgl_kernel` must not gain `convert_weight_packed`: SGLang takes that name for a build with Intel AMX
kernels and would then ask for many more.
"""

import os

import torch

from .attention import decode_attention_cpu, extend_attention_cpu
from .memory import copy_all_layer_kv_cache_cpu
from .slots import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
)
from .tree import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu
from .verified import fill_accept_out_cache_loc_cpu, fill_bonus_tokens_cpu, rotate_input_ids_cpu

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "decode_attention_cpu",
    "extend_attention_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

# SGLang draws the proposals of rejection sampling by a kernel in Triton, or by PyTorch.
os.environ.setdefault("SGLANG_OPT_USE_GUMBEL_SAMPLE", "0")

# The attention backend looks these two up on the namespace and calls them; plain functions spare the dispatcher.
torch.ops.sgl_kernel.decode_attention_cpu = decode_attention_cpu
torch.ops.sgl_kernel.extend_attention_cpu = extend_attention_cpu
