"""Everything of Slipstream inside one SGLang scheduler process, called by the hooks.

It is built before SGLang captures its graphs, started after it, and called at each step, each verification and each
end of a request. An error in one part turns that part off (`PartGuard`) and leaves SGLang's step alone, except where
several ranks must agree on the part.

Work that may wait has threads of its own: the draft follower stages versions, the assembler builds traces, the recorder
writes to Redis. Here nothing blocks.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import structlog
import torch

from serving.capture.recorder import ErasureWatch
from serving.hotswap.breaker import LiveWatch
from serving.hotswap.follower import DraftFollower
from serving.sglang.capture.pipeline import TracePipeline
from serving.sglang.capture.request import Origin
from serving.sglang.device import Device, device_layer
from serving.sglang.penalties import TreePenalties
from serving.sglang.plugin.checks import resolved, verification_of, version_of
from serving.sglang.plugin.part_guard import PartGuard, failed_parts
from serving.sglang.plugin.parts import depths_of, device_of, new_draft, new_probe, new_text, tensor_parallel_group
from serving.sglang.pointer import RankPointer, RankTarget, refuse_second
from serving.sglang.proposals.depth import DepthControl, DepthSwitchLogFilter
from serving.sglang.proposals.draft_sleep import DraftSleep
from serving.sglang.proposals.step_clock import StepClock
from serving.sglang.rank_agreement import Agreement
from serving.sglang.report import Fields, group_text_fields, speedup_fields, swap_fields
from serving.sglang.settings import PluginSettings, default_engine_id
from serving.speedup import ControlShare, SpeedupMeter
from speculator.draft.checkpoint import model_key
from speculator.redis.client import open_client
from speculator.redis.control_plane import DraftPointer, EndedGroups, EngineLoad, gpu_id
from speculator.redis.trace_deletion import ErasureOrders
from speculator.tracing import close_spans, configure_spans
from speculator.versions.store import DraftStore, Manifest

log = structlog.get_logger(__name__)
_STEP_LASTS_S = 2.0
"""Without another step for so long, the engine reports that no request runs."""


class EngineRuntime:
    """Slipstream in one scheduler process of SGLang: capture, swaps, depth, earlier text and reports, which the hooks
    call. Raises ConfigError or another SlipstreamError when the draft does not fit.
    """

    def __init__(self, worker: Any, settings: PluginSettings) -> None:
        self._worker = worker
        args, target = resolved(worker.server_args), worker.target_worker.model_runner
        group = tensor_parallel_group()
        self._is_writer = group.rank_in_group == 0
        manifest, store = version_of(args, settings), DraftStore(settings.store)
        self.random_seed = int(args.random_seed)
        """Drawn by SGLang at its start where nobody chose it, and the same on all ranks."""
        self._engine_id = settings.engine_id or default_engine_id(args.port)
        key = settings.model_key or model_key(Path(args.model_path), manifest.target_fingerprint)
        self._rank_pointer = RankPointer()
        depths = depths_of(worker)
        self._head_depth = worker.speculative_num_steps if settings.suffix_depth else max(depths)
        self._served = {
            # Without a served name, SGLang uses the path.
            "model": args.served_model_name or args.model_path,
            "context_length": target.model_config.context_len,
            # Earlier gateways do not start without it.
            "max_depth": max(depths),
            "heeds_seed": int(args.enable_deterministic_inference),
        }

        self._agreement = Agreement(group.cpu_group)
        alone = self._agreement.is_alone
        self._capturing = PartGuard("capture", off=self._stop_capture)
        # Where there are several ranks all must choose the same depth and exchange the same draft in the same step.
        self._choosing = PartGuard("depth", holds=alone)
        device = device_layer(device_of(worker))
        self._penalties = TreePenalties(device, lags=not args.disable_overlap_schedule)
        self.draft = new_draft(worker, store, manifest, device, alone=alone)
        self._remembering = PartGuard("text", off=self._stop_remembering)
        # All ranks must verify the same proposals from earlier text.
        self._splicing = PartGuard("splice", off=self._stop_text, holds=alone)
        # Swaps happen in meetings, so an error there ends them.
        self._meeting = PartGuard("swap", off=self.draft.close, holds=alone)
        # The probe's reads are recorded into every CUDA graph of the draft, so only capture has a probe.
        self.probe = new_probe(worker, depths) if settings.capture and self._is_writer else None
        self.meter = SpeedupMeter()
        # One rank watches; the others stage what it stages.
        watch = LiveWatch(manifest.version) if settings.watch and self._is_writer else None
        self.depth = self._new_depth(settings, depths, manifest, device, watch)
        self.text, self._splice = new_text(worker, settings, key, depths, device, is_writer=self._is_writer)
        self._depth_version = manifest.version
        self.steps = 0
        self._running, self._began_s = 0, 0.0
        """Requests of the last step, and when it began."""
        self._prefilling: Any = None
        """The batch of a prefill whose tokens SGLang has not sampled yet."""
        self._is_rejecting = verification_of(args) != "target_only"
        self._accept_index: torch.Tensor | None = None
        """The accepted path of the verification that is under way."""

        self._load = EngineLoad(gpu=gpu_id(device_of(worker)))
        self._traces: TracePipeline | None = None
        self._erasures: ErasureWatch | None = None
        self._pointer: DraftPointer | None = None
        self._ended_groups: EndedGroups | None = None
        if self._is_writer:
            configure_spans("slipstream-sglang")
            refuse_second(settings.redis_url, key, self._engine_id)
            client = open_client(settings.redis_url)
            self._pointer, self._ended_groups = DraftPointer(client, key), EndedGroups(client, key)
            if settings.capture:
                self._traces = self._new_traces(settings, key, manifest)
            forget = [] if self._traces is None else [self._traces.forget]
            forget += [] if self.text is None else [self.text.forget]
            self._erasures = ErasureWatch(ErasureOrders(client, key).orders, forget)
        self._target = RankTarget(self._on_target_update)
        # As --weight-version names them, or none.
        self._target.labelled(args.weight_version)
        self._follower = self._new_follower(settings, store, watch)
        log.info("slipstream: draft version in service", version=manifest.version, engine_id=self._engine_id, model=key)

    # -- called by the hooks, on the scheduler's thread -------------------------------------------------------------

    def start(self) -> None:
        """SGLang has captured its graphs: from now on another thread may use the device."""
        self._follower.start()
        atexit.register(self.close)

    def arrived(self, request: Any) -> None:
        """Handle a new request, before SGLang looks for its cached prefix."""
        self._choosing(self.depth.arrived, request)

    def step(self, run: Callable[[], Any], batch: Any) -> Any:
        """Run one `forward_batch_generation`; a staged draft comes into service before it."""
        with self.draft.stepping, self._load.stepping():
            return self._step(run, batch)

    def _step(self, run: Callable[[], Any], batch: Any) -> Any:
        self.steps += 1
        self._running, self._began_s = len(batch.reqs or ()), time.monotonic()
        if self._agreement.is_meeting(self.steps):
            self._meeting(self._meet)
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle():
            self._choosing(self.depth.interrupted, batch.reqs or ())
            if self.text is not None and not batch.forward_mode.is_idle():
                self._remembering(self.text.processed, batch.reqs)
            for request in batch.reqs or ():
                self._penalties.prefilled(request)
            self._prefilling = batch
            result = run()
            self._prefilling = None
            return result
        if self._splice is not None and not self._splicing.is_off and not batch.forward_mode.is_idle():
            found = None if self.text is None else self._remembering(self.text.find, batch.reqs)
            found = self._choosing(self._agreement.text, found, batch.reqs, self._splice.width)
            self._choosing(self.depth.found, found)
        self._choosing(self.depth.started)
        result = run()
        self._choosing(self._launched, batch)
        return result

    def sampling(self, runner: Any, output: Any) -> None:
        """Handle a pass of this runner that was launched, before SGLang samples from its logits."""
        batch, self._prefilling = self._prefilling, None
        if batch is not None and runner is self._worker.target_worker.model_runner:
            self._capturing(self._read_prefill, batch, output)

    def verify(self, run: Callable[[], Any], batch: Any) -> Any:
        before, seq_lens = self._capturing(self._before_verify, batch), batch.seq_lens
        result = run()
        if self._splice is not None and not batch.forward_mode.is_idle():
            self._splicing(self._splice.committed, batch.req_pool_indices, seq_lens, result.next_token_ids, ahead=1)
        accept_index, self._accept_index = self._accept_index, None
        if before is not None:
            self._capturing(self._after_verify, batch, before, result, accept_index)
        return result

    def walk(self, run: Callable[..., Any], verify_input: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run SGLang's walk down the tree of the verification that is under way."""
        # Without a guard: SGLang would go on with another text than the target's.
        result = self._penalties.around_sampling(run, verify_input, batch, *args, **kwargs)
        # The verification's own result has the accepted path only from SGLang 0.5.22.
        self._accept_index = result[2]
        return result

    def verified(self, run: Callable[[], Any], accepted: list[int]) -> None:
        self._capturing(self._verdict, accepted)
        # Our depth control replaces SGLang's own policy, which would switch the depth as well.
        if self._choosing.is_off:
            run()
        else:
            self._choosing(self.depth.verified, accepted)

    def processed(self, batch: Any) -> None:
        """Handle a step whose tokens SGLang has given to their requests."""
        if self.text is not None:
            self._remembering(self.text.processed, batch.reqs or ())

    def steps_for(self, run: Callable[[], int], batch_size: int) -> int:
        """The depth of the next decode step; SGLang's own choice where ours is off."""
        depth = self._choosing(self.depth.steps_for, batch_size)
        if depth is None:
            # For greater depths SGLang has prepared no passes of the draft.
            depth, plan = min(run(), self._head_depth), None
        else:
            plan = self.depth.plan
        if self._splice is not None:
            self._splice.leaves_out_passes = plan is not None and depth > 0 and not plan.uses_head
            if plan is None:
                self._splice.drop()
            else:
                self._splicing(self._splice.stage, plan, self.depth.text)
        return depth

    def propose(self, run: Callable[[], Any], batch: Any) -> Any:
        """Run the drafting of a step and put earlier text into its proposals, which SGLang then verifies."""
        if self._splice is None or batch.forward_mode.is_idle():
            return run()
        verify_input = self._splice.around_draft(run, self._worker.draft_worker)
        self._splicing(self._splice.splice, verify_input, batch)
        return verify_input

    def preparing(self, run: Callable[[], Any]) -> Any:
        """Let SGLang prepare the draft for a depth. One for earlier text alone gets a single pass: each pass takes
        memory.
        """
        draft = self._worker.draft_worker
        num_steps = draft.speculative_num_steps
        if num_steps <= self._head_depth:
            return run()
        draft.speculative_num_steps = 1
        try:
            return run()
        finally:
            draft.speculative_num_steps = num_steps

    def catch_up(self, run: Callable[[], Any], batch: Any, result: Any) -> Any:
        """Let the draft read the tokens that the step has committed, unless it gains nothing from them."""
        if self._choosing(self._skip_reading, batch, result):
            return None
        if self._is_headless:
            self._choosing(self.depth.committed)
        caught_up = run()
        self._capturing(self._on_extend, batch)
        return caught_up

    def read_prompt(self, run: Callable[[], Any], batch: Any, next_tokens: torch.Tensor) -> Any:
        """Let the draft read a prefill, unless it gains nothing from it."""
        if self._splice is not None and not batch.forward_mode.is_idle():
            self._splicing(self._splice.committed, batch.req_pool_indices, batch.seq_lens, next_tokens)
        unread = self._choosing(self._skip_prompt, batch, next_tokens)
        if unread is not None:
            return unread
        read = run()
        self._capturing(self._on_extend, batch)
        return read

    def drafting(self, run: Callable[[], Any], forward_batch: Any) -> Any:
        """Run the draft's passes of a round."""
        passes = run if self.probe is None else partial(self.probe.around_draft, run)
        if self._splice is None:
            return passes()
        return self._splice.around_passes(passes, self._worker.draft_worker, forward_batch)

    def on_forward(self, output: Callable[[], Any]) -> None:
        """Note a pass of the draft; `output` returns its `logits_output`."""
        if (probe := self.probe) is not None:
            self._capturing(lambda: probe.on_forward(output()))

    def on_tree(self, scores: list[torch.Tensor], organized: Any) -> None:
        if (probe := self.probe) is not None:
            self._capturing(lambda: probe.on_tree(scores, organized[1]))

    def released(self, request: Any) -> None:
        self._choosing(self.depth.released, request)
        self._penalties.released(request)
        if self._traces is not None:
            self._capturing(self._traces.capture.on_release, request)

    def target_updated(self, label: str | None) -> None:
        """Note new weights of the target, under this label if any."""
        self._target.updated(label, self.steps)

    @property
    def label(self) -> int:
        """The newest version that a label of the target's weights has named; 0 for none."""
        return self._target.label

    def target_labelled(self, label: str) -> None:
        """Note a label that came after the weights."""
        self._target.labelled(label)

    # -- guarded parts ----------------------------------------------------------------------------------------------

    def _launched(self, batch: Any) -> None:
        self.depth.launched(batch.reqs, self._worker.speculative_num_steps)

    def _read_prefill(self, batch: Any, output: Any) -> None:
        if self._traces is not None and batch.reqs and output.hidden_states is not None:
            self._traces.capture.read_prefill(batch, output.hidden_states, output.next_token_logits)

    def _before_verify(self, batch: Any) -> Mapping[str, Any] | None:
        if self._traces is None or batch.forward_mode.is_idle():
            return None
        return self._traces.capture.before_verify(batch)

    def _after_verify(self, batch: Any, before: Mapping[str, Any], result: Any, accept_index: Any) -> None:
        assert self._traces is not None
        text = None if self._splice is None else self._splice.rows
        self._traces.capture.after_verify(batch, before, result, accept_index, self.draft.draft_version, text)

    def _verdict(self, accepted: Sequence[int]) -> None:
        if self._traces is not None:
            self._traces.capture.verified(accepted)

    def _on_extend(self, batch: Any) -> None:
        if self.probe is not None and not batch.forward_mode.is_idle():
            self.probe.on_extend(batch.req_pool_indices)

    def _on_skip(self, batch: Any) -> None:
        if self.probe is not None and not batch.forward_mode.is_idle():
            self.probe.on_skip(batch.req_pool_indices)

    def _skip_reading(self, batch: Any, result: Any) -> bool:
        """Skip the draft's reading of this step's tokens where it gains nothing; returns whether it was skipped."""
        if not self._is_headless or not self.depth.needs_no_reading(batch.reqs or ()):
            return False
        self._stub_proposals(batch, result)
        return True

    def _skip_prompt(self, batch: Any, next_tokens: torch.Tensor) -> Any:
        """Skip the draft's reading of a prefill; returns the stub that replaces it, or None where the draft reads."""
        if batch.forward_mode.is_idle() or self.depth.reads_prompt_of(batch.reqs):
            return None
        from sglang.srt.speculative.eagle_info import EagleDraftInput

        unread = EagleDraftInput(bonus_tokens=next_tokens, num_tokens_per_req=1, num_tokens_for_logprob_per_req=1)
        self._stub_proposals(batch, SimpleNamespace(next_draft_input=unread))
        return unread

    def _stub_proposals(self, batch: Any, result: Any) -> None:
        """Put a stub in place of the draft's next proposals."""
        self._worker._stub_skipped_draft_extend(batch, result)
        self._capturing(self._on_skip, batch)
        if self._is_rejecting:
            # The stub's token was not drawn from the draft: with probability 0 it is rejected, and the target draws its
            # own.
            num_tokens = self._worker.target_worker.model_config.vocab_size
            stub = result.next_draft_input
            stub.draft_probs = torch.zeros(len(stub.topk_p), num_tokens, device=stub.topk_p.device)

    @property
    def _is_headless(self) -> bool:
        """Whether the step runs none of the draft's passes."""
        of_text = self._splice is not None and self._splice.leaves_out_passes
        return of_text or self._worker.speculative_num_steps == 0

    def _stop_text(self) -> None:
        self.depth.found(None)
        if self._splice is not None:
            self._splice.drop()

    def _stop_remembering(self) -> None:
        if self.text is not None:
            self.text.stop()

    def _stop_capture(self) -> None:
        if self._traces is not None:
            self._traces.capture.stop()

    def _meet(self) -> None:
        if not self._agreement.is_alone:
            self.depth.learn_times(self._agreement.times(self.depth.pop_times()))
            self._rank_pointer.wanted = self._agreement.first(self.draft.staged_version) or None
        if self._agreement.all_staged(self.draft.staged_version):
            self.draft.at_boundary(self.steps, self._agreement.all)
        if self.draft.draft_version != self._depth_version:
            self._depth_version = self.draft.draft_version
            self.depth.draft_changed(self._depth_version)

    def _on_target_update(self, version: int) -> None:
        self.depth.target_version = version
        if self.text is not None:
            self.text.target_updated(version)
        if self._traces is not None:
            self._traces.target_updated(version)

    # -- parts ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop following, assemble and write what is queued; the server is going down."""
        self.draft.close()
        self._follower.stop()
        if self.text is not None:
            self.text.close()
        if self._traces is not None:
            self._traces.close()
        close_spans()

    def _new_depth(
        self,
        settings: PluginSettings,
        depths: list[int],
        manifest: Manifest,
        device: Device,
        watch: LiveWatch | None,
    ) -> DepthControl:
        if self._worker.adaptive_controller is not None:
            logging.getLogger("sglang.srt.speculative.eagle_worker_v2").addFilter(DepthSwitchLogFilter())
        return DepthControl(
            depths,
            StepClock(device),
            self.meter,
            head_depth=self._head_depth,
            draft_sleep=DraftSleep(is_fresh=manifest.info.get("origin") == "fresh"),
            version=manifest.version,
            control=ControlShare(settings.control_share),
            plain_share=settings.plain_share,
            is_alone=self._agreement.is_alone,
            on_round=None if watch is None else watch.observe,
        )

    def _new_traces(self, settings: PluginSettings, key: str, manifest: Manifest) -> TracePipeline:
        assert self.probe is not None
        args = resolved(self._worker.server_args)
        return TracePipeline(
            settings,
            origin=Origin(self._engine_id, manifest.target_fingerprint, verification_of(args)),
            model_key=key,
            model_dir=Path(args.model_path),
            device=device_layer(device_of(self._worker)),
            probe=self.probe,
        )

    def _new_follower(self, settings: PluginSettings, store: DraftStore, watch: LiveWatch | None) -> DraftFollower:
        return DraftFollower(
            self.draft,
            self._rank_pointer if self._pointer is None else self._pointer,
            engine_id=self._engine_id,
            poll_s=settings.poll_s,
            status=self._status,
            watch=watch,
            lifecycle=store.lifecycle if self._is_writer else None,
        )

    # -- on the follower's thread -----------------------------------------------------------------------------------

    def _status(self) -> Fields:
        if self._pointer is None or self._ended_groups is None or self._erasures is None:
            return {}
        if self.text is not None:
            self.text.expire()
            for tenant, group_id in self._ended_groups.read():
                self.text.drop(tenant, group_id)
        return {
            "steps": self.steps,
            "running": self._running if time.monotonic() - self._began_s < _STEP_LASTS_S else 0,
            **self._load.report(),
            **self._served,
            **self._target.status(),
            **self._erasures.poll(),
            **failed_parts((self._capturing, self._choosing, self._remembering, self._splicing, self._meeting)),
            **({} if self.text is None else self.text.report()),
            **({} if self.text is None or self.text.sharing is None else group_text_fields(self.text.sharing.metrics)),
            **swap_fields(self._follower.log),
            **self.depth.report(),
            **speedup_fields(self.meter.measure(), self.depth.end_to_end.measure()),
            **({} if self._traces is None else self._traces.status()),
        }
