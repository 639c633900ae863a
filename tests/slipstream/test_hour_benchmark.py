"""The hour benchmark: its engine decodes like the local one, and its falls are the ones that are there."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.answers import BURST, SHORTEST, Traffic, read_answers
from benchmarks.falls import Best, Fall, Seen, falls, lengths
from benchmarks.hour import trainer_settings
from benchmarks.replayed import Answer, Costs, ReplayEngine, Served, decode_again, pace_of
from serving.engine import GenerateRequest
from serving.evidence import WatchedRound
from speculator.bfloat16 import autocast
from speculator.errors import ConfigError
from speculator.model import Eagle3Draft
from speculator.sampling import SamplingParams
from speculator.trace import Trace, check_trace
from tests.serving.local.harness import toy_engine
from tests.toy import random_draft
from tests.trainer.answers import ANSWER_TOKENS, answer_traces
from tests.trainer.examples import batch_of, config_for, example_of, record
from trainer.config import ENV_PREFIX
from trainer.evaluate import predict_acceptance
from trainer.step import Learner

COSTS = Costs(plain_ms=(10.0, 10.0), round_ms=(20.0, 20.0), spread=0.0)


@pytest.fixture(scope="module")
def learner(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Learner:
    draft = random_draft(toy_model, seed=1, draft_vocab_size=40, scale=0.2)
    learner = Learner(draft, config_for(toy_model, tmp_path_factory.mktemp("learner"), autocast=False))
    batch = batch_of(answer_traces(toy_model, num_traces=8), learner.draft)
    for _ in range(200):
        learner.step(batch)
    return learner


def answers_of(traces: Sequence[Trace], draft: Eagle3Draft) -> list[Answer]:
    return [Answer(number=number, trace=trace, example=example_of(trace, draft)) for number, trace in enumerate(traces)]


class Replay:
    """An engine over these drafts, and what it told."""

    def __init__(self, drafts: dict[int, Eagle3Draft], answers: Sequence[Answer], *, per_minute: float = 1e9) -> None:
        self.rounds: list[WatchedRound] = []
        self.traces: list[Trace] = []
        turn = iter(range(10**9))
        self.engine = ReplayEngine(
            drafts.__getitem__,
            1,
            lambda _: answers[next(turn) % len(answers)],
            costs=COSTS,
            per_minute=per_minute,
            on_round=self.rounds.append,
            on_trace=self.traces.append,
        )


@pytest.mark.parametrize("min_confidence", [0.0, 0.15])
def test_an_answer_decoded_again_has_the_rounds_of_its_trace(
    toy_model: Path, learner: Learner, min_confidence: float
) -> None:
    served = random_draft(toy_model, seed=1, draft_vocab_size=40)
    served.load_state_dict(learner.draft.state_dict())
    prompts = torch.randint(6, 47, (6, 6), generator=torch.Generator().manual_seed(0)).tolist()
    with toy_engine(toy_model, draft=served, depth=4, min_confidence=min_confidence) as harness:
        for index, prompt in enumerate(prompts):
            request = GenerateRequest(
                request_id=str(index),
                prompt_token_ids=tuple(prompt),
                max_tokens=40,
                sampling=SamplingParams(temperature=0.0),
                ignore_eos=True,
            )
            harness.ask(request)
    same = []
    for trace in harness.traces:
        chains = decode_again(
            learner.draft, example_of(trace, learner.draft), min_confidence=min_confidence, autocast=False
        )
        rounds = trace.rounds
        for row, position in enumerate(rounds.position - trace.header.num_prompt_tokens):
            if position + 5 > len(chains.accepted):
                continue  # the end of the span cuts what can be told about it
            accepted = int(rounds.num_accepted[row])
            known = min(accepted + 1, rounds.draft_tokens.shape[1])
            served = rounds.draft_tokens[row, :known].tolist()
            same.append((chains.accepted[position], chains.tokens[position, :known].tolist()) == (accepted, served))
    assert len(same) > 60
    assert sum(same) >= 0.95 * len(same), "but for ties in the rounded features of a trace"


def test_pace_counts_verifications() -> None:
    assert pace_of(np.array([1, 0, 0])).tolist() == [0, 0.5, 1, 2]
    assert pace_of(np.array([0, 4])).tolist() == [0, 1, 2], "nothing is committed behind the end"


def test_a_replay_serves_as_offline_acceptance_predicts(toy_model: Path, learner: Learner) -> None:
    answers = answers_of(answer_traces(toy_model, num_traces=6, seed=5), learner.draft)
    replay = Replay({1: learner.draft}, answers)
    while len(replay.traces) < 6:
        replay.engine.run_until(replay.engine.clock_s + 0.01)
    first = [step for step in replay.engine.steps if step.answer is answers[0]]
    gaps = [later.start - earlier.stop for earlier, later in itertools.pairwise(first) if later.start]
    assert set(gaps) <= {0, 1}, "control rounds commit one token and are not among them"
    assert gaps.count(1) <= 3
    with autocast(learner.draft.embed.device, is_wanted=True):
        found = predict_acceptance(learner.draft, [answers[0].example], depths=[4], min_confidence=0.15)[4]
    pace = replay.engine.table.chains(replay.engine.served, answers[0]).pace
    assert pace[-1] == found.num_rounds
    assert answers[0].length == found.num_committed == ANSWER_TOKENS - 1
    for trace in replay.traces:
        check_trace(trace)
    assert len({trace.header.trace_id for trace in replay.traces}) == len(replay.traces)


def test_a_swap_lands_between_two_rounds_and_the_clock_is_that_of_the_rounds(toy_model: Path, learner: Learner) -> None:
    answers = answers_of(answer_traces(toy_model, num_traces=2), learner.draft)
    replay = Replay({1: learner.draft, 2: random_draft(toy_model, seed=3, draft_vocab_size=40)}, answers)
    engine = replay.engine
    engine.run_until(0.1)
    report = engine.install_draft(2)
    assert (report.version, report.previous, engine.draft_version) == (2, 1, 2)
    with pytest.raises(KeyError):
        engine.install_draft(3)
    assert engine.draft_version == 2
    while not any(2 in trace.rounds.draft_version for trace in replay.traces):
        engine.run_until(engine.clock_s + 0.1)
    mixed = next(trace for trace in replay.traces if 2 in trace.rounds.draft_version)
    assert sorted(mixed.rounds.draft_version.tolist()) == mixed.rounds.draft_version.tolist()
    assert [one.version for one in replay.rounds] == sorted(one.version for one in replay.rounds)
    assert sum(one.seconds for one in replay.rounds) == pytest.approx(engine.clock_s)
    assert sum(engine.rounds_of.values()) == len(replay.rounds)
    assert sum(engine.seconds_of.values()) == pytest.approx(engine.clock_s)
    controls = [one for one in replay.rounds if not one.drafted]
    assert all(one.committed == one.batch and not one.verifications for one in controls)


def test_no_more_requests_than_the_rate_and_none_while_all_clients_wait(toy_model: Path, learner: Learner) -> None:
    answers = answers_of(answer_traces(toy_model, num_traces=2), learner.draft)
    slow = Replay({1: learner.draft}, answers, per_minute=6)
    slow.engine.run_until(60.0)
    assert slow.engine.num_requests == 6
    assert slow.engine.clock_s >= 60
    busy = Replay({1: learner.draft}, answers)
    busy.engine.run_until(2.0)
    assert busy.engine.num_requests - len(busy.traces) == 2
    assert max(one.batch for one in busy.rounds) == 2


def labelled(traces: Sequence[Trace], domains: Sequence[str]) -> list[Trace]:
    return [
        dataclasses.replace(trace, header=msgspec.structs.replace(trace.header, domain=domains[index % len(domains)]))
        for index, trace in enumerate(traces)
    ]


def test_traffic_shifts_repeats_only_when_it_has_to_and_has_a_burst(toy_model: Path, learner: Learner) -> None:
    traces = labelled(answer_traces(toy_model, num_traces=12), "abcd")
    answers = answers_of(traces, learner.draft)

    def domains_at(at_s: float) -> set[str]:
        traffic = Traffic(answers, end_s=100.0, seed=0)
        by_domain: dict[str, Counter[int]] = {}
        for answer in (traffic(at_s) for _ in range(60)):
            by_domain.setdefault(answer.trace.header.domain, Counter())[answer.number] += 1
        assert all(len(asked) == 3 and max(asked.values()) - min(asked.values()) <= 1 for asked in by_domain.values())
        return set(by_domain)

    assert domains_at(1.0) == {"a", "b"}
    assert domains_at(40.0) == {"c", "d"}
    assert domains_at(90.0) == set("abcd")
    burst = Traffic(answers, end_s=100.0, seed=0)
    counts = Counter(burst(100 * BURST[0]).number for _ in range(100))
    assert counts.most_common(1)[0][1] > 60
    with pytest.raises(ConfigError, match="one domain"):
        Traffic(answers[:1], end_s=1.0, seed=0)


def test_only_greedy_answers_of_some_length_are_served(toy_model: Path, learner: Learner, tmp_path: Path) -> None:
    traces = answer_traces(toy_model, num_traces=60)
    sampled = msgspec.structs.replace(traces[0].header, sampling=SamplingParams(temperature=1.0))
    path = record(tmp_path / "toy.rec", [dataclasses.replace(traces[0], header=sampled), *traces[1:]])
    answers = read_answers(path, learner.draft)
    assert len(answers) == 59
    assert [answer.number for answer in answers] == list(range(59))
    assert all(answer.length >= SHORTEST - 1 for answer in answers)
    with pytest.raises(ConfigError, match="usable greedy"):
        read_answers(record(tmp_path / "few.rec", traces[:5]), learner.draft)


def test_the_best_is_the_better_one_and_is_its_own_measure(toy_model: Path, learner: Learner) -> None:
    answers = answers_of(answer_traces(toy_model, num_traces=6), learner.draft)
    useless = random_draft(toy_model, seed=3, draft_vocab_size=40)
    replay = Replay({1: useless}, answers)
    engine = replay.engine
    engine.run_until(1.0)
    best = Best(engine.served, engine.table)
    steps = list(engine.steps)
    best.take(engine.steps)
    assert engine.steps == []
    assert [one.version for one in best.seen] == [1] * len(steps)
    assert lengths(best.seen)[0] == pytest.approx(lengths(best.seen)[1], rel=0.02), "but for control rounds"
    best.meet(Served(2, learner.draft))
    assert best.served.version == 2
    best.meet(Served(3, useless))
    assert best.served.version == 2
    best.seen.clear()
    best.take(steps)
    served, of_best = lengths(best.seen)
    assert of_best > 1.05 * served


def seen(best_rounds: Sequence[float], versions: Sequence[int] | None = None) -> list[Seen]:
    """Verifications of rounds of two, 0.1 s each."""
    return [
        Seen(
            round=index // 2,
            at_s=0.1 * (index // 2),
            version=versions[index] if versions else 1,
            committed=1,
            best_rounds=best,
        )
        for index, best in enumerate(best_rounds)
    ]


def test_a_fall_is_where_the_window_is_below_the_floor() -> None:
    bad = [1.0] * 100 + [0.5] * 40 + [1.0] * 100
    (fall,) = falls(seen(bad, [1] * 100 + [2] * 40 + [1] * 100), 20)
    # Below 0.9 while five of twenty are bad: from the fifth bad one until only four are left in the window.
    assert fall.at_s == pytest.approx(0.1 * (104 // 2))
    assert fall.rounds == (139 + 15) // 2 - 104 // 2 + 1
    assert fall.seconds == pytest.approx(0.1 * (fall.rounds - 1))
    assert fall.lowest == pytest.approx(0.5)
    assert fall.versions == {1, 2}


def test_falls_that_last_and_falls_that_are_none() -> None:
    assert falls(seen([1.0] * 50), 20) == []
    assert falls(seen([0.5] * 10), 20) == [], "too little to say"
    assert falls(seen([1.0, 0.85] * 50), 20) == [], "7.5% less is above the floor"
    (whole,) = falls(seen([0.8] * 60), 20)
    assert whole.rounds == 60 // 2 - 19 // 2
    again = [0.5] * 30 + [1.0] * 80
    (one,) = falls(seen([1.0] * 30 + again * 3), 10)
    assert one.rounds > 100, "short returns are no end"
    assert len(falls(seen([1.0] * 30 + [0.5] * 30 + [1.0] * 140 + again), 10)) == 2


def test_random_weights_have_fifty_rounds_or_five_seconds_and_others_two_thousand() -> None:
    def overrun(rounds: int, seconds: float, versions: set[int]) -> float:
        fall = Fall(at_s=0, rounds=rounds, seconds=seconds, lowest=0.5, versions=frozenset(versions))
        return fall.overrun(frozenset({7}))

    assert overrun(100, 2.5, {1, 7}) == 0.5, "whichever is later"
    assert overrun(40, 10.0, {7}) == 0.8
    assert overrun(100, 10.0, {7}) == 2.0
    assert overrun(1000, 100.0, {1, 2}) == 0.5


def test_lengths_are_tokens_a_verification() -> None:
    rows = [row._replace(committed=2) for row in seen([random.Random(0).random() for _ in range(10)])]
    served, best = lengths(rows)
    assert served == 2.0
    assert best == pytest.approx(20 / sum(row.best_rounds for row in rows))


def test_the_trainers_intervals_shrink_with_time() -> None:
    settings = trainer_settings(5.0)
    assert settings[f"{ENV_PREFIX}PUBLISH_INTERVAL_S"] == "6.0"
    assert settings[f"{ENV_PREFIX}PUBLISH_PAUSE_S"] == "60.0"
