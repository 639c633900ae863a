"""The training loop, one screen: read → train → checkpoint → ack → gate, checkpoint and publish → rest."""

from __future__ import annotations

import threading
import time

from trainer.service import Trainer

IDLE_BLOCK_MS = 1000


def train_until(stop: threading.Event, trainer: Trainer) -> None:
    """Learn until `stop` is set, then put everything in order.

    Waits for: new traces, and only when nothing is to be gained from the old ones (`Trainer.has_work`): then it sleeps
    in Redis, up to IDLE_BLOCK_MS at a time. After each turn it rests for busy engines (trainer/yielding.py).
    Unblocked by: the next trace, or `stop`.
    When behind: it reads no more than `Replay.room` traces, so the backlog stays in Redis under the stream's byte cap,
    which drops and counts the oldest; batches are then made of new traces only.
    When Redis is away: reads come back empty, learning goes on from the replay, acks and the pointer wait.
    Shutdown: stop reading → finish the step → checkpoint → ack → close.
    Under several ranks each turn is made by all of them: one that has work, or is told to stop, takes the others along.
    """
    while not trainer.ranks.any(stop.is_set()):
        trainer.read(block_ms=0 if trainer.has_work or trainer.is_reviewing else IDLE_BLOCK_MS)
        began_s = time.monotonic()
        if trainer.has_work:
            trainer.step()
        if trainer.checkpoint_due:
            trainer.checkpoint()
            trainer.ack()
        trainer.review()
        trainer.heed_rollbacks()
        if trainer.publish_due:
            trainer.publish()
        trainer.throttle.rest(time.monotonic() - began_s, stop)
    trainer.checkpoint()
    trainer.ack()
    trainer.close()
