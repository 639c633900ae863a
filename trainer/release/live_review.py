"""Review of versions in service on arriving traces, and what rollbacks mean for training.

**Review.** An engine compares accept lengths of different requests (serving/hotswap/breaker.py). Requests
differ more from each other than drafts do, so it rolls back only what is clearly worse. Here both drafts decode the
same traces again, as at the gate; some twenty traces show a change of a tenth. The gate judges versions in the same
way, on other traces. The review covers traffic that the gate did not see, and versions that never passed the gate,
whoever published them: this trainer, an operator, or anyone who writes to the store.

The change of the accept length is compared after every trace, with bounds that hold for all comparisons together
(trainer/statistics.py). Answers to one prompt count as one trace. With ε = `gate_epsilon`, also where the target has
moved, the version is

    rolled back   confidently worse by more than ε: barred as by an engine; engines and training go back
    kept          confidently not worse by ε, after `MIN_KEPT` traces at least
    undecided     neither, after `review_traces`
    withdrawn     barred by another, pinned by the operator, replaced by a newer version in service, or one of the two
                  drafts cannot be read

It costs two decodings a trace, of at most `_TRACES_A_TURN` in a turn of the training loop. It decodes up to
`_ANSWERS_A_PROMPT` answers to a prompt, of up to `review_traces` prompts. Meanwhile both drafts are in memory. A review
starts again where the trainer was restarted, or where the incumbent was barred or removed, since no engine would go
back to that one. What cannot be read or written is tried again; learning goes on.

**Rollbacks.** When the trainer's own version was rolled back or barred, it restarts training from the last good one.
When engines rolled back two versions in a row, the gate misses something about live traffic, so publishing pauses:

    pause = publish_pause_s · 2^(n − 2), at most MAX_PAUSE_S, from the last of n ≥ 2 rollbacks in a row

Then one version is published on trial. The next one waits for its outcome, for at most as long as the pause was. A
promotion ends the pauses; a rollback doubles the pause. A promotion by an operator ends a pause at once.
"""

from __future__ import annotations

import enum
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import structlog

from speculator.draft.eagle3 import Eagle3Draft
from speculator.errors import DraftError, LifecycleError, StoreError, StreamError, UnknownDraftError
from speculator.redis.control_plane import DraftPointer
from speculator.versions.lifecycle import BARRED, Lifecycle, Number, Transition, VersionState
from trainer.config import TrainerConfig
from trainer.metrics import TrainerMetrics
from trainer.ranks import Ranks
from trainer.release.gate import Score, score
from trainer.replay.reservoirs import Provenance, Stored
from trainer.statistics import Comparison, PairedScores, PromptScores, anytime_quantile, by_prompt, compare

_IN_SERVICE = frozenset({VersionState.LIVE, VersionState.PROMOTED})


class ReviewedVersion(NamedTuple):
    version: int
    incumbent: int
    """The last good version before it, to which engines go back."""
    sequence: int
    """Number of the transition that brought it into service; a version that was barred and released has a new one."""


def _is_gone(histories: Mapping[int, Sequence[Transition]], current: ReviewedVersion) -> bool:
    """The newcomer's incumbent was barred or removed, so no engine would go back to it."""
    history = histories.get(current.incumbent)
    return history is None or history[-1].state in BARRED


def _came(history: Sequence[Transition]) -> int:
    return max((one.sequence for one in history if one.state is VersionState.LIVE), default=0)


log = structlog.get_logger()
ACTOR = "trainer:review"
ALPHA = 0.01
"""Error rate: of versions that are worse by exactly ε, the share that may be rolled back, and the share that may be
kept. It holds for roughly normal differences between traces. Where a few traces have all of the loss, errors are more
frequent: of versions that lose half on one trace in ten 1 in 200 is kept, of those that lose 60% on one in twenty 7 in
100 (tests/trainer/release/test_review.py).
"""
MIN_KEPT = 50
DOUBT = 0.1
"""`doubt` of `compare`: a few first traces that agree do not decide."""
POLL_INTERVAL_S = 1.0
_TRACES_A_TURN = 2
_ANSWERS_A_PROMPT = 4
_NOBODY = ReviewedVersion(0, 0, 0)


class ReviewOutcome(enum.Enum):
    ROLLED_BACK = "rolled_back"
    KEPT = "kept"
    UNDECIDED = "undecided"
    WITHDRAWN = "withdrawn"


def review_outcome(found: Comparison, *, epsilon: float, is_last: bool) -> ReviewOutcome | None:
    """The outcome of a review; None where it needs more traces."""
    if found.upper is not None and found.upper < -epsilon:
        return ReviewOutcome.ROLLED_BACK
    if found.num_traces >= MIN_KEPT and found.lower is not None and found.lower > -epsilon:
        return ReviewOutcome.KEPT
    return ReviewOutcome.UNDECIDED if is_last else None


class Review:
    """Compares the newest version in service with the one before. All ranks call the same methods in the same order:
    each decodes its own traces, and rank 0 decides about all of them.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        pointer: DraftPointer,
        config: TrainerConfig,
        metrics: TrainerMetrics,
        ranks: Ranks,
        *,
        load_draft: Callable[[int], Eagle3Draft],
        clock: Callable[[], float],
        score: Score = score,
    ) -> None:
        self._lifecycle, self._pointer, self._config, self._score = lifecycle, pointer, config, score
        self._metrics, self._ranks, self._load_draft, self._clock = metrics, ranks, load_draft, clock
        self._newcomer = self._word = _NOBODY
        """The version under review; and, on rank 0, the one to review from the next turn on."""
        self._settled: int | None = None
        """Sequence number of the transition up to which all versions in service were reviewed."""
        self._polled_s = float("-inf")
        self._drafts: tuple[Eagle3Draft, Eagle3Draft] | None = None
        """The newcomer and its incumbent, once there is a trace to decode."""
        self._waiting: deque[Stored] = deque(maxlen=config.review_traces)
        self._texts: set[bytes] = set()
        self._prompts: Counter[bytes] = Counter()
        """How many of `_texts` answer each prompt."""
        self._answers: list[PromptScores] = []
        """Scores from all ranks; on rank 0."""
        self._is_gone = False
        """One of the drafts can never be loaded."""
        self._verdict: tuple[ReviewOutcome, Comparison] | None = None
        """Reached, and not yet carried out."""
        self._seconds = 0.0

    @property
    def version(self) -> int:
        """The version under review; 0 for none."""
        return self._newcomer.version

    @property
    def has_work(self) -> bool:
        """Traces wait on this rank."""
        return bool(self._waiting)

    def arrived(self, traces: Iterable[Stored]) -> None:
        """Queue new traces for the review, whether or not the trainer keeps them."""
        if self._newcomer == _NOBODY:
            return
        for stored in traces:
            text_hash, prompt_hash = stored.provenance.text_hash, stored.provenance.prompt_hash
            if text_hash not in self._texts and self._prompts[prompt_hash] < _ANSWERS_A_PROMPT:
                self._texts.add(text_hash)
                self._prompts[prompt_hash] += 1
                self._waiting.append(stored)

    def forget(self, is_gone: Callable[[Provenance], object]) -> None:
        """Drop waiting traces for which `is_gone` is true."""
        self._waiting = deque(
            (one for one in self._waiting if not is_gone(one.provenance)), maxlen=self._waiting.maxlen
        )

    def take_turn(self) -> None:
        """Check which version is in service, and decode a few of the waiting traces."""
        if not self._config.review_traces:
            return
        newcomer = self._agree()
        if newcomer != self._newcomer:
            self._begin(newcomer)
        traces = [self._waiting.popleft() for _ in range(min(len(self._waiting), _TRACES_A_TURN))]
        if not self._ranks.max(len(traces)):
            return
        parts = self._ranks.gather(msgspec.json.encode(self._decode(traces)))
        if self._ranks.is_leader and self._verdict is None:
            self._answers += [answer for part in parts for answer in msgspec.json.decode(part, type=list[PromptScores])]
            if self._is_gone:
                self._verdict = ReviewOutcome.WITHDRAWN, self._compare()
                self._carry_out()
            else:
                self._judge()

    def _agree(self) -> ReviewedVersion:
        # The clock may be set back meanwhile.
        if self._ranks.is_leader and abs(self._clock() - self._polled_s) >= POLL_INTERVAL_S:
            self._polled_s = self._clock()
            self._poll()
        return ReviewedVersion(*map(int, self._ranks.sum(self._word if self._ranks.is_leader else _NOBODY)))

    def _poll(self) -> None:
        if self._verdict is not None:
            self._carry_out()
            return
        try:
            newcomer = self._find_newcomer()
        except StoreError as error:
            log.warning("the states of the drafts cannot be read", error=str(error))
            return
        if newcomer.sequence != self._word.sequence and self._answers:
            self._verdict = ReviewOutcome.WITHDRAWN, self._compare()
            self._carry_out()
        else:
            # Where the incumbent was barred, the same version begins a new review against another incumbent.
            self._word = newcomer

    def _find_newcomer(self) -> ReviewedVersion:
        """The version that came into service last, until its review ends. Raises StoreError."""
        histories = self._lifecycle.histories()
        came = {version: _came(history) for version, history in histories.items() if history[-1].state in _IN_SERVICE}
        if self._settled is None:
            # Versions that were promoted before this process began are not reviewed.
            promoted = (came[one] for one in came if histories[one][-1].state is VersionState.PROMOTED)
            self._settled = max(promoted, default=0)
        version = max(came, key=came.__getitem__, default=None)
        if version is None or came[version] <= self._settled:
            return _NOBODY
        if self._word.sequence == came[version] and not _is_gone(histories, self._word):
            return self._word
        incumbent = self._lifecycle.last_good(other_than=version)
        return _NOBODY if incumbent is None else ReviewedVersion(version, incumbent, came[version])

    def _begin(self, newcomer: ReviewedVersion) -> None:
        self._newcomer, self._drafts, self._seconds, self._is_gone = newcomer, None, 0.0, False
        self._waiting.clear()
        self._texts.clear()
        self._prompts.clear()
        self._answers.clear()

    def _decode(self, traces: Sequence[Stored]) -> list[PromptScores]:
        start_s = time.monotonic()
        try:
            if traces and self._drafts is None:
                self._drafts = self._load_draft(self._newcomer.version), self._load_draft(self._newcomer.incumbent)
        except (DraftError, StoreError) as error:
            log.warning("a draft cannot be loaded to review it", **self._newcomer._asdict(), error=str(error))
            self._is_gone = isinstance(error, DraftError | UnknownDraftError)
            self._texts.clear()
            self._prompts.clear()
            return []
        answers = []
        for stored in traces:
            scores = (self._score(draft, stored, self._config) for draft in self._drafts or ())
            answers.append((stored.provenance.prompt_hash, PairedScores(*scores)))
        seconds = time.monotonic() - start_s
        self._seconds += seconds
        self._metrics.observe_decoded(len(answers), seconds)
        return answers

    def _compare(self) -> Comparison:
        return compare(by_prompt(self._answers), quantile=partial(anytime_quantile, alpha=ALPHA), doubt=DOUBT)

    def _judge(self) -> None:
        num_prompts = len({prompt_hash for prompt_hash, _ in self._answers})
        found, is_last = self._compare(), num_prompts >= self._config.review_traces
        self._metrics.observe_review(found)
        outcome = review_outcome(found, epsilon=self._config.gate_epsilon, is_last=is_last)
        if outcome is not None:
            self._verdict = outcome, found
            self._carry_out()

    def _carry_out(self) -> None:
        """Bar the version where that is the verdict, and end the review; on an error the next turn tries again."""
        assert self._verdict is not None
        outcome, found = self._verdict
        try:
            if outcome is ReviewOutcome.ROLLED_BACK and not self._roll_back(found):
                outcome = ReviewOutcome.WITHDRAWN
            self._end(outcome, found)
        except (StoreError, StreamError) as error:
            log.warning("the review's outcome could not be stored, will retry", outcome=outcome.value, error=str(error))

    def _roll_back(self, found: Comparison) -> bool:
        """Bar the version; False where an operator pinned it, or its state does not allow it."""
        version, incumbent, _ = self._newcomer
        if self._pointer.pinned() == version:
            return False
        reason = f"accepts less than version {incumbent} on the same traces"
        try:
            self._lifecycle.bar(version, actor=ACTOR, reason=reason, numbers=self._numbers(found))
        except LifecycleError:
            return False
        # Not the review's incumbent: that may have been barred meanwhile.
        if (good := self._lifecycle.last_good()) is not None:
            self._pointer.replace(version, good)
        return True

    def _end(self, outcome: ReviewOutcome, found: Comparison) -> None:
        fields = {"version": self._newcomer.version, "outcome": outcome.value, **self._numbers(found)}
        self._lifecycle.events.append("review", actor=ACTOR, **fields)
        self._settled = self._newcomer.sequence
        self._metrics.reviews.labels(outcome.value).inc()
        log.info("review ended", **fields)
        self._verdict, self._word = None, _NOBODY
        self._answers.clear()

    def _numbers(self, found: Comparison) -> dict[str, Number]:
        numbers = msgspec.structs.asdict(found)
        return {"incumbent": self._newcomer.incumbent, "seconds": round(self._seconds, 2), **numbers}


MAX_PAUSE_S = 24 * 3600.0
MIN_TRIAL_S = 300.0
"""Least time for which a trial without an outcome holds up publishing, however short the pause was."""
_UNDECIDED = frozenset({VersionState.SCORED, VersionState.LIVE})


def pause_s(num_rollbacks: int, first_pause_s: float) -> float:
    """How long to publish nothing after so many rollbacks in a row, the last one of them just now."""
    if num_rollbacks < 2:
        return 0.0
    # Far below the largest exponent, and far above what MAX_PAUSE_S leaves of it.
    return min(first_pause_s * 2.0 ** min(num_rollbacks - 2, 100), MAX_PAUSE_S)


class RollbackWatch:
    """Watches for rollbacks, on rank 0: says when to restart training and when to pause publishing. After a read error
    it tries again next time.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        metrics: TrainerMetrics,
        *,
        published: Callable[[], int | None],
        first_pause_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`published` gives the version that the pointer names, or raises StreamError; `clock` seconds since the epoch,
        as the lifecycle's transitions have them.
        """
        self._lifecycle, self._metrics, self._published = lifecycle, metrics, published
        self._first_pause_s, self._clock = first_pause_s, clock
        self._looked = self._trial = (0, -math.inf)
        """(version, time): of the last check; and when that version's trial was first seen."""
        self._seen_s: dict[int, float] | None = None
        """When each rollback was first seen, by its sequence number: an engine's clock may be hours wrong."""
        self.paused = False
        """No version may be published."""
        metrics.publishing_paused.set(0)

    def poll(self, version: int) -> int | None:
        """The version to restart training from where `version`, from which the weights descend, is barred; else None.
        Reads the states at most every POLL_INTERVAL_S.
        """
        now_s, before = self._clock(), self._looked
        # The clock may be set back meanwhile.
        if version == before[0] and abs(now_s - before[1]) < POLL_INTERVAL_S:
            return None
        self._looked = (version, now_s)
        try:
            self._pause_after_rollbacks(version, now_s)
            if self._lifecycle.state(version) not in BARRED:
                return None
            return self._lifecycle.last_good() or self._lifecycle.newest_servable()
        except StoreError as error:
            log.warning("the states of the drafts cannot be read", error=str(error))
            return None

    def _pause_after_rollbacks(self, version: int, now_s: float) -> None:
        rollbacks = self._lifecycle.rollbacks_in_a_row()
        if self._seen_s is None:
            # A pause survives a restart, and where a clock is ahead begins anew.
            self._seen_s = {one.sequence: one.at_ms / 1000 for one in rollbacks}
        # A clock that is set back must not lengthen a pause by as much.
        self._seen_s = {one.sequence: min(self._seen_s.get(one.sequence, now_s), now_s) for one in rollbacks}
        until_s = 0.0
        if len(rollbacks) >= 2:
            until_s = self._seen_s[rollbacks[-1].sequence] + pause_s(len(rollbacks), self._first_pause_s)
        on_trial = len(rollbacks) >= 2 and self._is_on_trial(version, now_s, len(rollbacks))
        paused = now_s < until_s or on_trial
        if paused == self.paused:
            return
        self.paused = paused
        self._metrics.publishing_paused.set(paused)
        numbers = {"num_rollbacks": len(rollbacks), "until_ms": int(1000 * until_s), "on_trial": on_trial}
        if paused and not on_trial:
            log.error("publishing paused: engines rolled back one version after the other", **numbers)
        else:
            log.info("publishing waits for a trial" if paused else "publishing goes on", **numbers)
        self._lifecycle.events.append(
            "publishing_paused" if paused else "publishing_resumed", actor="trainer", **numbers
        )

    def _is_on_trial(self, version: int, now_s: float, num_rollbacks: int) -> bool:
        """Whether engines are trying `version`, and publishing must wait for the outcome.

        They try only what the pointer names, so not a version scored just before the trainer was killed. The wait ends
        after as long as the pause before it, or MIN_TRIAL_S: there may be no engine left to decide.
        """
        if self._lifecycle.state(version) not in _UNDECIDED:
            return False
        try:
            if self._published() != version:
                return False
        except StreamError:
            return True
        # The trial begins when the pointer first names the version.
        if self._trial[0] != version or now_s < self._trial[1]:
            self._trial = (version, now_s)
        return now_s - self._trial[1] <= max(pause_s(num_rollbacks, self._first_pause_s), MIN_TRIAL_S)
