"""The entry point of the group `sglang.srt.plugins`: SGLang calls `register` early in each of its processes.

Without SLIPSTREAM_ENABLED=1 nothing happens. With it, either all hooks are in place or the server does not start.
"""

from __future__ import annotations

from typing import Any

from serving.request_metadata import HEADER, OTHER_TARGET
from serving.sglang.capture.request_policy import is_for_another_target, mark
from serving.sglang.depth import one_token
from serving.sglang.plugin import hooks
from serving.sglang.plugin.checks import (
    check_draft_options,
    check_server,
    refuse,
    refusing,
    resolve,
    resolved,
    sglang_version,
)
from serving.sglang.settings import PluginSettings, is_enabled, load_settings

_runtimes: dict[int, Any] = {}
"""The runtime of each EAGLE worker of this process, by the worker's id; there is one."""
_registered = False
_target = ""
"""The fingerprint of the target; empty in a process that has not seen the server's arguments."""


def register() -> None:
    """Hook this SGLang process; ends it, with one line, where that is not possible."""
    global _registered
    if not refusing(is_enabled):
        return
    if _registered:
        refuse("the plugin is registered twice in one process: install slipstream-spec once")
    _registered = True
    settings = refusing(load_settings)
    refusing(_hook, settings)


def _hook(settings: PluginSettings) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks.check_targets(sglang_version())
    hooks.check_not_hooked(HookRegistry)

    def add(target: hooks.Target, hook: Any, kind: hooks.Kind) -> None:
        hooks.register(HookRegistry, HookType, target, hook, kind)

    add(hooks.CHECK_ARGS, lambda _, args: _check(args, settings), "after")
    add(hooks.SPECULATIVE_ARGS, _around_speculative_args, "around")
    add(hooks.ATTACH, lambda worker: _attach(worker, settings), "before")
    add(hooks.STEP, _around_step, "around")
    add(hooks.SAMPLE, _before_sample, "before")
    add(hooks.VERIFY, _around_verify, "around")
    add(hooks.VERIFIED, _around_verified, "around")
    add(hooks.DRAFT, _around_draft, "around")
    add(hooks.EXTEND_PREFILL, _around_extend_prefill, "around")
    add(hooks.EXTEND_DECODE, _around_extend_decode, "around")
    add(hooks.TREE, _after_tree, "after")
    add(hooks.EXTEND_GRAPH, _after_extend_graph, "after")
    add(hooks.RELEASE, _before_release, "before")
    add(hooks.STEPS, _around_steps, "around")
    add(hooks.CPU_PLAN, one_token.after_plan, "after")
    add(hooks.CPU_EXTEND, one_token.around_extend, "around")
    for endpoint in (hooks.CHAT, hooks.COMPLETION):
        add(endpoint, _before_conversion, "before")


def _check(args: Any, settings: PluginSettings) -> None:
    global _target
    decided = refusing(resolved, args)
    _target = refusing(check_server, decided, settings)
    refusing(check_draft_options, decided, settings)


def _around_speculative_args(run: Any, args: Any) -> None:
    """A server that drafts takes as many requests at a time as one that does not; SGLang's own default is 48."""
    limit = refusing(lambda: resolved(args).max_running_requests)
    run(args)
    refusing(resolve, args, {"max_running_requests": limit})


def _attach(worker: Any, settings: PluginSettings) -> None:
    from serving.sglang.plugin.runtime import EngineRuntime

    runtime = refusing(EngineRuntime, worker, settings)
    _runtimes[id(worker)] = runtime
    draft = worker.draft_worker
    _runtimes[id(draft)] = runtime
    runner, forward = draft.draft_runner, draft.draft_runner.forward

    def forward_and_look(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        runtime.saw_forward(lambda: output.logits_output)
        return output

    runner.forward = forward_and_look


def _the_runtime() -> Any:
    return next(iter(_runtimes.values()), None)


def _around_step(run: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    return _runtimes[id(worker)].step(lambda: run(worker, batch, *args, **kwargs), batch)


def _before_sample(runner: Any, logits_output: Any, *args: Any, **kwargs: Any) -> None:
    if (runtime := _the_runtime()) is not None:
        runtime.sampling(runner, logits_output)


def _around_verify(run: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    return _runtimes[id(worker)].verify(lambda: run(worker, batch, *args, **kwargs), batch)


def _around_verified(run: Any, worker: Any, accepted: list[int], *args: Any, **kwargs: Any) -> Any:
    _runtimes[id(worker)].verified(lambda: run(worker, accepted, *args, **kwargs), accepted)


def _around_draft(run: Any, draft: Any, forward_batch: Any) -> Any:
    return _runtimes[id(draft)].probe.around_draft(lambda: run(draft, forward_batch))


def _around_extend_prefill(
    run: Any, draft: Any, batch: Any, hidden: Any, next_tokens: Any, *args: Any, **kwargs: Any
) -> Any:
    return _runtimes[id(draft)].read_prompt(
        lambda: run(draft, batch, hidden, next_tokens, *args, **kwargs), batch, next_tokens
    )


def _around_extend_decode(run: Any, draft: Any, batch: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
    return _runtimes[id(draft)].catch_up(lambda: run(draft, batch, result, *args, **kwargs), batch, result)


def _after_extend_graph(result: Any, *args: Any, **kwargs: Any) -> None:
    _the_runtime().saw_forward(lambda: result)


def _after_tree(result: Any, score_list: Any, *args: Any, **kwargs: Any) -> None:
    _the_runtime().saw_tree(score_list, result)


def _before_release(request: Any, *args: Any, **kwargs: Any) -> None:
    if (runtime := _the_runtime()) is not None:
        runtime.released(request)


def _around_steps(run: Any, params: Any, batch_size: int) -> int:
    depth: int = _the_runtime().steps_for(lambda: run(params, batch_size), batch_size)
    return depth


def _before_conversion(endpoint: Any, request: Any, raw_request: Any = None) -> None:
    """In SGLang's HTTP server, where a request still has its headers; what is raised here refuses it."""
    if raw_request is not None and (header := raw_request.headers.get(HEADER)) is not None:
        mark(request, header)
    # A router may have lost the header; the body has the same.
    if is_for_another_target(getattr(request, "custom_params", None), _target):
        from fastapi import HTTPException

        raise HTTPException(503, OTHER_TARGET)
