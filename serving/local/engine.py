"""The local engine: one thread that installs drafts, admits, prefills and decodes; other threads queue work for it.

Its loop waits on the `Inbox` for a request, a staged draft or target, a task, or the stop. When it is behind, up to
`max_waiting` requests queue and further ones are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import replace
from pathlib import Path

import structlog
import torch
from torch import Tensor

from serving.acceptance import AcceptanceByLength
from serving.answer_text import AnswerText
from serving.capture.sampling import BranchSampler
from serving.engine import Chunk, EngineHealth, EngineInfo, GenerateRequest, SwapReport, TargetReport, WatchedRound
from serving.group_cache.sync import GroupSharing
from serving.local.capture import LocalCapture
from serving.local.config import LocalEngineConfig, spare_cores
from serving.local.decode.proposer import RecentTexts, SuffixCacheTask
from serving.local.decode.rounds import RoundRunner
from serving.local.draft import ServingDraft
from serving.local.kernels.library import set_num_threads
from serving.local.request import ActiveRequest
from serving.local.scheduler.queue import Arrived, Inbox, Outbox
from serving.local.scheduler.step_loop import DecodeLoop, RoundObserver
from serving.local.target.loading import load_tokenizer
from serving.local.target.model import Target
from serving.metrics import EngineMetrics
from serving.speedup import AbSpeedup, EstimatedSpeedup, SpeedupMeter
from speculator.draft.eagle3 import Eagle3Draft
from speculator.errors import EngineDeadError, RequestError, TargetError
from speculator.proposals.planner import RoundPlanner
from speculator.proposals.suffix_drafter import SuffixDrafter
from speculator.redis.control_plane import EngineLoad, gpu_id
from speculator.trace import Trace
from speculator.tracing import current, span

log = structlog.get_logger(__name__)


class LocalEngine:
    """Implements `serving.engine.Engine` over a Hugging Face model directory.

    The engine owns `draft` and changes its weights in place. `on_trace` receives each finished trace, `on_round` each
    round's figures for the draft's trial; neither may block. `planner` and `inbox` replace the engine's own.
    `load_draft` reads and verifies a stored version; it raises DraftError or StoreError.
    `sharing` exchanges the text of prompt groups with other engines. `load` measures how busy the engine is.
    """

    def __init__(
        self,
        config: LocalEngineConfig,
        *,
        target: Target,
        draft: Eagle3Draft,
        draft_version: int,
        target_fingerprint: str,
        load_draft: Callable[[int], dict[str, Tensor]],
        metrics: EngineMetrics,
        meter: SpeedupMeter,
        on_trace: Callable[[Trace], object] | None = None,
        on_round: Callable[[WatchedRound], object] | None = None,
        planner: RoundPlanner | None = None,
        sharing: GroupSharing | None = None,
        inbox: Inbox | None = None,
    ) -> None:
        self._config, self._target, self._load_draft = config, target, load_draft
        self.metrics, self._captures, self._sharing = metrics, on_trace is not None, sharing
        self.tokenizer = load_tokenizer(config.model_dir, vocab_size=target.embed.shape[0])
        cache_length = target.cache.length
        self._draft = ServingDraft(draft, draft_version, num_slots=config.num_slots, length=cache_length)
        planner = self._planner = planner or RoundPlanner(max_depth=config.max_depth)
        self._inbox, self._outbox = inbox or Inbox(config.max_waiting), Outbox()
        self.load = EngineLoad(gpu=gpu_id(target.device))
        self.capture = LocalCapture(
            config, target, on_trace or (lambda _: None), target_fingerprint=target_fingerprint, metrics=metrics
        )
        self.texts = RecentTexts(SuffixDrafter() if config.suffix_depth else None, sharing, metrics)
        self._observer = RoundObserver(metrics, meter, on_round)
        self._loop = DecodeLoop(
            config,
            inbox=self._inbox,
            target=target,
            draft=self._draft,
            planner=planner,
            texts=self.texts,
            runner=RoundRunner(
                config,
                target,
                self._draft,
                planner,
                label=self.capture.label,
                send=self._outbox.send,
                branches=BranchSampler(config.branch_share, over_budget=metrics.branch_rows.labels("budget").inc),
            ),
            capture=self.capture,
            observer=self._observer,
            metrics=metrics,
            load=self.load,
        )
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        metrics.depth.set(config.depth)
        metrics.draft_version.set(draft_version)

    # -- the Engine protocol ------------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            model=self._config.model_name,
            context_length=self._target.context_length,
            num_slots=self._config.num_slots,
        )

    @property
    def estimated_speedup(self) -> EstimatedSpeedup:
        return self._observer.estimated_speedup

    @property
    def end_to_end(self) -> AbSpeedup:
        return self._loop.end_to_end

    @property
    def head_ab(self) -> AbSpeedup:
        return self._loop.head_ab

    @property
    def acceptance_by_length(self) -> AcceptanceByLength:
        return self._observer.by_length

    @property
    def draft_version(self) -> int:
        return self._draft.version

    @property
    def is_head_asleep(self) -> bool:
        """Whether the planner has not used the draft head lately."""
        return not self._planner.is_awake

    @property
    def target_version(self) -> int:
        return self._loop.target_version

    def health(self) -> EngineHealth:
        alive = self._thread.is_alive() and self._failure is None
        detail = "" if self._failure is None else type(self._failure.__cause__ or self._failure).__name__
        return EngineHealth(
            alive=alive,
            ready=alive and not self._inbox.is_closed,
            num_running=self._loop.num_running,
            num_waiting=self._inbox.num_waiting,
            is_full=self._inbox.is_full,
            detail=detail,
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        loop = asyncio.get_running_loop()
        arrived: Arrived = asyncio.Queue()
        prompt, grammar = request.prompt_token_ids, None
        if request.grammar:
            # In a thread: the first grammar needs half a second for the vocabulary.
            grammar = await asyncio.to_thread(lambda: self.tokenizer.grammar_vocabulary.matcher(request.grammar))
        generation = ActiveRequest(
            request,
            # The prompt's last tokens may belong to the answer.
            AnswerText(self.tokenizer, request.stop, begun=prompt[len(prompt) - request.num_answered :]),
            # The engine's thread, which also changes the target, calls this: the version is exact.
            lambda chunk: self._outbox.put(loop, arrived, replace(chunk, target_version=self._loop.target_version)),
            self.tokenizer.end_token_ids,
            capture=self._captures and request.policy.capture,
            grammar=grammar,
            parent=current(),
        )
        self._submit(generation)
        finished = False
        try:
            while not finished:
                chunk = await arrived.get()
                finished = chunk.finish_reason is not None
                if chunk.finish_reason == "abort":
                    if grammar is not None and grammar.fault:
                        raise RequestError(f"the answer's grammar became too complex: {grammar.fault}")
                    raise EngineDeadError("the engine stopped during this answer")
                yield chunk
        finally:
            # The client may have left at any await above: the engine's thread frees the slot at its next step.
            generation.aborted = not finished

    def install_draft(self, version: int) -> SwapReport:
        try:
            with span("stage", version=version):
                staged = self._draft.stage(version, self._load_draft(version))
            with span("install", version=version):
                return self._inbox.add_task(lambda: self._loop.install_draft(staged)).result()
        except Exception:
            self.metrics.swaps.labels("failed").inc()
            raise

    def update_target(self, version: int, folder: Path | None) -> TargetReport:
        if folder is None:
            raise RequestError("this engine needs the path of the new weights", param="path")
        if version == self.target_version:
            raise TargetError(f"version {version} is in service already: send new weights as a newer one")
        with span("stage_target", version=version):
            staged = self._target.stage(folder)
        return self._inbox.add_task(lambda: self._loop.install_target(version, staged)).result()

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.capture.start()
        self._thread.start()

    def stop(self) -> None:
        """End after the current step; requests in flight finish with an error, finished ones leave their trace."""
        self._inbox.close()
        if self._thread.ident is not None:
            self._thread.join()
        self.capture.close()

    def _run(self) -> None:
        num_threads = self._config.num_threads or spare_cores()
        set_num_threads(num_threads)
        # With kernels, PyTorch's operations between two passes are too small to be worth a second thread.
        torch.set_num_threads(1 if self._target.takes_windows else num_threads)
        try:
            self._loop.run()
        except BaseException as error:
            self._failure = error
            log.exception("engine failed")
        finally:
            try:
                self._inbox.end_all()
                self._loop.end()
            finally:
                self._outbox.send()

    def _submit(self, generation: ActiveRequest) -> None:
        request = generation.request
        limit = self._target.context_length
        if not request.prompt_token_ids or len(request.prompt_token_ids) + request.max_tokens > limit:
            raise RequestError(f"prompt and max_tokens must fit {limit} tokens", param="max_tokens")
        vocab_size = self._target.embed.shape[0]
        if not all(0 <= token < vocab_size for token in request.prompt_token_ids):
            raise RequestError(f"token ids must lie in 0…{vocab_size - 1}", param="prompt")
        self._inbox.submit(generation)

    # -- text that is kept for suffix drafts ------------------------------------------------------------------------

    def forget(self, tenants: Collection[str]) -> None:
        """Drop the text of these tenants between two steps; returns when that is done and their traces delivered."""
        self._change_texts(lambda drafter: drafter.forget(tenants), wait=True)
        # The calling thread also sends reports, and cannot wait for the distributions of 64 prompt chunks.
        self.capture.cancel_labels()
        self.capture.drain()

    def expire(self, ttl_s: float) -> None:
        """Drop text that may be older than `ttl_s`, between two steps; returns when it is done."""
        self._change_texts(lambda drafter: drafter.expire(ttl_s), wait=True)

    def drop_group_text(self, tenant: str, group_id: str) -> None:
        """Drop the text of an ended prompt group: here before the next step, and in Redis. Does not wait."""
        if self._sharing is not None:
            self._sharing.drop(tenant, group_id)
        self._change_texts(lambda drafter: drafter.drop(tenant, group_id), wait=False)

    def _change_texts(self, task: SuffixCacheTask, *, wait: bool) -> None:
        # A stopped engine keeps no text.
        with contextlib.suppress(EngineDeadError):
            if self._thread.is_alive():
                done = self._inbox.add_task(lambda: self.texts.change(task))
                if wait:
                    done.result()
