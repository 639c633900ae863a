"""Versions in service: a second look at a new one on the traces that arrive, and what rollbacks mean for training.

**Second look.** An engine compares accept lengths of different requests (serving/hotswap/breaker.py), and requests
differ more from each other than drafts do, so it takes back only what is clearly worse. Here both drafts decode the
same traces again, as at the gate, and some twenty traces tell a tenth from nothing. The gate has judged most versions
like that; this is about traffic that had no part in its judgement, and about versions that never came to it. It does
not matter who published a version: this trainer, an operator, or whoever writes to the store.

The change of the accept length is compared after every trace, within bounds that hold over all looks together
(trainer/statistics.py). Answers to one prompt count as one trace. With the ε of the gate, the narrow one also where the
target has moved, the version is

    rolled back   confidently worse by more than ε: barred as by an engine; engines and training go back
    kept          confidently not worse by ε, after `MIN_KEPT` traces at least
    undecided     neither, after `review_traces`
    withdrawn     barred by somebody else, pinned by the operator, or a newer version has come into service; or one of
                  the two cannot be read any more

It costs two decodings a trace, of at most `_TRACES_A_TURN` in a turn of the training loop; `_ANSWERS_A_PROMPT` answers
to a prompt are decoded, and as many prompts as `review_traces`. Meanwhile both drafts are in memory. A trainer that is
killed begins anew with a version that is still on trial, and so does one whose incumbent is barred or removed: nobody
goes back to it. What cannot be read or written is tried again; learning goes on.

**Rollbacks.** A version that was rolled back or barred is no base to go on from: the trainer starts again from the last
good one. Two versions in a row that engines rolled back mean that the gate does not see what live traffic sees, so
publishing pauses:

    pause = publish_pause_s · 2^(n − 2), at most MAX_PAUSE_S, from the last of n ≥ 2 rollbacks in a row

Then one version is published on trial, and the next one waits for what becomes of it, as long as the pause was:
promoted, everything is as before; rolled back, the pause is twice as long. A promotion by an operator ends it at once.
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
from trainer.replay.memory import Provenance, Stored
from trainer.statistics import Comparison, PairedScores, PromptScores, anytime_quantile, by_prompt, compare

_IN_SERVICE = frozenset({VersionState.LIVE, VersionState.PROMOTED})


class Newcomer(NamedTuple):
    version: int
    incumbent: int
    """The last good version but for it: what engines go back to."""
    sequence: int
    """Of the transition with which it came: a version that was barred and released comes anew."""


def _is_gone(histories: Mapping[int, Sequence[Transition]], current: Newcomer) -> bool:
    """Nobody goes back to its incumbent: it was barred, or removed."""
    history = histories.get(current.incumbent)
    return history is None or history[-1].state in BARRED


def _came(history: Sequence[Transition]) -> int:
    return max((one.sequence for one in history if one.state is VersionState.LIVE), default=0)


log = structlog.get_logger()
ACTOR = "trainer:review"
ALPHA = 0.01
"""Of versions that are worse by just ε, the share that may be rolled back, and the share that may be kept: where what
traces say of them is spread roughly like a normal distribution. Where it is not, in that all of the loss is on a few
traces, these have to come first: of versions that lose half on one trace in ten and nothing on the others 1 in 200 is
kept, of those that lose 60% on one in twenty 7 in 100 (tests/trainer/release/test_review.py).
"""
MIN_KEPT = 50
DOUBT = 0.1
"""As if one more trace had differed by so much: some first traces that say the same do not decide."""
LOOK_INTERVAL_S = 1.0
_TRACES_A_TURN = 2
_ANSWERS_A_PROMPT = 4
_NOBODY = Newcomer(0, 0, 0)


class ReviewOutcome(enum.Enum):
    ROLLED_BACK = "rolled_back"
    KEPT = "kept"
    UNDECIDED = "undecided"
    WITHDRAWN = "withdrawn"


def review_outcome(found: Comparison, *, epsilon: float, is_last: bool) -> ReviewOutcome | None:
    """None where it takes more traces."""
    if found.upper is not None and found.upper < -epsilon:
        return ReviewOutcome.ROLLED_BACK
    if found.num_traces >= MIN_KEPT and found.lower is not None and found.lower > -epsilon:
        return ReviewOutcome.KEPT
    return ReviewOutcome.UNDECIDED if is_last else None


class Review:
    """All ranks call it in the same order: each decodes its own traces, and rank 0 decides about all of them."""

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
        """Who is reviewed, and who is to be from the next turn on: rank 0's word."""
        self._settled: int | None = None
        """The transition up to which every version that came into service was reviewed, by its sequence."""
        self._looked_s = float("-inf")
        self._drafts: tuple[Eagle3Draft, Eagle3Draft] | None = None
        """The newcomer and its incumbent, once there is a trace to decode."""
        self._waiting: deque[Stored] = deque(maxlen=config.review_traces)
        self._texts: set[bytes] = set()
        self._prompts: Counter[bytes] = Counter()
        """How many of those texts are answers to a prompt."""
        self._answers: list[PromptScores] = []
        """Those of all ranks, on rank 0."""
        self._is_gone = False
        """One of the drafts can never be loaded."""
        self._verdict: tuple[ReviewOutcome, Comparison] | None = None
        """That has been reached and not yet been carried out."""
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
        """New traces, whatever becomes of them otherwise."""
        if self._newcomer == _NOBODY:
            return
        for stored in traces:
            text_hash, prompt_hash = stored.provenance.text_hash, stored.provenance.prompt_hash
            if text_hash not in self._texts and self._prompts[prompt_hash] < _ANSWERS_A_PROMPT:
                self._texts.add(text_hash)
                self._prompts[prompt_hash] += 1
                self._waiting.append(stored)

    def forget(self, is_gone: Callable[[Provenance], object]) -> None:
        """Drop what waits and is gone."""
        self._waiting = deque(
            (one for one in self._waiting if not is_gone(one.provenance)), maxlen=self._waiting.maxlen
        )

    def take_turn(self) -> None:
        """Look who is in service, and decode a few of the traces that wait."""
        if not self._config.review_traces:
            return
        newcomer = self._agree()
        if newcomer != self._newcomer:
            self._begin(newcomer)
        traces = [self._waiting.popleft() for _ in range(min(len(self._waiting), _TRACES_A_TURN))]
        if not self._ranks.max(len(traces)):
            return
        parts = self._ranks.gather(msgspec.json.encode(self._decode(traces)))
        if self._ranks.leads and self._verdict is None:
            self._answers += [answer for part in parts for answer in msgspec.json.decode(part, type=list[PromptScores])]
            if self._is_gone:
                self._verdict = ReviewOutcome.WITHDRAWN, self._compare()
                self._carry_out()
            else:
                self._judge()

    def _agree(self) -> Newcomer:
        if self._ranks.leads and self._clock() - self._looked_s >= LOOK_INTERVAL_S:
            self._looked_s = self._clock()
            self._look()
        return Newcomer(*map(int, self._ranks.sum(self._word if self._ranks.leads else _NOBODY)))

    def _look(self) -> None:
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
            # The same version with another incumbent, for the one before was barred, begins anew.
            self._word = newcomer

    def _find_newcomer(self) -> Newcomer:
        """The version that came into service last, until its review ends. Raises StoreError."""
        histories = self._lifecycle.histories()
        came = {version: _came(history) for version, history in histories.items() if history[-1].state in _IN_SERVICE}
        if self._settled is None:
            # Versions that were promoted before this process began are as good as they ever will be.
            promoted = (came[one] for one in came if histories[one][-1].state is VersionState.PROMOTED)
            self._settled = max(promoted, default=0)
        version = max(came, key=came.__getitem__, default=None)
        if version is None or came[version] <= self._settled:
            return _NOBODY
        if self._word.sequence == came[version] and not _is_gone(histories, self._word):
            return self._word
        incumbent = self._lifecycle.last_good(other_than=version)
        return _NOBODY if incumbent is None else Newcomer(version, incumbent, came[version])

    def _begin(self, newcomer: Newcomer) -> None:
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
        """Bar the version where that is the verdict, and end the review; what fails is tried again at the next look."""
        assert self._verdict is not None
        outcome, found = self._verdict
        try:
            if outcome is ReviewOutcome.ROLLED_BACK and not self._roll_back(found):
                outcome = ReviewOutcome.WITHDRAWN
            self._end(outcome, found)
        except (StoreError, StreamError) as error:
            log.warning("not carried out yet, tried again", outcome=outcome.value, error=str(error))

    def _roll_back(self, found: Comparison) -> bool:
        """False where the operator wants this version all the same, or it is gone."""
        version, incumbent, _ = self._newcomer
        if self._pointer.pinned() == version:
            return False
        reason = f"accepts less than version {incumbent} on the same traces"
        try:
            self._lifecycle.bar(version, actor=ACTOR, reason=reason, numbers=self._numbers(found))
        except LifecycleError:
            return False
        # Not the incumbent as it was when the review began: it may have been barred since.
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
"""A trial that has no verdict holds up publishing for at least so long, however short the pauses are."""
_UNDECIDED = frozenset({VersionState.SCORED, VersionState.LIVE})


def pause_s(num_rollbacks: int, first_pause_s: float) -> float:
    """How long to publish nothing after so many rollbacks in a row, the last one of them just now."""
    if num_rollbacks < 2:
        return 0.0
    # Far below the largest exponent, and far above what MAX_PAUSE_S leaves of it.
    return min(first_pause_s * 2.0 ** min(num_rollbacks - 2, 100), MAX_PAUSE_S)


class RollbackWatch:
    """Rank 0's view of the lifecycle. What cannot be read now is read next time: learning goes on meanwhile."""

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
        """(version, when): the last look; and when a version was first found on trial."""
        self.paused = False
        """Nothing may be published now."""
        metrics.publishing_paused.set(0)

    def look(self, version: int) -> int | None:
        """The version to start again from where `version`, the one that the weights descend from, is barred; None where
        nothing has to change. Looks at a version at most every LOOK_INTERVAL_S.
        """
        now_s, before = self._clock(), self._looked
        if version == before[0] and now_s - before[1] < LOOK_INTERVAL_S:
            return None
        self._looked = (version, now_s)
        try:
            self._heed_rollbacks(version, now_s)
            if self._lifecycle.state(version) not in BARRED:
                return None
            return self._lifecycle.last_good() or self._lifecycle.newest_servable()
        except StoreError as error:
            log.warning("the states of the drafts cannot be read", error=str(error))
            return None

    def _heed_rollbacks(self, version: int, now_s: float) -> None:
        rollbacks = self._lifecycle.rollbacks_in_a_row()
        until_s = 0.0
        if len(rollbacks) >= 2:
            until_s = rollbacks[-1].at_ms / 1000 + pause_s(len(rollbacks), self._first_pause_s)
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
        """Nobody tries what the pointer does not name, such as a version scored just before the trainer was killed.

        A trial that has no verdict after as long as the pause before it, or MIN_TRIAL_S, holds up publishing no longer:
        no engine may be left that could give one.
        """
        if self._lifecycle.state(version) not in _UNDECIDED:
            return False
        try:
            if self._published() != version:
                return False
        except StreamError:
            return True
        # Engines know it from now on.
        if self._trial[0] != version:
            self._trial = (version, now_s)
        return now_s - self._trial[1] <= max(pause_s(num_rollbacks, self._first_pause_s), MIN_TRIAL_S)
