"""Simulated rounds for tests of the watch: verifications that accept as an accept length says, and what rounds cost."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from serving.engine import Proposed, Stratum, Verification, WatchedRound
from serving.hotswap.breaker import LiveWatch, TrialOutcome, Verdict

CHAT, CODE = Stratum("chat", "t0.7"), Stratum("code", "greedy")
DEPTH = 4
_REQUEST_VERIFICATIONS = 50


def acceptance_for(length: float) -> float:
    """The probability of each proposal's acceptance with which chains of `DEPTH` commit `length` tokens on average."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        is_short = sum(middle**step for step in range(DEPTH + 1)) < length
        low, high = (middle, high) if is_short else (low, middle)
    return low


def rounds(
    rng: random.Random,
    version: int,
    lengths: Mapping[Stratum, float],
    *,
    mix: Mapping[Stratum, float] | None = None,
    spread: float = 0.0,
    batch: int = 1,
    depth: int = DEPTH,
    control_share: float = 0.0,
    round_s: float = 0.04,
    plain_s: float = 0.03,
    target_version: int = 0,
) -> Iterator[WatchedRound]:
    """Endless rounds of requests drawn from the strata by `mix`, which differ in their acceptance by about `spread`."""
    strata = list(lengths)
    weights = [(mix or dict.fromkeys(strata, 1.0))[stratum] for stratum in strata]
    means = {stratum: acceptance_for(length) for stratum, length in lengths.items()}
    running: list[tuple[str, Stratum, float, int]] = []
    number = 0
    while True:
        while len(running) < batch:
            stratum = rng.choices(strata, weights)[0]
            rate = min(max(rng.gauss(means[stratum], spread), 0.0), 0.98)
            running.append((f"{version}-{number}", stratum, rate, _REQUEST_VERIFICATIONS))
            number += 1
        if rng.random() < control_share:
            seconds = plain_s * rng.uniform(0.9, 1.1)
            yield WatchedRound(version, batch, False, seconds, batch, (), target_version=target_version)
            continue
        verifications = []
        for request_id, stratum, rate, _ in running:
            accepted = 0
            while accepted < depth and rng.random() < rate:
                accepted += 1
            verifications.append(Verification(request_id, stratum, accepted, depth))
        running = [(*row, left - 1) for *row, left in running if left > 1]  # type: ignore[misc]
        committed = batch + sum(verification.accepted for verification in verifications)
        seconds = round_s * rng.uniform(0.9, 1.1)
        yield WatchedRound(
            version,
            batch,
            True,
            seconds,
            committed,
            tuple(verifications),
            Proposed(batch * depth),
            target_version=target_version,
        )


def serve(watch: LiveWatch, source: Iterator[WatchedRound], count: int) -> None:
    for _ in range(count):
        watch.observe(next(source))


def take_in(watch: LiveWatch, source: Iterator[WatchedRound], count: int) -> None:
    """Serve, and look once."""
    serve(watch, source, count)
    watch.update()


def run_trial(
    watch: LiveWatch, version: int, source: Iterator[WatchedRound], *, look_every: int = 50, most_rounds: int = 20_000
) -> Verdict:
    """Serve a version until its trial ends; `look_every` rounds are a poll."""
    watch.update()
    watch.begin(version)
    for _ in range(0, most_rounds, look_every):
        take_in(watch, source, look_every)
        verdict = watch.judge()
        if verdict.outcome is not TrialOutcome.WATCHING:
            watch.end(is_kept=verdict.outcome is TrialOutcome.PROMOTED)
            return verdict
    raise AssertionError(f"no verdict after {most_rounds} rounds: {verdict}")
