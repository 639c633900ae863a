"""The plugin's hooks into SGLang: what each of them does.

SGLang calls `register` early in each of its processes. Without SLIPSTREAM_ENABLED=1 nothing happens. With it, either
all hooks are in place or the server does not start (serving/sglang/plugin/contract.py).
"""

from __future__ import annotations

import inspect
import logging
import zlib
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, Literal

import structlog

from serving.request_metadata import HEADER, OTHER_TARGET, version_of_label
from serving.sglang import one_token
from serving.sglang.capture.request import attach_metadata, attach_metadata_to_generation, is_for_another_target
from serving.sglang.plugin import contract
from serving.sglang.plugin.checks import (
    check_draft_options,
    check_sampling,
    check_sendable,
    check_server,
    refuse,
    refusing,
    resolve,
    resolved,
)
from serving.sglang.plugin.grammars import KeptGrammars, after_compilation
from serving.sglang.plugin.normed_residual import check_layer
from serving.sglang.pointer import label_refusal
from serving.sglang.sampled_verify import SampledVerify
from serving.sglang.settings import PluginSettings, is_enabled, load_settings

log = structlog.get_logger(__name__)

Kind = Literal["before", "after", "around"]
DEPTH_NOTE = "adaptive_spec.restore"
"""What SGLang names as the source of a change of the depth."""

_OUTSIDE_STORAGE = ("enable_hicache_storage", "enable_lmcache", "enable_unified_cache_external_linker")
"""What SGLang's scheduler says of storage that no flush of its cache empties; it may be attached while it runs."""

_STORED_OUTSIDE = (
    "the target's weights cannot change while SGLang stores keys and values outside the server, where those of the old "
    "weights would stay: restart it without --hicache-storage-backend and --enable-lmcache"
)

_runtimes: dict[int, Any] = {}
"""The runtime of each EAGLE worker of this process, by the worker's id; there is one."""
_registered = False
_target_fingerprint = ""
"""The fingerprint of the target; empty in a process that has not seen the server's arguments."""


def register() -> None:
    """Hook this SGLang process; ends it, with one line, where that is not possible."""
    global _registered
    if not refusing(is_enabled):
        return
    if _registered:
        refuse("the plugin is registered twice in one process: install slipstream-spec once")
    _registered = True
    log_as_sglang()
    settings = refusing(load_settings)
    refusing(_check_and_hook, settings)


def log_as_sglang() -> None:
    """Hand the lines of this process to the standard library's loggers, as SGLang has configured them."""
    structlog.configure(
        processors=[_one_line],
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        logger_factory=structlog.stdlib.LoggerFactory(),
    )


def _one_line(_: Any, __: str, fields: MutableMapping[str, Any]) -> str:
    # An exception's message may quote a prompt: our lines give only its type and place.
    fields.pop("exc_info", None)
    return " ".join([str(fields.pop("event")), *(f"{name}={value}" for name, value in fields.items())])


def _check_and_hook(settings: PluginSettings) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    contract.check_required()
    contract.check_not_hooked(HookRegistry)
    add_hooks(settings, HookRegistry, HookType)


def add_hooks(settings: PluginSettings, registry: Any, hook_type: Any) -> None:
    """Register every hook in SGLang's registry, but those that this SGLang lacks and not every server needs."""

    def add(target: contract.SglangFunction, hook: Any, kind: Kind) -> None:
        registry.register(target.path, hook, hook_type[kind.upper()])

    add(contract.CHECK_ARGS, lambda _, args: _check(args, settings), "after")
    add(contract.SPECULATIVE_ARGS, _around_speculative_args, "around")
    add(contract.ATTACH, lambda run, worker: _around_attach(run, worker, settings, registry), "around")
    add(contract.STEP, _around_step, "around")
    add(contract.SAMPLE, _before_sample, "before")
    add(contract.VERIFY, _around_verify, "around")
    add(contract.VERIFIED, _around_verified, "around")
    sampled = SampledVerify()
    add(contract.SAMPLED_VERIFY, sampled.around_sampling, "around")
    add(contract.SAMPLED_VERIFY, _around_sampled_verify, "around")
    add(contract.WALK, sampled.around_walk, "around")
    add(contract.DRAFT, _around_draft, "around")
    add(contract.DRAFT_PASSES, _around_draft_passes, "around")
    if settings.suffix_depth and contract.are_usable(contract.TEXT_FUNCTIONS):
        add(contract.PROCESSED, _after_processed, "after")
        add(contract.DRAFT_BACKEND, _around_preparing, "around")
        add(contract.DRAFT_GRAPHS, _around_preparing, "around")
    add(contract.EXTEND_PREFILL, _around_extend_prefill, "around")
    add(contract.EXTEND_DECODE, _around_extend_decode, "around")
    if settings.capture and contract.are_usable(contract.CAPTURE_FUNCTIONS):
        add(contract.TREE, _after_tree, "after")
        add(contract.EXTEND_GRAPH, _after_extend_graph, "after")
    add(contract.ARRIVAL, _before_arrival, "before")
    add(contract.RELEASE, _before_release, "before")
    add(contract.STEPS, _around_steps, "around")
    add(contract.DEPTH_CHANGE, _after_depth_change, "after")
    for update in contract.WEIGHT_UPDATES:
        add(update, _around_weight_update, "around")
    add(contract.WEIGHTS_UPDATED, _around_weights_updated, "around")
    if contract.LABELLED in contract.functions_of():
        add(contract.LABELLED, _after_label, "after")
        add(contract.LABEL, before_label, "before")
    attention = contract.attention_functions()
    can_attend = contract.are_usable(attention)
    if can_attend and attention is contract.CPU_FUNCTIONS:
        add(contract.CPU_PLAN, one_token.after_cpu_plan, "after")
        add(contract.CPU_EXTEND, one_token.around_cpu_extend, "around")
    elif can_attend:
        add(contract.TRITON_PLAN, one_token.around_triton_plan, "around")
        add(contract.TRITON_GRAPH, one_token.around_triton_plan, "around")
        add(contract.TRITON_EXTEND, one_token.around_triton_extend, "around")
    for endpoint in (contract.CHAT, contract.COMPLETION):
        add(endpoint, before_conversion, "before")
    add(contract.RESPONSE, before_response, "before")
    add(contract.TOKENIZED, check_request, "before")
    add(contract.MESSAGE, around_message, "around")
    add(contract.GRAMMAR, after_compilation, "after")
    add(contract.KEEP_GRAMMAR, KeptGrammars().before_keeping, "before")
    add(contract.GRAMMAR_MASK, after_grammar_mask, "after")


def _check(args: Any, settings: PluginSettings) -> None:
    global _target_fingerprint
    decided = refusing(resolved, args)
    _target_fingerprint = refusing(check_server, decided, settings)
    refusing(check_draft_options, decided, settings)
    refusing(contract.check_needed, decided, settings)
    refusing(check_layer, decided, settings)


def _around_speculative_args(run: Any, args: Any) -> None:
    """Let a server that drafts run as many requests at once as one that does not; SGLang's own default is 48.

    And none mixes prefills with running requests, as in 0.5.17: these would get tokens without a verification, by
    penalties that SGLang counts wrongly.
    """
    asked = refusing(resolved, args)
    limit, mixes = asked.max_running_requests, asked.enable_mixed_chunk
    run(args)
    refusing(resolve, args, {"max_running_requests": limit, "enable_mixed_chunk": False})
    if mixes:
        log.warning("slipstream: --enable-mixed-chunk is off, since the server drafts")


def _around_attach(run: Any, worker: Any, settings: PluginSettings, registry: Any) -> None:
    """Build the runtime before SGLang captures graphs, start it after: meanwhile no other thread may use the device."""
    from serving.sglang.plugin.runtime import EngineRuntime

    refusing(contract.check_hooked, registry)
    runtime = refusing(EngineRuntime, worker, settings)
    _runtimes[id(worker)] = runtime
    draft = worker.draft_worker
    _runtimes[id(draft)] = runtime
    runner, forward = draft.draft_runner, draft.draft_runner.forward

    def observed_forward(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        runtime.on_forward(lambda: output.logits_output)
        return output

    runner.forward = observed_forward
    run(worker)
    runtime.start()


def _the_runtime() -> Any:
    return next(iter(_runtimes.values()), None)


def _around_step(run: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    return _runtimes[id(worker)].step(lambda: run(worker, batch, *args, **kwargs), batch)


def _before_sample(runner: Any, logits_output: Any, *args: Any, **kwargs: Any) -> None:
    if (runtime := _the_runtime()) is not None:
        runtime.sampling(runner, logits_output)


def _around_verify(run: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    return _runtimes[id(worker)].verify(lambda: run(worker, batch, *args, **kwargs), batch)


def _around_sampled_verify(run: Any, *args: Any, **kwargs: Any) -> Any:
    runtime = _the_runtime()
    return run(*args, **kwargs) if runtime is None else runtime.walk(run, *args, **kwargs)


def _around_verified(run: Any, worker: Any, accepted: list[int], *args: Any, **kwargs: Any) -> Any:
    _runtimes[id(worker)].verified(lambda: run(worker, accepted, *args, **kwargs), accepted)


def _around_draft(run: Any, draft: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    return _runtimes[id(draft)].propose(lambda: run(draft, batch, *args, **kwargs), batch)


def _around_draft_passes(run: Any, draft: Any, forward_batch: Any) -> Any:
    return _runtimes[id(draft)].drafting(lambda: run(draft, forward_batch), forward_batch)


def _around_preparing(run: Any, draft: Any) -> Any:
    runtime = _runtimes.get(id(draft))
    return run(draft) if runtime is None else runtime.preparing(lambda: run(draft))


def _around_extend_prefill(
    run: Any, draft: Any, batch: Any, hidden: Any, next_tokens: Any, *args: Any, **kwargs: Any
) -> Any:
    return _runtimes[id(draft)].read_prompt(
        lambda: run(draft, batch, hidden, next_tokens, *args, **kwargs), batch, next_tokens
    )


def _around_extend_decode(run: Any, draft: Any, batch: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
    return _runtimes[id(draft)].catch_up(lambda: run(draft, batch, result, *args, **kwargs), batch, result)


def _after_extend_graph(result: Any, *args: Any, **kwargs: Any) -> None:
    _the_runtime().on_forward(lambda: result)


def _after_tree(result: Any, score_list: Any, *args: Any, **kwargs: Any) -> None:
    _the_runtime().on_tree(score_list, result)


def _before_arrival(_: Any, request: Any) -> None:
    if (runtime := _the_runtime()) is not None:
        runtime.arrived(request)


def _before_release(request: Any, *args: Any, **kwargs: Any) -> None:
    if (runtime := _the_runtime()) is not None:
        runtime.released(request)


def _after_processed(_: Any, processor: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    if (runtime := _the_runtime()) is not None:
        runtime.processed(batch)


def _around_steps(run: Any, params: Any, batch_size: int) -> int:
    depth: int = _the_runtime().steps_for(lambda: run(params, batch_size), batch_size)
    return depth


def _after_depth_change(*_: Any, **__: Any) -> None:
    """Keep the newest of SGLang's notes of a changed depth: it would keep all, and `/server_info` reads each."""
    from sglang.srt.runtime_context import get_context

    notes: Any = getattr(get_context(), "_overrides_log", ())
    if len(notes) > 1 and notes[-1][0] == notes[-2][0] == DEPTH_NOTE:
        del notes[-2]


def _around_weight_update(run: Any, updater: Any, request: Any) -> Any:
    """Load new weights into the target alone: SGLang would load them into the draft, too, and fail at its shapes."""
    if getattr(request, "selector", "") == "draft":
        return run(updater, request)
    if any(getattr(updater.scheduler, name, False) for name in _OUTSIDE_STORAGE):
        return _refused_update(request, _STORED_OUTSIDE)
    if (runtime := _the_runtime()) is not None and (reason := label_refusal(request.weight_version, runtime.label)):
        return _refused_update(request, reason)
    draft, updater.draft_worker = updater.draft_worker, None
    try:
        return run(updater, request)
    finally:
        updater.draft_worker = draft


def _refused_update(request: Any, reason: str) -> Any:
    """SGLang's answer to an update that it does not make."""
    from sglang.srt.managers import io_struct

    answer = getattr(io_struct, type(request).__name__.replace("ReqInput", "ReqOutput"))
    return answer(success=False, message=reason)


def _around_weights_updated(run: Any, updater: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    if (runtime := _the_runtime()) is not None and getattr(request, "selector", "") != "draft":
        runtime.target_updated(request.weight_version)
    with _waiting_aside(updater.scheduler):
        return run(updater, request, *args, **kwargs)


def before_label(manager: Any, request: Any) -> None:
    """Refuse a label that comes after the weights, before any process takes it. Raises ValueError: status 400."""
    if reason := label_refusal(request.new_version, version_of_label(_weight_version(manager)) or 0):
        raise ValueError(reason)


def _after_label(_: Any, scheduler: Any, request: Any) -> None:
    if (runtime := _the_runtime()) is not None:
        runtime.target_labelled(request.new_version)


@contextmanager
def _waiting_aside(scheduler: Any) -> Iterator[None]:
    """Let SGLang flush the cache of a paused server where requests wait: for their grammar, or to be read anew.

    They hold no keys and values, but SGLang refuses to flush beside them, and 0.5.17 ends at that.
    """
    if not scheduler._engine_paused:
        yield
        return
    grammars = scheduler.grammar_manager
    compiling, waiting = grammars.grammar_queue, scheduler.waiting_queue
    grammars.grammar_queue = []
    if "ignore_waiting" not in inspect.signature(scheduler.is_fully_idle).parameters:
        scheduler.waiting_queue = [request for request in waiting if request.req_pool_idx is not None]
    try:
        yield
    finally:
        grammars.grammar_queue, scheduler.waiting_queue = compiling, waiting


def before_conversion(endpoint: Any, request: Any, raw_request: Any = None) -> None:
    """Mark a request as its gateway header says, in SGLang's HTTP server; an exception here refuses the request."""
    if raw_request is not None and (header := raw_request.headers.get(HEADER)) is not None:
        attach_metadata(request, header)
    # A router may have lost the header; the body has the same values.
    _check_target(endpoint, getattr(request, "custom_params", None))


def before_response(
    endpoint: Any, _id: str, _prompt: Any, generation: Any, params: Any, _: Any, raw_request: Any = None, **__: Any
) -> None:
    """As `before_conversion`, for requests whose body has no field for the gateway's values."""
    if raw_request is not None and (header := raw_request.headers.get(HEADER)) is not None:
        attach_metadata_to_generation(generation, header)
    _check_target(endpoint, params.get("custom_params"))


def check_request(manager: Any, request: Any, *_: Any) -> None:
    """Refuse what SGLang's own checks let through and what would end its scheduler: token ids that the target lacks,
    more logprobs than it has tokens, numbers that overflow, and grammars that take gigabytes.

    Raises ValueError, which SGLang answers with status 400.
    """
    num_tokens: int = manager.model_config.vocab_size
    ids = request.input_ids
    if ids is not None and len(ids) and not 0 <= min(ids) <= max(ids) < num_tokens:
        raise ValueError(f"token ids must lie in 0…{num_tokens - 1}")
    check_sampling(getattr(request, "sampling_params", None) or {}, num_tokens)
    if (getattr(request, "top_logprobs_num", None) or 0) > num_tokens:
        raise ValueError(f"at most {num_tokens} logprobs can be given for a token: the model has no more tokens")


def around_message(run: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse a request whose message to SGLang's scheduler would have values of other types than declared.

    Raises ValueError, which SGLang answers with status 400.
    """
    try:
        message = run(*args, **kwargs)
    except TypeError as error:
        # An unknown name in `sampling_params` or `session_params`, or a value that SGLang cannot work with.
        raise ValueError(str(error)) from error
    check_sendable(message)
    return message


def after_grammar_mask(_: Any, grammar: Any, mask: Any, row: int) -> None:
    """Let one token through where a grammar lets none: SGLang then ends that request, and not itself.

    JSON schemas such as `{"$ref": "#"}` lead there. SGLang refuses the token once it was drawn. It fails where a
    proposal is that token, so nobody can choose it; all ranks choose the same.
    """
    bits = mask[row]
    if bits.any():
        return
    runtime = _the_runtime()
    text = f"{0 if runtime is None else runtime.random_seed} {grammar.accepted_tokens}"
    word, bit = divmod(zlib.crc32(text.encode()) % grammar.vocab_size, 32)
    bits[word] = 1 << bit if bit < 31 else -(1 << 31)


def _check_target(endpoint: Any, params: Any) -> None:
    if is_for_another_target(params, _target_fingerprint, lambda: _weight_version(endpoint.tokenizer_manager)):
        from fastapi import HTTPException

        raise HTTPException(503, OTHER_TARGET)


def _weight_version(tokenizer_manager: Any) -> str:
    """The label of the weights in service."""
    if hasattr(tokenizer_manager, "config_value"):
        return str(tokenizer_manager.config_value("weight_version"))
    return str(tokenizer_manager.server_args.weight_version)
