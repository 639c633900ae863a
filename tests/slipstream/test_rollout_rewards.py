"""From a rollout to the trainer: what the client rewards is what the trainer draws."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import httpx
import msgspec
import redis
from prometheus_client import CollectorRegistry

from serving.gateway.app import create_app
from serving.gateway.config import GatewaySettings
from speculator.draft.checkpoint import target_fingerprint
from speculator.redis.trace_stream import RewardStream, TraceStream
from speculator.trace import encode_trace
from tests.serving.gateway.client import ask
from tests.serving.local.harness import fixed_engine
from tests.trainer.examples import config_for
from trainer.loop import Trainer


def test_what_is_rewarded_is_learnt_from_more_often(
    toy_model: Path, tmp_path: Path, redis_client: redis.Redis, redis_url: str
) -> None:
    rewards = RewardStream(redis_client, "toy")
    group = {"id": "a", "prompt": "question 0123456789", "n": 2, "max_tokens": 30, "ignore_eos": True}
    document = {"id": "r", "model": "toy", "groups": [group]}

    async def roll_out(client: httpx.AsyncClient) -> None:
        said = (await client.post("/v1/rollouts", json=document)).text.splitlines()
        assert json.loads(said[-1])["samples"] == {"finished": 2}
        given = [{"group_id": "a", "sample": sample, "reward": reward} for sample, reward in ((0, -1.5), (1, 3))]
        (await client.post("/v1/rollouts/r/rewards", json={"rewards": given})).raise_for_status()

    with fixed_engine(toy_model) as harness:
        app = create_app(
            harness.engine, settings=GatewaySettings(), registry=CollectorRegistry(), send_rewards=rewards.append
        )
        ask(app, roll_out)
    stream = TraceStream(redis_client, "toy", max_bytes=10**8)
    for trace in harness.traces:
        header = msgspec.structs.replace(trace.header, target_fingerprint=target_fingerprint(toy_model))
        stream.append(encode_trace(dataclasses.replace(trace, header=header)), trace_id=header.trace_id)
    assert len(harness.traces) == 2

    trainer = Trainer(config_for(toy_model, tmp_path, redis_url=redis_url, max_tenant_share=1.0), CollectorRegistry())
    trainer.read(block_ms=0)
    trainer.step()
    trainer.step()
    drawn: Counter[str] = Counter()
    for _ in range(1000):
        (one,) = trainer.replay.draw(1).batch
        drawn[one.provenance.request_id[-1]] += 1
    trainer.close()
    assert 750 < drawn["1"] < 850, "weights 2 and 1/2: four times as often"
