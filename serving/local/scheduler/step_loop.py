"""A step of the local engine: install what is staged, admit, read a piece of a prompt, decode a round.

Nothing in a step waits for Redis, the disk or a client.
"""

from __future__ import annotations

import time

from serving.engine import SwapReport, TargetReport
from serving.local.capture import Capture
from serving.local.config import LocalEngineConfig
from serving.local.decode.observers import Round, RoundTeller
from serving.local.decode.rounds import Piece, RoundRunner
from serving.local.draft import ServingDraft
from serving.local.scheduler.inbox import Inbox
from serving.local.scheduler.slots import Slots
from serving.local.suffix_text import RecentTexts
from serving.local.target.model import Target
from serving.metrics import EngineMetrics
from serving.speedup import ControlShare, HeadArm, HeadSwitch
from speculator.proposals.planner import RoundPlanner
from speculator.redis.control_plane import EngineLoad
from speculator.tracing import record

_ALONE_EVERY = 8
_NO_DRAFTING = HeadArm(may_ask=False, counts=False)


class DecodeLoop:
    """Owned by the engine's thread. Others set `depth`, between any two rounds, and read `target_version`.

    When the target moves, a running answer goes on under the new weights with the keys and values of the old: as in a
    partial rollout, it was begun under one policy and is ended under another. Its trace ends where the change came, so
    no trace has labels of two targets. A prompt that is only being read is read anew.
    """

    def __init__(
        self,
        config: LocalEngineConfig,
        *,
        inbox: Inbox,
        target: Target,
        draft: ServingDraft,
        planner: RoundPlanner,
        texts: RecentTexts,
        runner: RoundRunner,
        capture: Capture,
        teller: RoundTeller,
        metrics: EngineMetrics,
        load: EngineLoad,
    ) -> None:
        self._inbox, self._target, self._draft, self._planner = inbox, target, draft, planner
        self._runner, self._capture, self._teller, self._metrics = runner, capture, teller, metrics
        self._prefill_chunk = config.prefill_chunk
        self._control = ControlShare(config.control_share)
        self._head_switch = HeadSwitch(config.head_off_share)
        self._slots = Slots(runner, num_slots=config.num_slots, prompt_labels=config.prompt_labels)
        self._load, self._num_steps, self._num_shareable = load, 0, 0
        self.texts, self.depth, self.target_version = texts, config.depth, 0

    @property
    def num_running(self) -> int:
        return len(self._slots.running)

    def run(self) -> None:
        """Until the inbox is closed. What then runs is cut."""
        while self._inbox.wait(is_busy=bool(self._slots.everybody)):
            with self._load.stepping():
                self.step()

    def step(self) -> None:
        self._num_steps += 1
        self._install_draft()
        self._install_target()
        self.texts.run(self._inbox.take_errands())
        self.texts.take_shared()
        self._metrics.aborted.inc(self._inbox.drop_aborted() + self._slots.drop_aborted())
        self._admit()
        piece = self._next_piece()
        if piece is not None and not self._reads_in_round(piece):
            self._prefill(piece)
            piece = None
        if self.num_running:
            self._decode(piece)

    def end(self) -> None:
        """Tell all that are here that their answers end."""
        for generation in self._slots.everybody:
            generation.abort()

    def _install_draft(self) -> None:
        if (swap := self._inbox.take_swap()) is None:
            return
        previous, started = self._draft.version, time.perf_counter()
        try:
            self._draft.install(swap.staged)
        except Exception as error:
            swap.report.set_exception(error)
            return
        stall_s = time.perf_counter() - started
        # Copied on and on, keys of the draft before would outlive it.
        for generation in self._slots.everybody:
            generation.lends_pairs = generation.num_pairs_read == 0
        self._planner.renew()
        self._metrics.swaps.labels("installed").inc()
        self._metrics.swap_stall.observe(stall_s)
        self._metrics.draft_version.set(self._draft.version)
        self._metrics.last_swap.set_to_current_time()
        swap.report.set_result(
            SwapReport(version=self._draft.version, previous=previous, stall_ms=1000 * stall_s, step=self._num_steps)
        )

    def _install_target(self) -> None:
        """New weights between two steps. Half of them must not serve: a failure here ends the engine."""
        if (move := self._inbox.staged_move()) is None:
            return
        previous, started = self.target_version, time.perf_counter()
        for slot, generation in enumerate(self._slots.running):
            self._capture.hand_over(generation, slot=slot, target_version=previous)
            generation.capture = False
            # Its keys and values are the old target's.
            generation.lends_prompt = False
        if self._slots.prefilling is not None:
            self._slots.prefilling.begin_anew()
        self._capture.target_moves()
        self._target.install(move.staged)
        self.target_version = move.version
        self._planner.renew()
        self.texts.target_moved(move.version)
        self._inbox.end_move()
        stall_ms = 1000 * (time.perf_counter() - started)
        move.report.set_result(TargetReport(version=move.version, previous=previous, stall_ms=stall_ms))

    def _admit(self) -> None:
        while self._slots.can_admit:
            if (generation := self._inbox.next_request()) is None:
                return
            # It has its place before anything can fail, or nobody would tell its client.
            self._slots.admit(generation)
            generation.suffix = self.texts.begin(generation.request)

    def _next_piece(self) -> Piece | None:
        generation = self._slots.prefilling
        return None if generation is None else Piece.next_of(generation, self.num_running, self._prefill_chunk)

    def _reads_in_round(self, piece: Piece) -> bool:
        """Whether it is read in a round's pass, where the weights are read once for both. Not one in eight, nor where a
        control round is due, if the prompt goes on: or nothing would say what rounds take while prompts keep coming.
        """
        if not self._target.takes_windows or self.num_running == 0:
            return False
        # Once a prompt's last piece was read alone, the round is one of more requests.
        if not piece.ends_prompt and self._control.is_due(self.num_running):
            return False
        self._num_shareable += 1
        return self._num_shareable % _ALONE_EVERY > 0

    def _prefill(self, piece: Piece) -> None:
        started = time.perf_counter()
        self._runner.prefill(piece, drafting=self.depth > 0)
        self._end_piece(piece, time.perf_counter() - started, in_round=False)
        self._finish_done()

    def _decode(self, piece: Piece | None) -> None:
        running = self._slots.running
        is_put_off = piece is not None and self._control.is_due(len(running))
        is_control = not is_put_off and self._control.is_control(len(running))
        depth = 0 if is_control else self.depth
        arm = self._head_switch.next_arm() if depth else _NO_DRAFTING
        report = self._runner.run(running, depth, piece, may_ask_head=arm.may_ask)
        self._teller.tell(Round(report, running, depth, is_control, self._draft.version, self.target_version, arm))
        if piece is not None:
            self._end_piece(piece, report.seconds, in_round=True)
        self._finish_done()

    def _end_piece(self, piece: Piece, seconds: float, *, in_round: bool) -> None:
        """It has been read: tell of it, and let its request decode where that was the prompt's last."""
        record(piece.generation.parent, "prefill", seconds, tokens=len(piece.tokens), in_round=in_round)
        if piece.ends_prompt:
            self._slots.start_decoding()

    def _finish_done(self) -> None:
        for generation in [generation for generation in self._slots.running if generation.finish_reason]:
            slot = self._slots.running.index(generation)
            self._capture.hand_over(generation, slot=slot, target_version=self.target_version)
            self._slots.free(generation)
            self.texts.count()
