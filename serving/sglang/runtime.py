"""Everything of Slipstream inside one SGLang scheduler process: built before SGLang captures its graphs, then called at
each step, each verification and each end of a request.

What may wait is elsewhere: the draft follower stages versions on its own thread, the assembler builds traces on its
own, the recorder writes to Redis on its own. Here nothing blocks.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from serving.forgetting import ErasureWatch
from serving.hotswap import DraftFollower
from serving.personal import PersonalData
from serving.recorder import TraceRecorder
from serving.sampler import CaptureSampler
from serving.sglang.agreement import Agreement
from serving.sglang.budget import ByteBudget
from serving.sglang.capture import Capture
from serving.sglang.checks import version_of
from serving.sglang.clock import StepClock
from serving.sglang.depth import DepthControl, QuietSwitches
from serving.sglang.dormancy import Dormancy
from serving.sglang.pointer import LazyPointer, RankPointer
from serving.sglang.probe import DraftProbe
from serving.sglang.settings import PluginSettings, default_engine_id
from serving.sglang.swap import SglangDraft
from serving.speedup import ControlShare, SpeedupMeter
from serving.target_guard import TargetGuard
from serving.watch import LiveWatch
from speculator.checkpoint import config_from_json, expected_shapes, model_key
from speculator.codec import Features
from speculator.depth import DepthPolicy, RoundCosts
from speculator.errors import ConfigError
from speculator.pulse import Pulse
from speculator.redis_client import connect
from speculator.spans import close_spans, configure_spans
from speculator.store import DraftStore
from speculator.stream import TraceStream

log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0
_STEP_LASTS_S = 2.0
"""After so long without another step nothing runs, or a long prompt is being read."""
_LINGER_S = 0.03
"""SGLang asks for its next step at once while it has any: after so long it has none."""
_SWITCH_INTERVAL_S = 0.0005


class EngineRuntime:
    """Belongs to one `EAGLEWorkerV2`. Raises ConfigError or another SlipstreamError when the draft does not fit."""

    def __init__(self, worker: Any, settings: PluginSettings) -> None:
        self._worker = worker
        args = worker.server_args
        runner, target = worker.draft_worker.draft_runner, worker.target_worker.model_runner
        device = next(target.model.parameters()).device
        group = _tensor_parallel_group()
        self._is_writer = group.rank_in_group == 0
        manifest = version_of(args, settings)
        self._engine_id = engine_id = settings.engine_id or default_engine_id(args.port)
        store = DraftStore(settings.store)
        key = settings.model_key or model_key(Path(args.model_path), manifest.target_fingerprint, store.lineage)
        config = config_from_json(store.config(manifest.version))

        depths = self._depths()
        self._agreement = Agreement(group.cpu_group, depths)
        self.draft = SglangDraft(
            runner.model,
            manifest.version,
            partial(
                store.load,
                expected_fingerprint=manifest.target_fingerprint,
                expected_d2t=store.load(manifest.version)["d2t"],
                expected_shapes=expected_shapes(config),
            ),
            alone=self._agreement.is_alone,
        )
        self._guard = TargetGuard(
            partial(_weights, target.model), on_change=self._distrust_traces, on_renewal=self._trust_traces
        )
        self._is_target_unchanged = True
        """On all ranks together, each of which guards its share of the weights; as of the last meeting."""
        self._process = f"{socket.gethostname()}:{os.getpid()}"
        self._announced = self._target_version = 0
        self._is_listening = False
        """Whether announcements are for this process: a container that starts again often has its old host and pid."""
        num_slots = worker.req_to_token_pool.req_to_token.shape[0]
        self.probe = DraftProbe(
            num_slots=num_slots,
            # Graphs are captured for batches that are padded beyond the number of requests.
            max_batch=2 * num_slots,
            max_proposals=max(*depths, worker.speculative_num_draft_tokens - 1),
            topk=args.speculative_eagle_topk or 1,
            device=device,
        )
        self.meter = SpeedupMeter()
        policy = None
        if worker.adaptive_controller is not None:
            policy = DepthPolicy(depths)
            logging.getLogger("sglang.srt.speculative.eagle_worker_v2").addFilter(QuietSwitches())
        # One rank watches; the others stage what it stages.
        self._watch = LiveWatch(manifest.version) if settings.watch and self._is_writer else None
        self.depth = DepthControl(
            policy,
            StepClock(device),
            self.meter,
            dormancy=Dormancy(is_fresh=manifest.info.get("origin") == "fresh"),
            version=manifest.version,
            control=ControlShare(settings.control_share),
            measured=None if self._agreement.is_alone else RoundCosts(),
            on_round=None if self._watch is None else self._watch.observe,
        )
        self._depth_version = manifest.version
        self.steps = 0
        self._running, self._began_s = 0, 0.0
        """Requests of the last step, and when it began."""
        self._served = {
            # Without a name of its own it goes by the path.
            "model": args.served_model_name or args.model_path,
            "context_length": target.model_config.context_len,
            "max_depth": max(depths),
        }

        self._pointer = LazyPointer(settings.redis_url, key)
        self._rank_pointer = RankPointer()
        self._erasures = ErasureWatch(self._pointer.orders, [])
        self._recorder: TraceRecorder | None = None
        self._capture: Capture | None = None
        self._pulse: Pulse | None = None
        if self._is_writer:
            configure_spans("slipstream-sglang")
            self._pointer.refuse_second(engine_id)
            if settings.pulse_dir:
                self._pulse = Pulse(Path(settings.pulse_dir), linger_s=_LINGER_S)
            if settings.capture:
                self._start_capture(settings, engine_id, key, manifest.target_fingerprint, device)
        self._follower = DraftFollower(
            self.draft,
            self._pointer if self._is_writer else self._rank_pointer,
            engine_id=engine_id,
            poll_s=settings.poll_s,
            on_swap=lambda report: self._guard.look(),
            status=self._status,
            watch=self._watch,
            lifecycle=store.lifecycle if self._is_writer else None,
            # Of a tensor-parallel group the first rank stands for the engine.
            fleet=self._pointer if self._is_writer else None,
        )
        self._follower.start()
        atexit.register(self.close)
        log.info("slipstream: draft version %d in service, engine %s, model %s", manifest.version, engine_id, key)

    # -- called by the hooks, on the scheduler's thread -------------------------------------------------------------

    def step(self, run: Callable[[], Any], batch: Any) -> Any:
        """One `forward_batch_generation`: at its boundary a staged draft comes into service."""
        with self.draft.stepping:
            if self._pulse is None:
                return self._step(run, batch)
            self._pulse.beat()
            self._pulse.about(len(batch.reqs), _num_tokens(batch))
            try:
                return self._step(run, batch)
            finally:
                self._pulse.rest()

    def _step(self, run: Callable[[], Any], batch: Any) -> Any:
        self.steps += 1
        self._running, self._began_s = len(batch.reqs or ()), time.monotonic()
        if self._agreement.is_meeting(self.steps):
            self._meet()
        is_decode = not (batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle())
        if not is_decode:
            return run()
        self.depth.started()
        result = run()
        self.depth.launched(batch.reqs, self._worker.speculative_num_steps)
        return result

    def prefill(self, run: Callable[[], Any], batch: Any) -> Any:
        result = run()
        output = result.logits_output
        if self._capture is not None and batch.reqs and output is not None and output.hidden_states is not None:
            self._capture.after_prefill(batch, output.hidden_states, output.next_token_logits)
        return result

    def verify(self, run: Callable[[], Any], batch: Any) -> Any:
        if self._capture is None or batch.forward_mode.is_idle():
            return run()
        before = self._capture.before_verify(batch)
        result = run()
        self._capture.after_verify(batch, before, result, self.draft.draft_version)
        return result

    def catch_up(self, run: Callable[[], Any], batch: Any, result: Any) -> Any:
        """The draft reads what the step has committed, unless it sleeps."""
        if self.depth.is_asleep and self._worker.speculative_num_steps == 0:
            self._worker._stub_skipped_draft_extend(batch, result)
            return None
        caught_up = run()
        if not batch.forward_mode.is_idle():
            self.probe.saw_extended(batch.req_pool_indices)
        return caught_up

    def read_prompt(self, run: Callable[[], Any], batch: Any, next_tokens: torch.Tensor) -> Any:
        """The draft reads what a prefill has computed, unless there is nothing to gain from it."""
        is_idle = batch.forward_mode.is_idle()
        if not is_idle and not self.depth.reads_prompt_of(batch.reqs):
            return self._unread(batch, next_tokens)
        read = run()
        if not is_idle:
            self.probe.saw_extended(batch.req_pool_indices)
        return read

    def _unread(self, batch: Any, next_tokens: torch.Tensor) -> Any:
        from sglang.srt.speculative.eagle_info import EagleDraftInput

        unread = EagleDraftInput(bonus_tokens=next_tokens, num_tokens_per_req=1, num_tokens_for_logprob_per_req=1)
        self._worker._stub_skipped_draft_extend(batch, SimpleNamespace(next_draft_input=unread))
        return unread

    def released(self, request: Any) -> None:
        if self._capture is not None:
            self._capture.on_release(request)

    # -- parts ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop following, assemble and write what is queued; the server is going down."""
        self.draft.close()
        self._follower.stop()
        if self._capture is not None and self._recorder is not None:
            self._capture.close(_CLOSE_TIMEOUT_S)
            self._recorder.close(_CLOSE_TIMEOUT_S)
        if self._pulse is not None:
            self._pulse.close()
        close_spans()

    def _depths(self) -> list[int]:
        controller = self._worker.adaptive_controller
        depths = controller.candidate_steps if controller is not None else [self._worker.speculative_num_steps]
        if controller is not None and 0 not in depths:
            raise ConfigError("--speculative-adaptive-config has no candidate 0: add it, the baseline needs it")
        return list(depths)

    def _start_capture(
        self, settings: PluginSettings, engine_id: str, key: str, fingerprint: str, device: torch.device
    ) -> None:
        ttl_s = 3600 * settings.trace_ttl_hours
        model_dir = Path(self._worker.server_args.model_path)

        def open_stream() -> TraceStream:
            client = connect(settings.redis_url)
            return TraceStream(client, key, max_bytes=settings.stream_max_bytes, ttl_s=ttl_s)

        # The assembler's thread must not keep the scheduler's waiting for the interpreter, by default up to 5 ms.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        budget = ByteBudget(settings.capture_bytes_per_s)
        sampler = None
        if settings.capture_floor < 1:
            sampler = CaptureSampler(open_stream, floor=settings.capture_floor, follows_all=False)
        recorder = TraceRecorder(
            open_stream,
            max_buffer_bytes=settings.buffer_bytes,
            features=cast("Features", settings.capture_features),
            on_append=budget.spend,
            reason_to_drop=PersonalData.of_model(model_dir).reason if settings.drop_personal_data else None,
            ttl_s=ttl_s,
            sampler=sampler,
        )
        self._recorder = recorder
        self._erasures = ErasureWatch(self._pointer.orders, [recorder.forget])
        self._capture = Capture(
            settings,
            engine_id=engine_id,
            target_fingerprint=fingerprint,
            device=device,
            probe=self.probe,
            budget=budget,
            sampler=sampler,
            on_trace=recorder.submit,
        )

    def _meet(self) -> None:
        if not self._agreement.is_alone:
            self.depth.adopt(self._agreement.costs(self.depth.measured))
            self._rank_pointer.wanted = self._agreement.first(self.draft.staged_version) or None
            self._agree_on_target()
        if self._agreement.all_staged(self.draft.staged_version):
            self.draft.at_boundary(self.steps)
        if self.draft.draft_version != self._depth_version:
            self._depth_version = self.draft.draft_version
            self.depth.renewed(self._depth_version)

    def _agree_on_target(self) -> None:
        self._announced = max(self._announced, self._agreement.first(self._announced))
        was_unchanged = self._is_target_unchanged
        # A rank that has just heard of a new target takes its weights for the right ones at its next look.
        is_expected = self._announced > self._target_version
        self._is_target_unchanged = self._agreement.all(self._guard.is_unchanged or is_expected)
        if was_unchanged and not self._is_target_unchanged:
            log.critical("the target's weights have changed on one rank: the text can no longer be trusted, restart")
            self._distrust_traces()
        elif self._is_target_unchanged and not was_unchanged:
            self._trust_traces()

    # -- on the follower's thread -----------------------------------------------------------------------------------

    def _distrust_traces(self) -> None:
        if self._recorder is not None:
            self._recorder.distrust()

    def _trust_traces(self) -> None:
        if self._recorder is not None:
            self._recorder.trust()

    def _follow_target(self) -> None:
        """SGLang's target has been moved by whoever announces it: its weights are the right ones from now on.

        Rank 0 reads the announcement; the others hear of it at a meeting.
        """
        if self._is_writer:
            if not self._is_listening:
                # Before the first report, and so before anybody can mean this process.
                self._pointer.withdraw_announcement(self._process)
                self._is_listening = True
            self._announced = max(self._announced, self._pointer.announced_target(self._process) or 0)
        announced = self._announced
        if announced > self._target_version:
            self._guard.move(partial(self._take_target, announced))
            log.info("slipstream: the target is of version %d now", announced)

    def _take_target(self, version: int) -> None:
        self._target_version = self.depth.target_version = version
        if self._capture is not None:
            self._capture.target_version = version

    def _status(self) -> dict[str, str | int | float]:
        # Before Redis is asked, which may be away for long.
        is_unchanged = self._guard.look_at_times()
        self._follow_target()
        self.depth.limit = self._pointer.depth_limit(self._engine_id)
        swaps, speedup = self._follower.log, self.meter.measure()
        status: dict[str, str | int | float] = {
            "swaps": swaps.num_installed,
            "swap_failures": swaps.num_failed,
            "steps": self.steps,
            "depth": self.depth.depth,
            "asleep": int(self.depth.is_asleep),
            "verifications": self.depth.num_verifications,
            "verified_tokens": self.depth.num_verified_tokens,
            "target_ok": int(is_unchanged and self._is_target_unchanged),
            "target_version": self._target_version,
            "process": self._process,
            "running": self._running if time.monotonic() - self._began_s < _STEP_LASTS_S else 0,
            **self._served,
            **self._erasures.look(),
        }
        status |= self.depth.explanation() | self.depth.tally.report()
        if swaps.installed:
            status["last_stall_ms"] = round(swaps.installed[-1][1].stall_ms, 3)
        if self.depth.num_verifications:
            status["accept_length"] = round(self.depth.num_verified_tokens / self.depth.num_verifications, 4)
        if speedup.ratio is not None and speedup.baseline_ms_per_token is not None:
            status["speedup"] = round(speedup.ratio, 4)
            status["baseline_ms_per_token"] = round(speedup.baseline_ms_per_token, 4)
        if speedup.lower is not None and speedup.upper is not None:
            status |= {"speedup_lower": round(speedup.lower, 4), "speedup_upper": round(speedup.upper, 4)}
        if (estimate := self.depth.estimated_speedup.ratio()) is not None:
            status["speedup_estimated"] = round(estimate, 4)
        if self._recorder is not None and self._capture is not None:
            stats = self._recorder.stats()
            dropped = Counter(stats.dropped_by_reason) + self._capture.dropped
            status |= {
                "captured": stats.captured,
                "appended": stats.appended,
                "pending": stats.pending,
                "dropped": stats.dropped + sum(self._capture.dropped.values()),
                "dropped_by_reason": ",".join(f"{reason}={count}" for reason, count in sorted(dropped.items())),
                "trace_bytes": stats.bytes_appended,
                "trace_tokens": stats.tokens_appended,
                "capture_share": round(stats.share, 4),
            }
        return status


def _num_tokens(batch: Any) -> int:
    """New ones: of the prompts where it reads any, else the pending token of each request."""
    return int(batch.extend_num_tokens or 0) if batch.forward_mode.is_extend() else len(batch.reqs)


def _weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter for _, parameter in sorted(model.named_parameters())]


def _tensor_parallel_group() -> Any:
    from sglang.srt.distributed.parallel_state import get_tp_group

    return get_tp_group()
