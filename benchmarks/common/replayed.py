"""An engine that decodes recorded answers again: real drafts, real acceptance, and a virtual clock.

Under drafter-invariant verification the text does not depend on the draft, so a greedy answer that was recorded once
can be served again with any draft: each round accepts as many proposals as are the text
(trainer/release/gate.py). What a round costs is told to the engine, since nothing of the target is computed. Two
things differ from a live engine: every chain is as long as the depth, and after a swap in the middle of an answer the
draft's keys before it are those of the new version.

A share of the tokens may be remembered: earlier text then proposes them, right each time, and the draft is asked for
the others alone. Remembered are those of which the target is surest.

Shape letters: N tokens of an answer behind its first, which comes with the prompt; K = depth.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import torch

from serving.engine import Proposed, SwapReport, Verification, WatchedRound, stratum_of
from serving.speedup import ControlShare
from speculator.draft import eagle3
from speculator.draft.eagle3 import Eagle3Draft
from speculator.host import now_ms
from speculator.trace import Trace, VerifyRounds
from trainer.learning.batch import Example, Window, pack
from trainer.learning.ttt import unroll

DEPTH, CONTROL_SHARE = 4, 0.02
"""The local engine's defaults."""
TEXT_DEPTH, ROW_SHARE = 8, 0.037
"""Tokens that earlier text proposes at a time, and what each of them adds to a round."""
_ALL_CONTEXT = 1 << 31


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A recorded answer and its number."""

    number: int
    trace: Trace = field(repr=False)
    example: Example = field(repr=False)

    @property
    def length(self) -> int:
        """Its N."""
        return self.example.num_bases - self.example.answer_base


@dataclass(frozen=True, kw_only=True)
class Chains:
    """A draft's proposals after every token of an answer: `tokens` [N, K] int32 and `logprobs` [N, K] float16 up to the
    first rejected one, −1 and 0 after it; `accepted` [N].
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    accepted: np.ndarray


@torch.no_grad()
def decode_again(draft: Eagle3Draft, example: Example) -> Chains:
    """Chains at every position of a greedy answer; matrices are multiplied in bfloat16 where that is fast."""
    num = example.num_bases - example.answer_base
    window = Window(example=example, start=example.answer_base, num_bases=num)
    batch = pack([window], max_context=_ALL_CONTEXT)
    tokens_NK = torch.full((num, DEPTH), -1)
    logprobs_NK = torch.zeros(num, DEPTH)
    accepted_N = torch.zeros(num, dtype=torch.long)
    with eagle3.autocast(draft.embed.device, is_wanted=True):
        for proposals in unroll(draft, batch, num_steps=DEPTH):
            likeliest_S = proposals.logits.float().log_softmax(-1).max(-1)
            tokens_NK[proposals.chains, proposals.step] = draft.target_ids[likeliest_S.indices]
            logprobs_NK[proposals.chains, proposals.step] = likeliest_S.values
            accepted_N[proposals.chains] += proposals.hits
    return Chains(tokens=tokens_NK.int().numpy(), logprobs=logprobs_NK.half().numpy(), accepted=accepted_N.numpy())


@dataclass(frozen=True)
class Served:
    """A version and its weights."""

    version: int
    draft: Eagle3Draft = field(repr=False)


class Table:
    """Cache of chains by version and answer; some 4 KiB each."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Chains] = {}
        self._texts: dict[tuple[int, float], np.ndarray] = {}

    def chains(self, served: Served, answer: Answer) -> Chains:
        key = served.version, answer.number
        if key not in self._known:
            self._known[key] = decode_again(served.draft, answer.example)
        return self._known[key]

    def text(self, answer: Answer, share: float) -> np.ndarray:
        """[N] how many tokens from each position on are remembered, `TEXT_DEPTH` at most."""
        key = answer.number, share
        if key not in self._texts:
            header, num = answer.trace.header, answer.length
            # The answer's first token comes with the prompt; the row of each token gives the next one.
            first = header.num_prompt_tokens - header.first_position
            surest_N = answer.trace.target_topk_logprobs[first : first + num, 0].argsort(kind="stable")[::-1]
            counts = np.zeros(num + 1, np.int64)
            remembered = set(surest_N[: round(share * num)].tolist())
            for place in reversed(range(num)):
                counts[place] = min(counts[place + 1] + 1, TEXT_DEPTH) if place in remembered else 0
            self._texts[key] = counts
        return self._texts[key]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Milliseconds of a round by batch size from 1: decoding plainly, and drafting."""

    plain_ms: tuple[float, ...]
    round_ms: tuple[float, ...]
    spread: float
    """Standard deviation of the logarithm of a round's time, around an unchanged mean."""

    def draw_s(self, rng: random.Random, *, batch: int, drafted: bool) -> float:
        mean_ms = (self.round_ms if drafted else self.plain_ms)[batch - 1]
        return mean_ms / 1000 * math.exp(rng.gauss(-(self.spread**2) / 2, self.spread))


@dataclass
class _Running:
    request_id: str
    answer: Answer
    at: int = 0
    num_rounds: int = 0
    num_of_text: int = 0
    """Rounds in which earlier text proposed."""
    rounds: list[tuple[int, int, Chains]] = field(default_factory=list)
    """(position, version, its chains) of each round with proposals."""


class ReplayEngine:
    """Serves `traffic()` to a number of clients, with the methods that `DraftFollower` calls. For one thread.

    `clients` is the number of costs. A client asks as soon as its answer has ended, all of them together at most
    `per_minute` times a minute. An install takes as long as loading did, and meanwhile the rounds go on.
    """

    def __init__(
        self,
        load: Callable[[int], Eagle3Draft],
        version: int,
        traffic: Callable[[], Answer],
        *,
        costs: Costs,
        per_minute: float,
        on_round: Callable[[WatchedRound], object],
        on_trace: Callable[[Trace], object],
        seed: int = 0,
        table: Table | None = None,
    ) -> None:
        """`table` may be shared with another engine whose versions have the same weights."""
        self.served = Served(version, load(version))
        self.table = table or Table()
        self.remembered = 0.0
        """Share of every answer's tokens that earlier text proposes; callers may set it."""
        self.clock_s = 0.0
        self.num_requests = self.num_rounds = 0
        self.rounds_of: Counter[int] = Counter()
        self.seconds_of: defaultdict[int, float] = defaultdict(float)
        """Seconds in service by version."""
        self._load, self._traffic, self._costs = load, traffic, costs
        self._clients, self._interval_s, self._next_s = len(costs.round_ms), 60 / per_minute, 0.0
        self._on_round, self._on_trace = on_round, on_trace
        self._control, self._rng = ControlShare(CONTROL_SHARE, seed), random.Random(seed)
        self._running: list[_Running] = []

    @property
    def draft_version(self) -> int:
        return self.served.version

    def install_draft(self, version: int) -> SwapReport:
        """Raises DraftError or StoreError; the version in service then stays."""
        started_s = time.perf_counter()
        served = Served(version, self._load(version))
        self.run_until(self.clock_s + time.perf_counter() - started_s)
        previous, self.served = self.served, served
        return SwapReport(version=version, previous=previous.version, stall_ms=0.0, step=self.num_rounds)

    def run_until(self, end_s: float) -> None:
        while self.clock_s < end_s:
            self._admit()
            if self._running:
                self._round()
            else:
                self._pass(min(self._next_s, end_s) - self.clock_s)

    def _admit(self) -> None:
        while len(self._running) < self._clients and self._next_s <= self.clock_s:
            self._running.append(_Running(f"replay-{self.num_requests}", self._traffic()))
            self.num_requests += 1
            self._next_s = max(self._next_s + self._interval_s, self.clock_s)

    def _pass(self, seconds: float) -> None:
        self.clock_s += seconds
        self.seconds_of[self.draft_version] += seconds

    def _round(self) -> None:
        batch, version = len(self._running), self.draft_version
        drafted = not self._control.is_control(batch)
        from_text = [self._remembered(one) if drafted else 0 for one in self._running]
        num_asked = from_text.count(0) if drafted else 0
        by_text = TEXT_DEPTH * (batch - from_text.count(0))
        seconds = self._costs.draw_s(self._rng, batch=batch, drafted=num_asked > 0) * (1 + ROW_SHARE * by_text)
        self._pass(seconds)
        self.num_rounds += 1
        self.rounds_of[version] += 1
        verifications, committed = [], 0
        for one, accepted in zip(self._running, from_text, strict=True):
            start = one.at
            one.num_rounds += 1
            one.num_of_text += accepted > 0
            if drafted and not accepted:
                accepted = self._verify(one)
                header = one.answer.trace.header
                quarters = math.ceil(4 * one.num_of_text / one.num_rounds)
                stratum = stratum_of(header.domain, header.sampling)._replace(remembered=quarters)
                verifications.append(Verification(one.request_id, stratum, accepted, DEPTH))
            one.at = min(start + accepted + 1, one.answer.length)
            committed += one.at - start
        self._on_round(
            WatchedRound(
                version=version,
                batch=batch,
                drafted=drafted,
                seconds=seconds,
                committed=committed,
                verifications=tuple(verifications),
                proposed=Proposed(DEPTH * num_asked, by_text) if num_asked else None,
            )
        )
        for one in [one for one in self._running if one.at == one.answer.length]:
            self._running.remove(one)
            self._on_trace(_trace_of(one))

    def _remembered(self, one: _Running) -> int:
        """How many of its next tokens earlier text proposes."""
        return int(self.table.text(one.answer, self.remembered)[one.at]) if self.remembered else 0

    def _verify(self, one: _Running) -> int:
        """Accepted proposals."""
        chains = self.table.chains(self.served, one.answer)
        if chains.tokens[one.at, 0] >= 0:
            one.rounds.append((one.at, self.draft_version, chains))
        return int(chains.accepted[one.at])


def _trace_of(one: _Running) -> Trace:
    """The recorded trace as if it had been served now."""
    trace, rounds = one.answer.trace, one.rounds
    header = msgspec.structs.replace(
        trace.header,
        trace_id=one.request_id,
        request_id=one.request_id,
        engine_id="replay",
        created_ms=now_ms(),
    )
    tokens = np.stack([chains.tokens[at] for at, _, chains in rounds]) if rounds else np.zeros((0, DEPTH), np.int32)
    return replace(
        trace,
        header=header,
        branches=None,
        rounds=VerifyRounds(
            # The first round stands at the answer's first token.
            position=np.array([header.num_prompt_tokens + at for at, _, _ in rounds], np.int32),
            draft_tokens=tokens,
            draft_logprobs=np.array([chains.logprobs[at] for at, _, chains in rounds], np.float16).reshape(
                tokens.shape
            ),
            draft_parents=np.broadcast_to(np.arange(-1, DEPTH - 1, dtype=np.int8), tokens.shape).copy(),
            num_accepted=np.array([chains.accepted[at] for at, _, chains in rounds], np.int8),
            draft_version=np.array([version for _, version, _ in rounds], np.int32),
        ),
    )
