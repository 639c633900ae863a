"""The engine of benchmarks.repeats decodes recorded answers as the local engine would, and its traffic is even."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks.answers import SHORTEST, Traffic, read_answers
from benchmarks.replayed import Answer, Costs, ReplayEngine, decode_again
from serving.engine import GenerateRequest, WatchedRound
from speculator.draft.eagle3 import Eagle3Draft, autocast
from speculator.draft.sampling_params import SamplingParams
from speculator.errors import ConfigError
from speculator.trace import Trace, check_trace
from tests.fixtures.toy import random_draft
from tests.serving.local.harness import fixed_engine
from tests.trainer.answers import ANSWER_TOKENS, answer_traces
from tests.trainer.examples import batch_of, config_for, example_of, record
from trainer.learning.optimizer_step import Learner
from trainer.release.acceptance import predict_acceptance

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
            lambda: answers[next(turn) % len(answers)],
            costs=COSTS,
            per_minute=per_minute,
            on_round=self.rounds.append,
            on_trace=self.traces.append,
        )


def test_an_answer_decoded_again_has_the_rounds_of_its_trace(toy_model: Path, learner: Learner) -> None:
    served = random_draft(toy_model, seed=1, draft_vocab_size=40)
    served.load_state_dict(learner.draft.state_dict())
    prompts = torch.randint(6, 47, (6, 6), generator=torch.Generator().manual_seed(0)).tolist()
    with fixed_engine(toy_model, draft=served, depth=4) as harness:
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
        chains = decode_again(learner.draft, example_of(trace, learner.draft), autocast=False)
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


def test_a_replay_serves_as_offline_acceptance_predicts(toy_model: Path, learner: Learner) -> None:
    answers = answers_of(answer_traces(toy_model, num_traces=6, seed=5), learner.draft)
    replay = Replay({1: learner.draft}, answers)
    while len(replay.traces) < 6:
        replay.engine.run_until(replay.engine.clock_s + 0.01)
    with autocast(learner.draft.embed.device, is_wanted=True):
        found = predict_acceptance(learner.draft, [answers[0].example], depths=[4])[4]
    accepted = replay.engine.table.chains(replay.engine.served, answers[0]).accepted
    at = num_rounds = 0
    while at < answers[0].length:
        at, num_rounds = at + int(accepted[at]) + 1, num_rounds + 1
    assert num_rounds == found.num_rounds
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


def test_traffic_is_of_all_domains_and_repeats_no_answer_before_all_of_its_domain_came(
    toy_model: Path, learner: Learner
) -> None:
    answers = answers_of(labelled(answer_traces(toy_model, num_traces=12), "abcd"), learner.draft)
    traffic, by_domain = Traffic(answers, seed=0), dict[str, Counter[int]]()
    for answer in (traffic() for _ in range(60)):
        by_domain.setdefault(answer.trace.header.domain, Counter())[answer.number] += 1
    assert set(by_domain) == set("abcd")
    assert all(len(asked) == 3 and max(asked.values()) - min(asked.values()) <= 1 for asked in by_domain.values())


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
