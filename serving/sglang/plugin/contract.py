"""What the plugin relies on in SGLang: functions that it hooks or calls, and attributes that it reads.

SGLang's plugin interface names none of these functions, and none is public. So every start checks that what it needs
exists before any weights load, and later that SGLang has installed every hook.
"""

from __future__ import annotations

import ast
import inspect
import os
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serving.sglang.plugin.checks import INSTALL, sglang_version
from serving.sglang.settings import PluginSettings
from speculator.errors import ConfigError

_WORKER = "sglang.srt.speculative.eagle_worker_v2"
_EAGLE = f"{_WORKER}.EAGLEWorkerV2"
_DRAFT = f"{_WORKER}.EagleDraftWorker"


@dataclass(frozen=True)
class SglangFunction:
    """A function of SGLang and the parameters, in order, that a hook relies on."""

    path: str
    parameters: tuple[str, ...]


SGLANG_FUNCTIONS: list[SglangFunction] = []
CPU_FUNCTIONS: list[SglangFunction] = []
"""Needed on a CPU with AMX attention only, as `GPU_FUNCTIONS` on a GPU with Triton's."""
GPU_FUNCTIONS: list[SglangFunction] = []
CAPTURE_FUNCTIONS: list[SglangFunction] = []
"""Needed by a server that captures."""
TEXT_FUNCTIONS: list[SglangFunction] = []
"""Needed by a server that proposes earlier text."""
OPTIONAL_FUNCTIONS: list[SglangFunction] = []
"""Hooked where this SGLang has them."""


def _uses(path: str, *parameters: str, among: list[SglangFunction] = SGLANG_FUNCTIONS) -> SglangFunction:
    used = SglangFunction(path, parameters)
    among.append(used)
    return used


CHECK_ARGS = _uses("sglang.srt.server_args.ServerArgs.check_server_args", "self")
SPECULATIVE_ARGS = _uses("sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding", "server_args")
ATTACH = _uses(f"{_EAGLE}.init_cuda_graphs", "self")
STEP = _uses(f"{_EAGLE}.forward_batch_generation", "self", "batch")
SAMPLE = _uses("sglang.srt.model_executor.model_runner.ModelRunner.sample", "self", "logits_output", "forward_batch")
"""Hooked after a prefill; it overwrites the logits."""
VERIFY = _uses(f"{_EAGLE}.verify", "self", "batch")
VERIFIED = _uses(f"{_EAGLE}.on_verify_complete_cpu", "self", "num_correct_drafts_per_req")
SAMPLED_VERIFY = _uses("sglang.srt.speculative.eagle_utils.eagle_sample", "verify_input", "batch", "logits_output")
"""Returns what the target predicted, how many tokens it accepted, and the nodes along the accepted path."""
SPEC = _uses("sglang.srt.speculative.eagle_utils.get_spec")
"""Called, not hooked: the server's options for speculation."""
WALK = _uses(
    "sglang.srt.speculative.eagle_utils.verify_tree_greedy_func",
    *("predicts", "accept_index", "accept_token_num", "candidates"),
)
"""Walks through the tree of proposals along the target's choices."""
DRAFT = _uses(f"{_DRAFT}.draft", "self", "batch")
"""A step's proposals, as the input of their verification."""
DRAFT_PASSES = _uses(f"{_DRAFT}.draft_forward", "self", "forward_batch")
DRAFT_BACKEND = _uses(f"{_DRAFT}.init_attention_backend", "self", among=TEXT_FUNCTIONS)
DRAFT_GRAPHS = _uses(f"{_DRAFT}._capture_cuda_graphs", "self", among=TEXT_FUNCTIONS)
"""Both prepare the draft for one depth."""
EXTEND_PREFILL = _uses(f"{_DRAFT}._draft_extend_for_prefill", "self", "batch", "target_hidden_states", "next_token_ids")
EXTEND_DECODE = _uses(f"{_DRAFT}._draft_extend_for_decode", "self", "batch", "batch_result")
SKIP_EXTEND = _uses(f"{_EAGLE}._stub_skipped_draft_extend", "self", "batch", "batch_output")
"""Called, not hooked: SGLang's stub for a draft that skips its reading."""
TREE = _uses(f"{_WORKER}.organize_draft_results", "score_list", among=CAPTURE_FUNCTIONS)
EXTEND_GRAPH = _uses(
    "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner.execute",
    *("self", "forward_batch"),
    among=CAPTURE_FUNCTIONS,
)
ARRIVAL = _uses("sglang.srt.managers.scheduler.Scheduler._maybe_namespace_elastic_radix_cache", "self", "req")
"""Where SGLang sets the namespace that separates a request's cached prefix from others."""
RELEASE = _uses("sglang.srt.mem_cache.common.release_kv_cache", "req")
STEPS = _uses(
    "sglang.srt.speculative.adaptive_spec_params.AdaptiveSpeculativeParams.get_steps_for_batch", "self", "batch_size"
)
DEPTH_CHANGE = _uses(f"{_EAGLE}.apply_runtime_state", "self", "state")
CONTEXT = _uses("sglang.srt.runtime_context.get_context")
"""Called, not hooked: it keeps a list of all changes of the depth."""
PROCESSED = _uses(
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    ".process_batch_result_decode",
    *("self", "batch", "result"),
    among=TEXT_FUNCTIONS,
)
"""The scheduler has a step's tokens, and has given them to their requests."""
_WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
WEIGHT_UPDATES = tuple(
    _uses(f"{_WEIGHTS}.update_weights_from_{source}", "self", "recv_req")
    for source in ("disk", "distributed", "tensor", "ipc")
)
WEIGHTS_UPDATED = _uses(f"{_WEIGHTS}.flush_cache_after_weight_update", "self", "recv_req")
"""Called once the target has new weights, also where the draft did not take them or the cache cannot be flushed."""
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
LABELLED = _uses(f"{_SCHEDULER}.handle_update_weight_version", "self", "recv_req", among=OPTIONAL_FUNCTIONS)
"""Takes a label that comes after the weights. Older versions tell their HTTP process alone."""
LABEL = _uses(
    "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.update_weight_version",
    *("self", "obj"),
    among=OPTIONAL_FUNCTIONS,
)
"""Sends it that label."""
IDLE = _uses(f"{_SCHEDULER}.is_fully_idle", "self", "for_health_check")
"""Not called: whether it can ignore requests that wait, which a flush of the cache asks for while paused."""
_AMX = "sglang.srt.layers.attention.intel_amx_backend.IntelAMXAttnBackend"
_ATTEND = ("self", "q", "k", "v", "layer", "forward_batch")
CPU_PLAN = _uses(f"{_AMX}.init_forward_metadata", "self", "forward_batch", among=CPU_FUNCTIONS)
CPU_EXTEND = _uses(f"{_AMX}.forward_extend", *_ATTEND, among=CPU_FUNCTIONS)
CPU_DECODE = _uses(f"{_AMX}.forward_decode", *_ATTEND, among=CPU_FUNCTIONS)
"""Called, not hooked."""
_TRITON = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend"
TRITON_PLAN = _uses(f"{_TRITON}.init_forward_metadata", "self", "forward_batch", among=GPU_FUNCTIONS)
TRITON_GRAPH = _uses(
    f"{_TRITON}.init_forward_metadata_out_graph", "self", "forward_batch", "in_capture", among=GPU_FUNCTIONS
)
TRITON_EXTEND = _uses(f"{_TRITON}.forward_extend", *_ATTEND, among=GPU_FUNCTIONS)
TRITON_DECODE = _uses(f"{_TRITON}.forward_decode", *_ATTEND, among=GPU_FUNCTIONS)
"""Called, not hooked."""
_OPENAI = "sglang.srt.entrypoints.openai"
_CONVERTED = ("self", "request", "raw_request")
CHAT = _uses(f"{_OPENAI}.serving_chat.OpenAIServingChat._convert_to_internal_request", *_CONVERTED)
COMPLETION = _uses(f"{_OPENAI}.serving_completions.OpenAIServingCompletion._convert_to_internal_request", *_CONVERTED)
RESPONSE = _uses(
    f"{_OPENAI}.serving_responses.OpenAIServingResponses._generate_with_builtin_tools",
    *("self", "request_id", "request_prompt", "adapted_request", "sampling_params", "context", "raw_request"),
)
"""Anthropic's endpoint needs no hook of its own: SGLang turns its messages into chats."""
TOKENIZED = _uses(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request", "self", "obj", "input_ids"
)
"""SGLang's own checks of a request of any endpoint, once its prompt is token ids."""
MESSAGE = _uses("sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object", "self", "obj")
"""Makes the message to SGLang's scheduler."""
ENCODE = _uses("sglang.srt.managers.io_struct.msgpack_encode", "obj")
DECODE = _uses("sglang.srt.managers.io_struct.msgpack_decode", "data")
"""Both are called, not hooked."""
_GRAMMARS = "sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend"
GRAMMAR = _uses(f"{_GRAMMARS}._init_value_dispatch", "self", "key", "require_reasoning")
"""Compiles a grammar, in a thread of its own."""
KEEP_GRAMMAR = _uses(f"{_GRAMMARS}.set_cache", "self", "key", "value")
GRAMMAR_MASK = _uses(
    "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.fill_vocab_mask", "self", "vocab_mask", "idx"
)
DRAFT_LAYER = SglangFunction(
    "sglang.srt.models.llama_eagle3.LlamaDecoderLayer.forward",
    ("self", "positions", "embeds", "hidden_states", "forward_batch", "residual"),
)
NORMED_RESIDUAL = (DRAFT_LAYER,)
"""Needed only for a draft that was trained with `norm_before_residual`."""


def functions_of(environment: Mapping[str, str] = os.environ) -> tuple[SglangFunction, ...]:
    """Functions that the plugin hooks or calls on this device, whatever a server's options."""
    return (
        *SGLANG_FUNCTIONS,
        *CAPTURE_FUNCTIONS,
        *TEXT_FUNCTIONS,
        *attention_functions(environment),
        *filter(_exists, OPTIONAL_FUNCTIONS),
    )


def attention_functions(environment: Mapping[str, str] = os.environ) -> list[SglangFunction]:
    """Those of the attention; `SGLANG_USE_CPU_ENGINE` says whether a CPU's or a GPU's."""
    return CPU_FUNCTIONS if environment.get("SGLANG_USE_CPU_ENGINE") == "1" else GPU_FUNCTIONS


def _exists(function: SglangFunction) -> bool:
    try:
        pkgutil.resolve_name(function.path)
    except (ImportError, AttributeError):
        return False
    return True


@dataclass(frozen=True)
class SglangRecord:
    """A class of SGLang and those of its fields and other attributes that the plugin reads."""

    path: str
    fields: tuple[str, ...]


SGLANG_RECORDS = (
    SglangRecord(
        "sglang.srt.managers.schedule_batch.ScheduleBatch",
        (
            *("reqs", "forward_mode", "is_extend_in_batch", "spec_info", "sampling_info"),
            *("seq_lens", "req_pool_indices", "prefix_lens", "extend_lens"),
        ),
    ),
    SglangRecord(
        "sglang.srt.managers.utils.GenerationBatchResult",
        ("logits_output", "next_draft_input", "accept_lens", "next_token_ids"),
    ),
    SglangRecord("sglang.srt.layers.logits_processor.LogitsProcessorOutput", ("next_token_logits", "hidden_states")),
    SglangRecord(
        "sglang.srt.speculative.eagle_info.EagleVerifyInput",
        (
            *("draft_token", "draft_token_num", "draft_probs", "topk", "positions", "spec_steps"),
            *("retrieve_next_token", "retrieve_next_sibling"),
        ),
    ),
    SglangRecord(
        "sglang.srt.speculative.eagle_info.EagleDraftInput",
        ("bonus_tokens", "draft_probs", "topk_index", "num_tokens_per_req", "num_tokens_for_logprob_per_req"),
    ),
    SglangRecord(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo",
        (
            *("is_all_greedy", "temperatures", "top_ks", "top_ps", "min_ps", "sampling_seed"),
            *("need_top_k_sampling", "need_top_p_sampling", "need_min_p_sampling", "acc_additive_penalties"),
        ),
    ),
    SglangRecord(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch",
        ("forward_mode", "spec_info", "seq_lens", "seq_lens_sum", "batch_size", "req_pool_indices", "sampling_info"),
    ),
    SglangRecord(
        "sglang.srt.managers.schedule_batch.Req",
        (
            *("rid", "origin_input_ids", "output_ids", "output_ids_through_stop", "sampling_params", "extra_key"),
            *("finished", "finished_reason", "is_retracted", "time_stats", "spec_num_cap_tokens"),
            *("grammar", "custom_logit_processor", "lora_id", "multimodal_inputs", "input_embeds"),
            *("tokenizer", "eos_token_ids"),
        ),
    ),
    SglangRecord(
        "sglang.srt.sampling.sampling_params.SamplingParams",
        (
            *("temperature", "top_p", "top_k", "min_p", "logit_bias", "custom_params", "stop_token_ids"),
            *("min_new_tokens", "max_new_tokens"),
            *("frequency_penalty", "presence_penalty", "repetition_penalty"),
        ),
    ),
    SglangRecord(
        _EAGLE,
        (
            *("server_args", "target_worker", "draft_worker", "req_to_token_pool", "adaptive_controller"),
            *("topk", "speculative_num_steps", "speculative_num_draft_tokens"),
        ),
    ),
    SglangRecord(
        _DRAFT,
        ("draft_runner", "speculative_num_steps", "cuda_graph_runner", "draft_attn_backend", "hot_token_id"),
    ),
    SglangRecord("sglang.srt.managers.tp_worker.TpModelWorker", ("model_runner", "model_config")),
    SglangRecord("sglang.srt.model_executor.model_runner.ModelRunner", ("model", "model_config")),
    SglangRecord("sglang.srt.configs.model_config.ModelConfig", ("vocab_size", "context_len")),
    SglangRecord("sglang.srt.speculative.adaptive_runtime_state.AdaptiveController", ("candidate_steps",)),
    SglangRecord(_WEIGHTS, ("scheduler", "draft_worker")),
    SglangRecord(_SCHEDULER, ("waiting_queue", "grammar_manager", "_engine_paused")),
    SglangRecord("sglang.srt.managers.tokenizer_manager.TokenizerManager", ("model_config", "server_args")),
    SglangRecord("sglang.srt.mem_cache.memory_pool.ReqToTokenPool", ("req_to_token",)),
    SglangRecord("sglang.srt.observability.req_time_stats.SchedulerReqTimeStats", ("scheduler_recv_time",)),
    SglangRecord("sglang.srt.constrained.grammar_manager.GrammarManager", ("grammar_queue",)),
    SglangRecord("sglang.srt.constrained.xgrammar_backend.XGrammarGrammar", ("accepted_tokens", "vocab_size")),
)


def assigned_in(definition: ast.AST) -> set[str]:
    """The names that the source of a class assigns to `self`."""
    return {
        node.attr
        for node in ast.walk(definition)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def _missing(record: type, names: Sequence[str]) -> list[str]:
    """Those of the names that a class and its bases neither define nor declare, nor assign to `self`."""
    package = record.__module__.partition(".")[0]
    own = [base for base in record.__mro__ if base.__module__.partition(".")[0] == package]
    known = {*dir(record)}.union(*map(inspect.get_annotations, own))
    for base in own:
        # SGLang's files have thousands of lines: most need not be read.
        if not known.issuperset(names):
            source = ast.parse(inspect.getsource(sys.modules[base.__module__]))
            known.update(*(assigned_in(one) for one in source.body if getattr(one, "name", "") == base.__name__))
    return [name for name in names if name not in known]


def check_sglang_records(records: Sequence[SglangRecord], sglang_version: str) -> None:
    """Raises ConfigError, naming the first class of SGLang that is gone or lacks an attribute."""
    for used in records:
        try:
            missing = _missing(pkgutil.resolve_name(used.path), used.fields)
        except (ImportError, AttributeError, ValueError, TypeError, OSError) as error:
            raise ConfigError(f"SGLang {sglang_version} has no usable {used.path} ({error}): {INSTALL}") from error
        if missing:
            raise ConfigError(f"SGLang {sglang_version}: {used.path} has no {', '.join(missing)}: {INSTALL}")


def check_sglang_functions(functions: Sequence[SglangFunction], sglang_version: str) -> None:
    """Raises ConfigError, naming the first function of SGLang that is gone or takes other parameters."""
    for used in functions:
        try:
            function = pkgutil.resolve_name(used.path)
            parameters = tuple(inspect.signature(function).parameters)[: len(used.parameters)]
        except (ImportError, AttributeError, ValueError, TypeError) as error:
            raise ConfigError(f"SGLang {sglang_version} has no usable {used.path} ({error}): {INSTALL}") from error
        if parameters != used.parameters:
            raise ConfigError(
                f"SGLang {sglang_version}: {used.path} takes {', '.join(parameters)}, expected "
                f"{', '.join(used.parameters)}: {INSTALL}"
            )


def check_sglang() -> str:
    """Check that this interpreter's SGLang has all of it; returns one line that says so. Raises ConfigError."""
    used, version = functions_of(), sglang_version()
    check_sglang_functions(used, version)
    check_sglang_records(SGLANG_RECORDS, version)
    return f"{version}, all {len(used)} functions that the plugin hooks or calls are there"


def check_required() -> None:
    """Check this SGLang before a server's options are known. Raises ConfigError."""
    version = sglang_version()
    check_sglang_functions([*SGLANG_FUNCTIONS, *filter(_exists, OPTIONAL_FUNCTIONS)], version)
    check_sglang_records(SGLANG_RECORDS, version)


def check_needed(args: Any, settings: PluginSettings) -> None:
    """Check what a server with these options needs besides; `args` are `resolved`. Raises ConfigError."""
    needed = list(CAPTURE_FUNCTIONS) if settings.capture else []
    if settings.suffix_depth and args.speculative_adaptive:
        needed += TEXT_FUNCTIONS
    attention = attention_functions()
    backends = {args.attention_backend, args.prefill_attention_backend, args.decode_attention_backend} - {None}
    if not backends or ("intel_amx" if attention is CPU_FUNCTIONS else "triton") in backends:
        needed += attention
    check_sglang_functions(needed, sglang_version())


def are_usable(functions: Sequence[SglangFunction]) -> bool:
    """Whether this SGLang has functions that not every server needs."""
    try:
        check_sglang_functions(functions, sglang_version())
    except ConfigError:
        return False
    return True


def check_not_hooked(registry: Any) -> None:
    """Raises ConfigError where another plugin, or this one a second time, has hooked one of these functions."""
    for used in functions_of():
        if registry._hooks.get(used.path):
            raise ConfigError(f"another SGLang plugin hooks {used.path}: run one of them, see SGLANG_PLUGINS")


def check_hooked(registry: Any) -> None:
    """Raises ConfigError where a registered hook is not in place: SGLang only logs that."""
    for used in functions_of():
        if registry._hooks.get(used.path) and used.path not in registry._patched:
            raise ConfigError(f"SGLang {sglang_version()} could not be hooked at {used.path}: its log says why")
