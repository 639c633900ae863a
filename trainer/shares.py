"""One checkpoint for all ranks: what each knows is joined into one `Progress`, and shared out again at the start.

Nothing in the file belongs to a rank, so any number of ranks can go on from it. Counters are sums. Every rank knows all
used trace ids, since any of them may be given an unacked entry again. The replay's members, held-out traces and golden
ones are shared out by trace id (`Ranks.owns`). What all ranks know alike (learnt tokens, the learning curve) is rank
0's, and so is the drift monitor: each rank watches a random share of the same traffic, and any one of them says how it
was.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import msgspec

from speculator.versions.training_tenants import TenantCounts, joined_counts
from trainer.checkpoint import Progress


def joined(parts: Sequence[Progress]) -> Progress:
    """The progress of all ranks, given by rank."""
    # From the newest, so that those of the same age stand together: the oldest are forgotten first.
    newest = zip_longest(*(reversed(part.used_trace_ids) for part in parts))
    used = dict.fromkeys(trace_id for row in newest for trace_id in row if trace_id is not None)
    return msgspec.structs.replace(
        parts[0],
        new_tokens=sum(part.new_tokens for part in parts),
        num_traces=sum(part.num_traces for part in parts),
        num_repeated=sum(part.num_repeated for part in parts),
        used_trace_ids=list(used)[::-1],
        replay={trace_id: priority for part in parts for trace_id, priority in (part.replay or {}).items()},
        held_out=list(dict.fromkeys(trace_id for part in parts for trace_id in part.held_out)),
        golden=list(dict.fromkeys(trace_id for part in parts for trace_id in part.golden)),
        tenants=joined_counts(part.tenants or TenantCounts(complete=False) for part in parts),
        domains={label: tenant for part in reversed(parts) for label, tenant in part.domain_tenants.items()},
    )


def share_of(progress: Progress, rank: int) -> Progress:
    """What a rank goes on with: the counters go to rank 0, so that their sum stays right."""
    return progress if rank == 0 else msgspec.structs.replace(progress, new_tokens=0, num_traces=0, num_repeated=0)
