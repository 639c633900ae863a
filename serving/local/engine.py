"""The local engine: one thread that installs drafts, admits, prefills and decodes; everything else hands it work.

What its loop waits for: a request, a staged draft, or the stop. What unblocks it: `_wake`. When it is behind, requests
queue up to `max_waiting` and are then refused; nothing inside a step ever waits for Redis, the disk or a client.

Order of slots: running requests fill 0…n−1; the one request that is being prefilled, if any, sits in slot n.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
import torch
from torch import Tensor

from serving.engine import Chunk, EngineHealth, EngineInfo, GenerateRequest, SwapReport, TargetReport
from serving.estimate import PlannedSpeedup
from serving.evidence import WatchedRound
from serving.group_text import GroupSharing
from serving.local.capture import build_trace, span_of
from serving.local.config import LocalEngineConfig
from serving.local.draft import ServingDraft, StagedDraft
from serving.local.generation import Generation
from serving.local.moving import StagedTarget
from serving.local.proposer import Planner
from serving.local.rounds import RoundRunner
from serving.local.siblings import longest_prefix
from serving.local.target import Target
from serving.local.telling import Round, RoundTeller
from serving.local.text import AnswerText, LocalTokenizer
from serving.metrics import EngineMetrics
from serving.speedup import ControlShare, SpeedupMeter
from speculator.errors import EngineBusyError, EngineDeadError, RequestError
from speculator.group_store import GroupKey
from speculator.model import Eagle3Draft
from speculator.planner import FixedPlanner, RoundPlanner
from speculator.pulse import Pulse
from speculator.spans import current, record, span
from speculator.suffix import SuffixDrafter, SuffixRequest
from speculator.trace import Trace

log = structlog.get_logger(__name__)

LoadDraft = Callable[[int], dict[str, Tensor]]
"""Reads and verifies a stored version; raises DraftError or StoreError."""


@dataclass(frozen=True)
class _Swap:
    staged: StagedDraft
    report: Future[SwapReport]


@dataclass(frozen=True)
class _Move:
    version: int
    staged: StagedTarget
    report: Future[TargetReport]


class LocalEngine:
    """Implements `serving.engine.Engine` over a Hugging Face model directory.

    `draft` is taken over: its weights change in place. `on_trace` receives each finished trace, `on_round` what every
    round says about the draft; neither may block. `planner` takes the place of the one that the settings ask for.
    `sharing` brings the text of prompt groups to other engines, and theirs here; `pulse` tells a trainer on the same
    machine when the engine computes.

    When the target moves, a running answer goes on under the new weights with the keys and values of the old: as in a
    partial rollout, it was begun under one policy and is ended under another. Its trace ends where the change came, so
    no trace has labels of two targets. A prompt that is only being read is read anew.
    """

    def __init__(
        self,
        config: LocalEngineConfig,
        *,
        target: Target,
        draft: Eagle3Draft,
        draft_version: int,
        target_fingerprint: str,
        load_draft: LoadDraft,
        metrics: EngineMetrics,
        meter: SpeedupMeter,
        on_trace: Callable[[Trace], object] | None = None,
        on_round: Callable[[WatchedRound], object] | None = None,
        planner: Planner | None = None,
        sharing: GroupSharing | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        self._config = config
        self._target = target
        self._tokenizer = LocalTokenizer(config.model_dir)
        cache_length = target.cache.keys.shape[3]
        self._draft = ServingDraft(draft, draft_version, num_slots=config.num_slots, length=cache_length)
        self._planner = planner or _planner(config)
        self._suffixes = SuffixDrafter() if config.suffix_depth else None
        self._sharing = sharing
        self._runner = RoundRunner(
            target,
            self._draft,
            self._planner,
            suffix_depth=config.suffix_depth,
            capture_topk=config.capture_topk,
            prompt_labels=config.prompt_labels,
        )
        self._fingerprint, self._load_draft = target_fingerprint, load_draft
        self.metrics, self._on_trace = metrics, on_trace
        self._teller = RoundTeller(metrics, meter, on_round)
        self._control = ControlShare(config.control_share)
        self._depth = config.depth
        self._target_version = 0
        self._num_steps = 0
        self._pulse, self._step_tokens = pulse, 0
        self._running: list[Generation] = []
        self._prefilling: Generation | None = None
        # Shared with other threads, under `_wake`:
        self._wake = threading.Condition()
        self._waiting: deque[Generation] = deque()
        self._swap: _Swap | None = None
        self._move: _Move | None = None
        self._errands: deque[tuple[Callable[[SuffixDrafter], None], Future[None]]] = deque()
        self._stopping = False
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
            max_depth=self._config.max_depth,
            num_slots=self._config.num_slots,
        )

    @property
    def tokenizer(self) -> LocalTokenizer:
        return self._tokenizer

    @property
    def estimated_speedup(self) -> PlannedSpeedup:
        return self._teller.estimated_speedup

    @property
    def draft_version(self) -> int:
        return self._draft.version

    @property
    def target_version(self) -> int:
        return self._target_version

    def health(self) -> EngineHealth:
        alive = self._thread.is_alive() and self._failure is None
        detail = "" if self._failure is None else type(self._failure).__name__
        return EngineHealth(
            alive=alive,
            ready=alive and not self._stopping,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            is_full=len(self._waiting) >= self._config.max_waiting,
            detail=detail,
        )

    def set_depth(self, depth: int) -> None:
        if not 0 <= depth <= self._config.max_depth:
            raise RequestError(f"depth {depth} is not in 0…{self._config.max_depth}", param="depth")
        self._depth = depth
        self.metrics.depth.set(depth)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Chunk] = asyncio.Queue()
        generation = Generation(
            request,
            AnswerText(self._tokenizer, request.stop, begun=_begun(request)),
            # Called between two moves of the target, by the thread that moves it.
            lambda chunk: _hand_over(loop, arrived, replace(chunk, target_version=self._target_version)),
            self._target.eos_token_ids,
            capture=self._on_trace is not None and request.policy.capture,
            parent=current(),
        )
        self._submit(generation)
        finished = False
        try:
            while not finished:
                chunk = await arrived.get()
                finished = chunk.finish_reason is not None
                if chunk.finish_reason == "abort":
                    raise EngineDeadError("the engine stopped during this answer")
                yield chunk
        finally:
            # The client may have left at any await above: the engine's thread frees the slot at its next step.
            generation.aborted = not finished

    def install_draft(self, version: int) -> SwapReport:
        try:
            with span("stage", version=version):
                swap = _Swap(self._draft.stage(version, self._load_draft(version)), Future())
            with span("install", version=version):
                with self._wake:
                    self._refuse_if_dead()
                    self._swap = swap
                    self._wake.notify()
                return swap.report.result()
        except Exception:
            self.metrics.swaps.labels("failed").inc()
            raise

    def move_target(self, version: int, folder: Path | None) -> TargetReport:
        if folder is None:
            raise RequestError("this engine needs the path of the new weights", param="path")
        with span("stage_target", version=version):
            move = _Move(version, self._target.stage(folder), Future())
        with self._wake:
            self._refuse_if_dead()
            if self._move is not None:
                raise EngineBusyError("the target is being moved already")
            self._move = move
            self._wake.notify()
        return move.report.result()

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the current step; requests in flight finish with an error."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _submit(self, generation: Generation) -> None:
        request = generation.request
        limit = self._target.context_length
        if not request.prompt_token_ids or len(request.prompt_token_ids) + request.max_tokens > limit:
            raise RequestError(f"prompt and max_tokens must fit {limit} tokens", param="max_tokens")
        vocab_size = self._target.embed.shape[0]
        if not all(0 <= token < vocab_size for token in request.prompt_token_ids):
            raise RequestError(f"token ids must lie in 0…{vocab_size - 1}", param="prompt")
        with self._wake:
            self._refuse_if_dead()
            if len(self._waiting) >= self._config.max_waiting:
                raise EngineBusyError(f"{len(self._waiting)} requests are waiting already")
            self._waiting.append(generation)
            self._wake.notify()

    def _refuse_if_dead(self) -> None:
        if self._stopping or self._failure is not None:
            raise EngineDeadError("the engine has stopped")

    # -- text that is kept for suffix drafts ------------------------------------------------------------------------

    def forget(self, tenants: Collection[str]) -> None:
        """Drop the text of these tenants, between two steps; returns when it is done."""
        self._between_steps(lambda suffixes: suffixes.forget(tenants))

    def expire(self, ttl_s: float) -> None:
        """Drop the text that may be so old, between two steps; returns when it is done."""
        self._between_steps(lambda suffixes: suffixes.expire(ttl_s))

    def drop(self, tenant: str, group_id: str) -> None:
        """A prompt group has ended: drop its text, here before the next step, and in Redis. Does not wait."""
        if self._sharing is not None:
            self._sharing.drop(tenant, group_id)
        self._add_errand(lambda suffixes: suffixes.drop(tenant, group_id))

    def _between_steps(self, errand: Callable[[SuffixDrafter], None]) -> None:
        if (done := self._add_errand(errand)) is not None:
            done.result()

    def _add_errand(self, errand: Callable[[SuffixDrafter], None]) -> Future[None] | None:
        """None where the engine does not run, and its texts are gone."""
        done: Future[None] = Future()
        with self._wake:
            if self._stopping or self._failure is not None or not self._thread.is_alive():
                return None
            self._errands.append((errand, done))
            self._wake.notify()
        return done

    # -- the loop, on the engine's thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._config.num_threads)
        try:
            while self._wait_for_work():
                self._step()
        except BaseException as error:
            self._failure = error
            log.exception("engine failed")
        finally:
            self._end_everything()

    def _wait_for_work(self) -> bool:
        with self._wake:
            busy = self._running or self._prefilling
            while not (busy or self._waiting or self._swap or self._move or self._errands or self._stopping):
                if self._pulse is not None:
                    self._pulse.rest()
                self._wake.wait()
            return not self._stopping

    def _step(self) -> None:
        self._num_steps += 1
        if self._pulse is not None:
            num_free = self._config.num_slots - len(self._running) - (self._prefilling is not None)
            self._pulse.beat(max(len(self._waiting) - num_free, 0))
            self._step_tokens = 0
        self._install_staged()
        self._install_target()
        self._run_errands()
        if self._sharing is not None:
            self._sharing.take()
        self._drop_aborted()
        self._admit()
        if self._prefilling is not None:
            self._prefill(self._prefilling)
        batch = len(self._running)
        if self._running:
            self._decode()
        if self._pulse is not None:
            self._pulse.about(batch, self._step_tokens)

    def _install_staged(self) -> None:
        with self._wake:
            swap, self._swap = self._swap, None
        if swap is None:
            return
        previous, started = self._draft.version, time.perf_counter()
        try:
            self._draft.install(swap.staged)
        except Exception as error:
            swap.report.set_exception(error)
            return
        stall_s = time.perf_counter() - started
        # Copied on and on, keys of the draft before would outlive it.
        for generation in [*self._running, *([self._prefilling] if self._prefilling else [])]:
            generation.lends_pairs = generation.num_pairs_read == 0
        self._planner.renew()
        self.metrics.swaps.labels("installed").inc()
        self.metrics.swap_stall.observe(stall_s)
        self.metrics.draft_version.set(self._draft.version)
        self.metrics.last_swap.set_to_current_time()
        swap.report.set_result(
            SwapReport(version=self._draft.version, previous=previous, stall_ms=1000 * stall_s, step=self._num_steps)
        )

    def _install_target(self) -> None:
        """New weights between two steps. Half of them must not serve: a failure here ends the engine."""
        with self._wake:
            move = self._move
        if move is None:
            return
        previous, started = self._target_version, time.perf_counter()
        for generation in self._running:
            self._record_trace(generation)
            generation.capture = False
            # Its keys and values are the old target's.
            generation.lends_prompt = False
        if self._prefilling is not None:
            self._prefilling.begin_anew()
        self._target.install(move.staged)
        self._target_version = move.version
        self._planner.renew()
        if self._suffixes is not None:
            self._suffixes.target_moved()
        if self._sharing is not None:
            self._sharing.set_target_version(move.version)
        with self._wake:
            self._move = None
        stall_ms = 1000 * (time.perf_counter() - started)
        move.report.set_result(TargetReport(version=move.version, previous=previous, stall_ms=stall_ms))

    def _run_errands(self) -> None:
        with self._wake:
            errands, self._errands = self._errands, deque()
        for errand, done in errands:
            try:
                if self._suffixes is not None:
                    errand(self._suffixes)
                    self.metrics.suffix_tokens.set(self._suffixes.num_tokens)
            finally:
                done.set_result(None)

    def _drop_aborted(self) -> None:
        with self._wake:
            gone = sum(1 for generation in self._waiting if generation.aborted)
            self._waiting = deque(generation for generation in self._waiting if not generation.aborted)
        if self._prefilling is not None and self._prefilling.aborted:
            self._prefilling = None
            gone += 1
        for generation in [generation for generation in self._running if generation.aborted]:
            self._free_slot(generation)
            gone += 1
        self.metrics.aborted.inc(gone)

    def _admit(self) -> None:
        while self._prefilling is None and len(self._running) < self._config.num_slots:
            with self._wake:
                if not self._waiting:
                    return
                self._prefilling = generation = self._waiting.popleft()
            generation.suffix = self._new_suffix(generation.request)
            self._copy_prefix(generation)

    def _copy_prefix(self, generation: Generation) -> None:
        """Take from a running sample of the same group what it has read of the same prompt.

        A group is one tenant's. Where the whole prompt is there, its last token is pending and the sample decodes.
        """
        slot, length = longest_prefix(generation, self._running, prompt_labels=self._config.prompt_labels)
        if length == 0:
            return
        sibling, last = self._running[slot], generation.num_prompt_tokens - 1
        self._runner.move_slot(slot, len(self._running), generation)
        # A pair needs the token after it.
        generation.num_pairs_read = min(sibling.num_pairs_read, length - 1) if sibling.lends_pairs else 0
        if sibling.request.prompt_token_ids == generation.request.prompt_token_ids:
            generation.topk = [top.before(length) for top in sibling.topk if top.position < length]
        generation.num_prefilled = length
        if length == last:
            self._prefilling = None
            self._running.append(generation)

    def _new_suffix(self, request: GenerateRequest) -> SuffixRequest | None:
        if self._suffixes is None:
            return None
        policy = request.policy
        # Who opts out of capture leaves nothing for other requests, either.
        found = self._suffixes.start(
            request.prompt_token_ids, tenant=policy.tenant, group_id=policy.group_id, shared=policy.capture
        )
        if self._sharing is not None and found.group is not None:
            found.publish = self._sharing.join(GroupKey(policy.tenant, policy.group_id), found.group, found.context)
        return found

    def _prefill(self, generation: Generation) -> None:
        slot, num_before, started = len(self._running), generation.num_prefilled, time.perf_counter()
        self._runner.prefill(generation, slot, self._config.prefill_chunk, drafting=self._depth > 0)
        num_tokens = generation.num_prefilled - num_before
        self._step_tokens += num_tokens
        record(generation.parent, "prefill", time.perf_counter() - started, tokens=num_tokens)
        if generation.num_prefilled == generation.num_prompt_tokens:
            self._prefilling = None
            self._running.append(generation)
            self._finish_done()

    def _decode(self) -> None:
        is_control = self._control.is_control(len(self._running))
        depth = 0 if is_control else self._depth
        report = self._runner.run(self._running, depth)
        self._step_tokens += report.batch * (1 + report.num_proposals)
        told = Round(report, self._running, depth, is_control, self._draft.version, self._target_version)
        self._teller.tell(told)
        self._finish_done()

    def _finish_done(self) -> None:
        for generation in [generation for generation in self._running if generation.finish_reason]:
            self._record_trace(generation)
            self._free_slot(generation)
            if self._suffixes is not None:
                self.metrics.suffix_tokens.set(self._suffixes.num_tokens)

    def _record_trace(self, generation: Generation) -> None:
        """Of a generation that has ended, or goes on under another target."""
        # An answer's last token is outside its trace; where it is the first as well, there is nothing to learn.
        teaches = len(generation.tokens) - generation.num_prompt_tokens > 1
        if self._on_trace is not None and generation.capture and not generation.aborted and teaches:
            started = time.perf_counter()
            trace = self._trace_of(generation)
            self._on_trace(trace)
            seconds = time.perf_counter() - started
            self.metrics.capture_seconds.inc(seconds)
            record(generation.parent, "capture", seconds, tokens=trace.num_tokens)

    def _trace_of(self, generation: Generation) -> Trace:
        start, end = span_of(generation, self._config.context_window)
        return build_trace(
            generation,
            self._runner.features(self._running.index(generation), start, end),
            start=start,
            engine_id=self._config.engine_id,
            target_fingerprint=self._fingerprint,
            target_version=self._target_version,
        )

    def _free_slot(self, generation: Generation) -> None:
        """Close the gap: the last running request moves into the freed slot, the prefilling one follows."""
        slot, last = self._running.index(generation), len(self._running) - 1
        if slot != last:
            self._running[slot] = self._running[last]
            self._runner.move_slot(last, slot, self._running[slot])
        self._running.pop()
        if self._prefilling is not None:
            self._runner.move_slot(last + 1, last, self._prefilling)

    def _end_everything(self) -> None:
        with self._wake:
            self._stopping = True
            unfinished = [*self._running, *self._waiting, *([self._prefilling] if self._prefilling else [])]
            swap, self._swap = self._swap, None
            move, self._move = self._move, None
            errands, self._errands = self._errands, deque()
            self._waiting.clear()
        if self._pulse is not None:
            self._pulse.rest()
        for generation in unfinished:
            generation.deliver(Chunk(text="", token_ids=(), finish_reason="abort"))
        if swap is not None:
            swap.report.set_exception(EngineDeadError("the engine stopped before the swap"))
        if move is not None:
            move.report.set_exception(EngineDeadError("the engine stopped before the target moved"))
        for _, done in errands:
            # Its texts are gone with it.
            done.set_result(None)


def _planner(config: LocalEngineConfig) -> Planner:
    if config.min_confidence is not None:
        return FixedPlanner(config.min_confidence)
    return RoundPlanner(max_depth=config.max_depth)


def _begun(request: GenerateRequest) -> tuple[int, ...]:
    """The prompt's last tokens that belong to the answer."""
    return request.prompt_token_ids[len(request.prompt_token_ids) - request.num_answered :]


def _hand_over(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[Chunk], chunk: Chunk) -> None:
    try:
        loop.call_soon_threadsafe(queue.put_nowait, chunk)
    except RuntimeError:
        log.debug("client loop closed before its answer ended")
