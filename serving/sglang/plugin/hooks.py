"""Every name of SGLang that the plugin hooks, and the proof that each is still what the hook expects.

SGLang applies hooks with a log line where one fails; `check_targets` runs before and raises instead.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from speculator.errors import ConfigError

_WORKER = "sglang.srt.speculative.eagle_worker_v2"
_EAGLE = f"{_WORKER}.EAGLEWorkerV2"
_DRAFT = f"{_WORKER}.EagleDraftWorker"

Kind = Literal["before", "after", "around"]


@dataclass(frozen=True)
class Target:
    """A function of SGLang and the parameters, in order, that a hook relies on."""

    path: str
    parameters: tuple[str, ...]


CHECK_ARGS = Target("sglang.srt.server_args.ServerArgs.check_server_args", ("self",))
SPECULATIVE_ARGS = Target("sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding", ("server_args",))
ATTACH = Target(f"{_EAGLE}.init_cuda_graphs", ("self",))
STEP = Target(f"{_EAGLE}.forward_batch_generation", ("self", "batch"))
SAMPLE = Target("sglang.srt.model_executor.model_runner.ModelRunner.sample", ("self", "logits_output", "forward_batch"))
"""After a prefill; it works in the memory of the logits."""
VERIFY = Target(f"{_EAGLE}.verify", ("self", "batch"))
VERIFIED = Target(f"{_EAGLE}.on_verify_complete_cpu", ("self", "num_correct_drafts_per_req"))
DRAFT = Target(f"{_DRAFT}.draft_forward", ("self", "forward_batch"))
EXTEND_PREFILL = Target(
    f"{_DRAFT}._draft_extend_for_prefill", ("self", "batch", "target_hidden_states", "next_token_ids")
)
EXTEND_DECODE = Target(f"{_DRAFT}._draft_extend_for_decode", ("self", "batch", "batch_result"))
SKIP_EXTEND = Target(f"{_EAGLE}._stub_skipped_draft_extend", ("self", "batch", "batch_output"))
"""Called, not hooked: what SGLang puts in the place of the draft's reading."""
TREE = Target(f"{_WORKER}.organize_draft_results", ("score_list",))
EXTEND_GRAPH = Target(
    "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner.execute",
    ("self", "forward_batch"),
)
RELEASE = Target("sglang.srt.mem_cache.common.release_kv_cache", ("req",))
STEPS = Target(
    "sglang.srt.speculative.adaptive_spec_params.AdaptiveSpeculativeParams.get_steps_for_batch", ("self", "batch_size")
)
_AMX = "sglang.srt.layers.attention.intel_amx_backend.IntelAMXAttnBackend"
_ATTEND = ("self", "q", "k", "v", "layer", "forward_batch")
CPU_PLAN = Target(f"{_AMX}.init_forward_metadata", ("self", "forward_batch"))
CPU_EXTEND = Target(f"{_AMX}.forward_extend", _ATTEND)
CPU_DECODE = Target(f"{_AMX}.forward_decode", _ATTEND)
"""Called, not hooked."""

_OPENAI = "sglang.srt.entrypoints.openai"
_CONVERTED = ("self", "request", "raw_request")
CHAT = Target(f"{_OPENAI}.serving_chat.OpenAIServingChat._convert_to_internal_request", _CONVERTED)
COMPLETION = Target(f"{_OPENAI}.serving_completions.OpenAIServingCompletion._convert_to_internal_request", _CONVERTED)

TARGETS = (
    CHECK_ARGS,
    SPECULATIVE_ARGS,
    ATTACH,
    STEP,
    SAMPLE,
    VERIFY,
    VERIFIED,
    DRAFT,
    EXTEND_PREFILL,
    EXTEND_DECODE,
    SKIP_EXTEND,
    TREE,
    EXTEND_GRAPH,
    RELEASE,
    STEPS,
    CPU_PLAN,
    CPU_EXTEND,
    CPU_DECODE,
    CHAT,
    COMPLETION,
)


def check_targets(sglang_version: str) -> None:
    """Raises ConfigError, naming the first target that is gone or takes other parameters."""
    for target in TARGETS:
        try:
            function = pkgutil.resolve_name(target.path)
            parameters = tuple(inspect.signature(function).parameters)[: len(target.parameters)]
        except (ImportError, AttributeError, ValueError, TypeError) as error:
            raise ConfigError(
                f"SGLang {sglang_version} has no usable {target.path} ({error}): install sglang==0.5.23"
            ) from error
        if parameters != target.parameters:
            raise ConfigError(
                f"SGLang {sglang_version}: {target.path} takes {', '.join(parameters)}, expected "
                f"{', '.join(target.parameters)}: install sglang==0.5.23"
            )


def check_not_hooked(registry: Any) -> None:
    """Raises ConfigError where another plugin, or this one a second time, has hooked one of the targets."""
    for target in TARGETS:
        if registry._hooks.get(target.path):
            raise ConfigError(f"another SGLang plugin hooks {target.path}: run one of them, see SGLANG_PLUGINS")


def register(registry: Any, hook_type: Any, target: Target, hook: Callable[..., Any], kind: Kind) -> None:
    registry.register(target.path, hook, hook_type[kind.upper()])
