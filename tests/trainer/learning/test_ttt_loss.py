"""The whole loss of a batch, proposal terms included, against sums over chains that are drafted one by one."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from speculator.draft.eagle3 import Eagle3Draft
from speculator.draft.initialization import fresh_draft
from speculator.draft.sampling_params import SamplingParams
from speculator.errors import ConfigError
from speculator.trace import Trace
from tests.fixtures.traces import with_rounds
from tests.trainer.answers import PROMPT_TOKENS
from tests.trainer.examples import batch_of, config_for
from tests.trainer.learning.test_batch import served_as, with_trees
from tests.trainer.learning.test_ttt_unroll import attend_causally
from trainer.config import load_config
from trainer.learning.losses.mix import LossMix
from trainer.learning.optimizer_step import Learner
from trainer.learning.ttt import ttt_loss

DEPTH = 3
BASELINE = 0.3
SAMPLED = SamplingParams(temperature=0.7, top_k=12)


@pytest.fixture(scope="module")
def learnt(model_dir: Path, traces: list[Trace], tmp_path_factory: pytest.TempPathFactory) -> Eagle3Draft:
    """A draft that is right often enough to have chains, and wrong often enough to have rejections."""
    learner = Learner(
        fresh_draft(model_dir, draft_vocab_size=30, seed=0),
        config_for(model_dir, tmp_path_factory.mktemp("learnt"), autocast=False),
    )
    for _ in range(30):
        learner.step(batch_of(traces[:3], learner.draft))
    return learner.draft


def logits_at(draft: Eagle3Draft, trace: Trace, base: int, step: int) -> Tensor:
    """The draft's logits in step `step` of the chain from `base`, its whole history recomputed along the text."""
    tokens = torch.from_numpy(trace.token_ids).long()
    fused = draft.fuse(trace.aux_hidden[: base + 1])
    for _ in range(step + 1):
        positions = torch.arange(len(fused)) + trace.header.first_position
        out = draft(tokens[1 : 1 + len(fused)][None], fused[None], positions[None], attend_causally)[0]
        fused = torch.cat([fused, out[-1:]])
    return draft.logits(out[-1])


class Slow:
    """Sums over states and verdicts of one trace, one at a time, in Python."""

    def __init__(self, draft: Eagle3Draft, trace: Trace, mix: LossMix) -> None:
        self.draft, self.trace, self.mix = draft, trace, mix
        self.batch = batch_of([trace], draft)
        self.first_base = PROMPT_TOKENS - 2
        self.target_ids = draft.target_ids.tolist()

    def q(self, base: int, step: int) -> list[float]:
        temperature = self.trace.header.sampling.temperature or 1.0
        return (logits_at(self.draft, self.trace, base, step) / temperature).softmax(-1).tolist()

    def p(self, base: int, step: int) -> tuple[list[tuple[int, float]], float]:
        """(kept draft ids with probabilities, likeliest first; tail) from the batch's labels, tested elsewhere."""
        row = self.batch.labels[torch.tensor([base - self.first_base + 1 + step])]
        kept = zip(row.draft_ids[0].tolist(), row.probs[0].tolist(), strict=True)
        return list(kept), float(row.tail)

    def text_loss(self) -> float:
        T, total, num_bases = len(self.trace.token_ids), 0.0, 0
        for base in range(self.first_base, T - 2):
            num_bases += 1
            reach = 1.0
            for step in range(DEPTH):
                if base + 2 + step >= T:
                    break
                q, (kept, tail) = self.q(base, step), self.p(base, step)
                kl = -sum(p * math.log(q[x]) for x, p in kept if p)
                overlap = sum(min((1 - tail) * p, q[x]) for x, p in kept if p)
                here = self.mix.forward_kl * kl + self.mix.acceptance * (1 - overlap)
                total += self.mix.step_discount**step * here
                if not self.trace.header.sampling.temperature:
                    overlap = q[kept[0][0]] if kept[0][1] else 0.0
                reach *= overlap
                total -= self.mix.expected_length * reach
                best = max(range(len(q)), key=q.__getitem__)
                if self.mix.chains == "own" and self.target_ids[best] != self.trace.token_ids[base + 2 + step]:
                    break
        return total / num_bases

    def proposal_loss(self) -> tuple[float, float, int, int]:
        """(policy gradient, and weighted discard and margin, a base; verdicts, accepted ones), each node's path walked
        from its root.
        """
        text, rounds = self.trace.token_ids.tolist(), self.trace.rounds
        reinforced = dropped = 0.0
        num_verdicts = num_accepted = 0
        for row in range(len(rounds.position)):
            at = int(rounds.position[row])
            for node in range(rounds.draft_tokens.shape[1]):
                token = int(rounds.draft_tokens[row, node])
                path, parent = [], int(rounds.draft_parents[row, node])
                while parent >= 0:
                    path.insert(0, int(rounds.draft_tokens[row, parent]))
                    parent = int(rounds.draft_parents[row, parent])
                step, base = len(path), at - 1
                if token not in self.target_ids or path != text[at + 1 : at + 1 + step]:
                    continue
                if step >= DEPTH or at + 1 + step >= len(text):
                    continue
                x, accepted = self.target_ids.index(token), token == text[at + 1 + step]
                q, (kept, _) = self.q(base, step), self.p(base, step)
                ratio = q[x] / math.exp(float(rounds.draft_logprobs[row, node]))
                discount = self.mix.step_discount**step
                advantage = float(accepted) - BASELINE
                reinforced -= discount * self.weight(ratio, advantage) * advantage * math.log(max(q[x], 1e-4))
                num_verdicts += 1
                num_accepted += accepted
                if not accepted:
                    served = kept if self.trace.header.sampling.temperature else [(kept[0][0], float(kept[0][1] > 0))]
                    weight = discount * self.weight(ratio, -1.0)
                    dropped += self.mix.discard * weight * self.divergence(q, served, x)
                    if self.mix.margin and text[at + 1 + step] in self.target_ids:
                        y = self.target_ids.index(text[at + 1 + step])
                        dropped += self.mix.margin * weight * math.log(1 + q[x] / q[y])
        num_bases = len(self.batch.rows)
        return reinforced / num_bases, dropped / num_bases, num_verdicts, num_accepted

    def weight(self, ratio: float, advantage: float) -> float:
        low, high = self.mix.correction.clip
        clipped = max(low, min(ratio, high))
        return {"none": 1.0, "cispo": clipped, "topr": 1.0 if advantage >= 0 else clipped}[self.mix.correction.name]

    def divergence(self, q: list[float], kept: list[tuple[int, float]], x: int) -> float:
        p = {token: probability for token, probability in kept if probability}
        likeliest = {token for token, probability in kept[: self.mix.discard_top_k] if probability}
        chosen = {*likeliest, x}
        p_total, q_total = sum(p.get(token, 0.0) for token in chosen), sum(q[token] for token in chosen)
        return p_total and sum(
            p[token] / p_total * math.log(p[token] / p_total * q_total / q[token]) for token in chosen if p.get(token)
        )


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SAMPLED])
@pytest.mark.parametrize(
    "text",
    [
        "forward_kl=1",
        "forward_kl=0.5,acceptance=1,step_discount=0.5",
        "forward_kl=1,chains=all",
        "forward_kl=1,discard=0.4,chains=all",
        "forward_kl=1,policy_gradient=0.7,discard=0.4,discard_top_k=3",
        "forward_kl=1,policy_gradient=0.7,discard=0.4,correction=cispo,clip_low=0.5,clip_high=1.5",
        "discard=1,correction=topr",
        "acceptance=1,expected_length=0.5",
        "forward_kl=1,expected_length=0.5,discard=0.3,margin=0.6,correction=topr",
        "forward_kl=1,expected_length=1,chains=all",
    ],
)
def test_the_loss_of_a_trace_with_trees_is_the_slow_sum(
    learnt: Eagle3Draft, traces: list[Trace], text: str, sampling: SamplingParams
) -> None:
    trace, mix = with_trees(served_as(traces[0], sampling), seed=9), LossMix.parse(text)
    slow = Slow(learnt, trace, mix)
    with torch.no_grad():
        found = ttt_loss(learnt, slow.batch, mix, num_steps=DEPTH, baseline=BASELINE)
        expected = slow.text_loss()
        if mix.uses_verdicts:
            reinforced, dropped, num_verdicts, num_accepted = slow.proposal_loss()
            expected += mix.policy_gradient * reinforced + dropped
            only_rejected = not mix.policy_gradient
            assert found.num_verdicts == (num_verdicts - num_accepted if only_rejected else num_verdicts)
            assert found.num_rewarded == (0 if only_rejected else num_accepted)
            assert min(num_accepted, num_verdicts - num_accepted) > 10
    assert found.num_labels == len(slow.batch.rows)
    assert found.num_accepted > 5
    assert found.loss.item() == pytest.approx(expected, rel=1e-4)


def test_first_proposals_are_counted_by_trace(learnt: Eagle3Draft, traces: list[Trace]) -> None:
    together = batch_of(traces[:3], learnt)
    with torch.no_grad():
        found = ttt_loss(learnt, together, LossMix.parse("forward_kl"), num_steps=DEPTH, baseline=0.0).first_steps
    for trace, (num_hits, num_labels) in zip(traces[:3], found, strict=True):
        target_ids, text = learnt.target_ids.tolist(), trace.token_ids.tolist()
        bases = range(PROMPT_TOKENS - 2, len(text) - 2)
        likeliest = [target_ids[int(logits_at(learnt, trace, base, 0).argmax())] for base in bases]
        assert num_labels == len(bases)
        assert num_hits == sum(token == text[base + 2] for base, token in zip(bases, likeliest, strict=True))


def test_verdicts_change_nothing_where_no_term_asks_for_them(learnt: Eagle3Draft, traces: list[Trace]) -> None:
    mix = LossMix.parse("forward_kl")
    with torch.no_grad():
        plain, treed = (
            ttt_loss(learnt, batch_of([trace], learnt), mix, num_steps=DEPTH, baseline=0.0)
            for trace in (traces[0], with_trees(traces[0], seed=9))
        )
    assert plain == treed
    assert treed.num_verdicts == 0


@torch.no_grad()
def drafted_by(draft: Eagle3Draft, trace: Trace) -> Trace:
    """The same text with the rounds that this draft would have had in service: greedy chains of DEPTH."""
    text, target_ids = trace.token_ids.tolist(), draft.target_ids.tolist()
    position, tokens, logprobs, accepted = [], [], [], []
    at = PROMPT_TOKENS
    while at < len(text) - 1:
        chain: list[int] = []
        scores: list[float] = []
        fused = draft.fuse(trace.aux_hidden[:at])
        read = torch.from_numpy(trace.token_ids[1 : at + 1]).long()
        for _ in range(DEPTH):
            out = draft(read[None], fused[None], torch.arange(len(fused))[None], attend_causally)[0]
            best = draft.logits(out[-1]).log_softmax(-1).max(-1)
            chain.append(target_ids[int(best.indices)])
            scores.append(float(best.values))
            fused, read = torch.cat([fused, out[-1:]]), torch.cat([read, torch.tensor(chain[-1:])])
        count = 0
        while count < DEPTH and at + 1 + count < len(text) and chain[count] == text[at + 1 + count]:
            count += 1
        position.append(at)
        tokens.append(chain)
        logprobs.append(scores)
        accepted.append(count)
        at += count + 1
    R = len(position)
    return with_rounds(
        trace,
        position=np.array(position, np.int32),
        draft_tokens=np.array(tokens, np.int32),
        draft_logprobs=np.array(logprobs, np.float16),
        draft_parents=np.tile(np.arange(-1, DEPTH - 1, dtype=np.int8), (R, 1)),
        num_accepted=np.array(accepted, np.int8),
        draft_version=np.ones(R, np.int32),
    )


def test_fresh_verdicts_at_the_recorded_rounds_are_the_recorded_ones(learnt: Eagle3Draft, traces: list[Trace]) -> None:
    """At temperature 0 a verdict follows from the draft and the text: what the draft in training proposes now is what
    it would have had recorded, and the recorded log-probabilities give ratios of one.
    """
    with torch.no_grad():
        trace = drafted_by(learnt, traces[0])
        batch = batch_of([trace], learnt)
        text = "policy_gradient=1,correction=cispo,clip_low=0,clip_high=100,step_discount=1"
        recorded = ttt_loss(learnt, batch, LossMix.parse(text), num_steps=DEPTH, baseline=0.2)
        plain = ttt_loss(learnt, batch, LossMix.parse(text.replace("cispo", "none")), num_steps=DEPTH, baseline=0.2)
        assert recorded.loss.item() == pytest.approx(plain.loss.item(), rel=2e-3)
        fresh = ttt_loss(learnt, batch, LossMix.parse(f"{text},verdicts=fresh"), num_steps=DEPTH, baseline=0.2)
    # Fresh verdicts exist at every base; recorded ones only where a round began.
    assert fresh.num_verdicts > recorded.num_verdicts > 0
    assert fresh.num_rewarded == fresh.num_accepted
    assert int(trace.rounds.num_accepted.sum()) == pytest.approx(recorded.num_rewarded, abs=DEPTH)


def test_proposal_terms_pull_against_what_was_rejected(learnt: Eagle3Draft, traces: list[Trace]) -> None:
    """A step down either term's gradient lowers the probability of the rejected proposals."""
    trace = drafted_by(learnt, traces[0])
    batch = batch_of([trace], learnt)
    rejected = batch.verdicts[~batch.verdicts.accepted]
    first = rejected[rejected.steps == 0]

    def log_q() -> float:
        with torch.no_grad():
            bases = (first.bases + PROMPT_TOKENS - 2).tolist()
            logits = torch.stack([logits_at(learnt, trace, base, 0) for base in bases])
        return float(logits.log_softmax(-1).gather(1, first.draft_ids[:, None]).mean())

    weights = {name: weight.detach().clone() for name, weight in learnt.named_parameters()}
    before = log_q()
    for text in ("discard=1", "policy_gradient=1"):
        learnt.zero_grad()
        ttt_loss(learnt, batch, LossMix.parse(text), num_steps=DEPTH, baseline=0.5).loss.backward()
        with torch.no_grad():
            for weight in learnt.parameters():
                assert weight.grad is not None
                weight -= 1e-3 * weight.grad
        assert log_q() < before
        with torch.no_grad():
            for name, weight in learnt.named_parameters():
                weight.copy_(weights[name])
    learnt.zero_grad()


@pytest.mark.parametrize("verdicts", ["recorded", "fresh"])
def test_the_baseline_follows_acceptance_and_survives_a_restart(
    model_dir: Path, tmp_path: Path, traces: list[Trace], verdicts: str
) -> None:
    config = config_for(model_dir, tmp_path, loss=f"forward_kl,policy_gradient=0.1,discard=0.1,verdicts={verdicts}")
    learner = Learner(fresh_draft(model_dir, draft_vocab_size=40, seed=0), config)
    batches = [batch_of([with_trees(trace, seed=2)], learner.draft) for trace in traces[:4]]
    first = learner.step(batches[0])
    assert first.applied
    assert first.num_verdicts > 0
    if verdicts == "recorded":
        judged = batches[0].verdicts
        useful = judged.steps < config.ttt_steps
        assert learner.baseline == pytest.approx(float(judged.accepted[useful].float().mean()), abs=1e-6)
    reports = [first, *(learner.step(batch) for batch in batches[1:3])]
    assert learner.baseline == pytest.approx(
        sum(report.num_rewarded / report.num_verdicts for report in reports) / len(reports)
    )
    restored = Learner(fresh_draft(model_dir, draft_vocab_size=40, seed=0), config)
    restored.load_state({name: tensor.clone() for name, tensor in learner.state().items()})
    assert restored.baseline == learner.baseline
    assert restored.step(batches[3]) == learner.step(batches[3])
    assert restored.baseline == learner.baseline


def test_a_batch_without_verdicts_is_harmless_where_only_they_would_teach(
    model_dir: Path, tmp_path: Path, traces: list[Trace]
) -> None:
    learner = Learner(
        fresh_draft(model_dir, draft_vocab_size=40, seed=0),
        config_for(model_dir, tmp_path, loss="policy_gradient,discard,correction=topr"),
    )
    before = {name: weight.detach().clone() for name, weight in learner.draft.named_parameters()}
    report = learner.step(batch_of(traces[:1], learner.draft))
    assert (report.applied, report.num_verdicts, report.loss) == (True, 0, 0.0)
    assert all(torch.equal(weight, before[name]) for name, weight in learner.draft.named_parameters())


def test_a_loss_that_does_not_exist_is_refused_where_it_is_set(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"model_dir": model_dir, "redis_url": "-", "model_key": "-", "store_dir": tmp_path, "state_dir": tmp_path}
    monkeypatch.setenv("SLIPSTREAM_TRAINER_LOSS", "kl")
    with pytest.raises(ConfigError, match=r"SLIPSTREAM_TRAINER_LOSS.*forward_kl"):
        load_config(**values)
    monkeypatch.setenv("SLIPSTREAM_TRAINER_LOSS", "forward_kl,discard=0.5")
    assert load_config(**values).loss == "forward_kl,discard=0.5"
