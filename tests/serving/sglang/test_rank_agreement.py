"""Two ranks agree on a swap and on costs, over a real process group."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp  # noqa: TID251 - two ranks on one machine

from serving.sglang.proposals.depth import TimedStep
from serving.sglang.proposals.remembered_text import Continuations
from serving.sglang.rank_agreement import MEETING_STEPS, Agreement

REQUESTS, WIDTH = [SimpleNamespace(origin_input_ids=[1] * size) for size in (6, 9)], 3


def _found(rank: int) -> Continuations:
    """Each rank has found something; that of the first is what counts."""
    tokens = np.array([[0, 1, 2], [3, 0, 0]]) if rank == 0 else np.full((2, 3), 7)
    probabilities = np.array([[0.5, 0.25, 0.0], [0.5, 0.0, 0.0]])
    counts, first, sources = np.array([3 - rank, 1]), np.array([10, 10 + rank]), np.array([2 - rank, 1])
    return Continuations(tokens, probabilities, counts, first, sources, [4, 1])


def _described(text: Continuations | None) -> dict[str, Any]:
    assert text is not None
    assert text.first.tolist() == [10, 10]
    named = {"tokens": text.tokens, "counts": text.counts, "sources": text.sources, "gains": text.gains([WIDTH])[:, 0]}
    return {"answered": text.num_answered, **{name: values.tolist() for name, values in named.items()}}


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    agreement = Agreement(dist.group.WORLD)
    outcome = {
        "alone": agreement.is_alone,
        "meetings": [step for step in range(1, 3 * MEETING_STEPS) if agreement.is_meeting(step)],
        "nobody": agreement.all_staged(0),
        "one": agreement.all_staged(7 if rank == 0 else 0),
        "different": agreement.all_staged(7 + rank),
        "both": agreement.all_staged(7),
        "first": agreement.first(5 + rank),
        "all hold": agreement.all(True),
        "one does not": agreement.all(rank == 0),
        "times": agreement.times(
            [TimedStep(4, 2, 0.1 + step) for step in range(100)] if rank == 0 else [TimedStep(1, 1, 9.0)]
        ),
        "no times": agreement.times([]),
        "text": _described(agreement.text(_found(rank), REQUESTS, WIDTH)),
        "no text": agreement.text(None, REQUESTS, WIDTH),
    }
    (Path(folder) / f"rank{rank}").write_text(json.dumps(outcome))
    dist.destroy_process_group()


def test_two_ranks(tmp_path: Path) -> None:
    mp.spawn(_rank, args=(str(tmp_path),), nprocs=2)
    for rank in range(2):
        assert json.loads((tmp_path / f"rank{rank}").read_text()) == {
            "alone": False,
            "meetings": [MEETING_STEPS, 2 * MEETING_STEPS],
            "nobody": False,
            "one": False,
            "different": False,
            "both": True,
            "first": 5,
            "all hold": True,
            "one does not": False,
            "times": [[4, 2, 0.1 + step, True, 0.0] for step in range(100 - 2 * MEETING_STEPS, 100)],
            "no times": [],
            "text": {
                "tokens": [[0, 1, 2], [3, 0, 0]],
                "counts": [3, 1],
                "sources": [2, 1],
                "answered": [4, 1],
                "gains": [0.625, 0.5],
            },
            "no text": None,
        }


def test_alone_every_step_will_do() -> None:
    agreement = Agreement(None)
    assert agreement.is_alone
    assert agreement.is_meeting(1)
    assert agreement.all_staged(3)
    assert agreement.first(3) == 3
    assert not agreement.all_staged(0)
    assert agreement.times([TimedStep(1, 0, 0.5, False, 0.1)]) == [TimedStep(1, 0, 0.5, False, 0.1)]
    assert [agreement.all(holds) for holds in (True, False)] == [True, False]
    assert agreement.text(None, REQUESTS, WIDTH) is None
    assert agreement.text(found := _found(0), REQUESTS, WIDTH) is found
