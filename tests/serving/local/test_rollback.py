"""A useless draft comes into service under load: it is taken back, and nobody who asks notices but in speed."""

from __future__ import annotations

from pathlib import Path

import redis
import torch

from serving.hotswap.breaker import LiveWatch
from serving.hotswap.follower import DraftFollower
from speculator.draft.eagle3 import Eagle3Draft
from speculator.redis.control_plane import DraftPointer
from speculator.versions.lifecycle import Lifecycle, VersionState
from tests.fixtures.toy import make_toy_model, random_draft
from tests.serving.local.harness import fixed_engine

PROMPTS = ["a", "7", "what?", "6"]
FAVOURITE = 29
"""The token that most of their answers consist of."""
WAY = (VersionState.WRITTEN, VersionState.VALIDATED, VersionState.SCORED)


def _draft(model_dir: Path, *, scale: float) -> Eagle3Draft:
    """Random weights; with scale 0 it proposes the first token of its vocabulary, which is the favourite."""
    draft = random_draft(model_dir, seed=9, draft_vocab_size=16, scale=scale)
    draft.d2t.copy_(torch.full_like(draft.d2t, FAVOURITE))
    return draft


def test_a_useless_draft_is_taken_back_under_load(tmp_path: Path, redis_client: redis.Redis) -> None:
    model_dir = make_toy_model(tmp_path / "toy")
    good, useless = _draft(model_dir, scale=0.0), _draft(model_dir, scale=1.0)
    with fixed_engine(model_dir, depth=0, draft=good) as harness:
        plain = [answer.token_ids for answer in harness.ask(*(harness.request(prompt) for prompt in PROMPTS))]
    states, pointer, watch = Lifecycle(tmp_path), DraftPointer(redis_client, "toy"), LiveWatch(1)
    for version in (1, 2):
        for state in WAY:
            states.move(version, state, actor="test")
    for state in (VersionState.LIVE, VersionState.PROMOTED):
        states.move(1, state, actor="test")
    pointer.publish(2)

    with fixed_engine(model_dir, draft=good, control_share=0.05, on_round=watch.observe) as harness:
        harness.drafts.update({1: _draft(model_dir, scale=0.0), 2: useless})
        follower = DraftFollower(harness.engine, pointer, engine_id="e", watch=watch, lifecycle=states)
        for turn in range(200):
            requests = [harness.request(prompt, request_id=f"{prompt} {turn}") for prompt in PROMPTS]
            answers = harness.ask(*requests, on_chunk=lambda index, _: follower.poll() if index == 0 else None)
            assert [answer.token_ids for answer in answers] == plain
            assert all(answer.finish_reason == "length" for answer in answers)
            if states.state(2) is VersionState.QUARANTINED:
                break
        assert harness.engine.draft_version == 1
        assert [report.version for _, report in follower.log.installed] == [2, 1]
    last = states.history(2)[-1]
    assert (last.state, last.reason) == (VersionState.QUARANTINED, "accepts less than the incumbent")
    assert int(last.numbers["rounds"] or 0) <= 50
    assert float(last.numbers["incumbent_accept_length"] or 0) > 1.5
    assert pointer.published() == 1
