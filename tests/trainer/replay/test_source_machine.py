"""However often a trace is sent and wherever the trainer dies, durable steps use it once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from speculator.trace import Trace
from tests.trainer.replay.test_trace_source import Desk
from trainer.replay.reservoirs import Stored


class SourceMachine(RuleBasedStateMachine):
    """A trainer as far as traces go: what it used since its last checkpoint is gone when it dies."""

    desk: Desk
    client: redis.Redis
    traces: list[Trace]

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.sent: set[str] = set()
        self.saved: list[str] = []
        self.durable: Counter[str] = Counter()
        self.dies()

    @rule(number=st.integers(0, 4))
    def send(self, number: int) -> None:
        self.sent.add(self.traces[number].header.trace_id)
        self.desk.send(self.traces[number])

    @rule(count=st.integers(1, 3))
    def read(self, count: int) -> None:
        self.in_hand += self.source.read(count, 0)

    @rule(count=st.integers(1, 3))
    def use(self, count: int) -> None:
        used, self.in_hand = self.in_hand[:count], self.in_hand[count:]
        self.source.mark_used(used)
        self.volatile += [stored.trace_id for stored in used]

    @rule()
    def save(self) -> None:
        """And perhaps die before anything is acknowledged."""
        self.saved = self.source.used_trace_ids
        self.durable.update(self.volatile)
        self.volatile = []
        assert max(self.durable.values(), default=0) <= 1, self.durable

    @rule()
    def save_and_acknowledge(self) -> None:
        self.save()
        self.source.ack_used()

    @rule()
    def dies(self) -> None:
        self.volatile: list[str] = []
        self.in_hand: list[Stored] = []
        self.source = self.desk.source(self.saved)

    def teardown(self) -> None:
        self.dies()
        while self.desk.lag().undelivered or self.in_hand or self.volatile or self.desk.lag().pending:
            self.read(10)
            self.use(10)
            self.save_and_acknowledge()
        assert self.durable == Counter(self.sent)
        assert self.desk.lag().lost == 0


def test_a_trace_is_used_once_however_often_it_is_sent_and_wherever_the_trainer_dies(
    redis_client: redis.Redis, model_dir: Path, traces: list[Trace], tmp_path: Path
) -> None:
    class Machine(SourceMachine):
        desk = Desk(redis_client, model_dir, traces[0].header.target_fingerprint, tmp_path / "replay")
        client = redis_client

    Machine.traces = traces
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=50, stateful_step_count=20, deadline=None, derandomize=True)
    )
