"""The checkpoint that a restarted trainer resumes.

It is one safetensors file, replaced atomically. Tensors are the learner's state and `d2t`. `Progress` is JSON in the
file's metadata, so weights and counts are always of the same moment.

All ranks share one checkpoint: `joined` merges their `Progress`, `share_of` gives each rank its part at the start.
Nothing in the file belongs to a rank, so any number of ranks can resume it. Counters are sums. Every rank knows all
used trace ids, since Redis may deliver an entry again to any of them. The traces of replay, held-out and golden set are
divided by trace id (`Ranks.owns`). Values that are equal on all ranks come from rank 0. So does the drift monitor,
since each rank watches a random share of the same traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import msgspec
import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from speculator.draft.eagle3 import DraftConfig
from speculator.errors import StoreError
from speculator.host import sync
from speculator.versions.lineage import TenantCounts, joined_counts
from trainer.config import MOST_KNOWN_TRACES
from trainer.drift import AcceptanceSeries

_FILE = "trainer.safetensors"


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's state besides tensors, at the moment of the checkpoint."""

    target_fingerprint: str
    draft: DraftConfig | None = None
    """The draft's shapes and switches; None in older checkpoints."""
    learnt_tokens: int
    """Completion tokens in all steps, repetitions included."""
    new_tokens: int
    """Completion tokens of all traces, each once."""
    num_traces: int
    used_trace_ids: list[str]
    replay: dict[str, float] | None = None
    """Traces in the replay's memory with their priorities; None: restore whatever the stream still holds."""
    domains: dict[str, str] | list[str] = {}
    """`DomainNames.known`, tenants by label; older checkpoints list the labels alone."""
    drift: dict[str, AcceptanceSeries] = {}
    curve: list[tuple[float, ...]] = []
    """`LearningCurve.points`."""
    tokens_since_news: int = 0
    num_repeated: int = 0
    """Traces whose text was in the replay already."""
    version: int = 0
    """The draft version that the weights descend from; 0 in older checkpoints."""
    held_out: list[str] = []
    """Traces that wait for their first step, oldest first: in the held-out pool, or just released from it."""
    golden: list[str] = []
    """Traces that are never learnt from."""
    tenants: TenantCounts | None = None
    """Completion tokens that the weights were learnt from, by tenant; None in older checkpoints."""
    vetoed_since_s: float | None = None
    """When the golden set first vetoed a candidate since the last version, in seconds since the epoch; None: never."""
    target_version: int = 0
    """The newest target version among all traces."""

    @property
    def domain_tenants(self) -> dict[str, str]:
        """The tenant that brought each label; "" in older checkpoints."""
        return self.domains if isinstance(self.domains, dict) else dict.fromkeys(self.domains, "")

    @property
    def trace_ids(self) -> list[str]:
        """All traces whose files are kept beside the checkpoint."""
        return [*(self.replay or ()), *self.held_out, *self.golden]


def save_checkpoint(folder: Path, state: dict[str, Tensor], progress: Progress) -> None:
    """Write the checkpoint; durable on return. Raises StoreError and then leaves the previous one untouched."""
    temporary = folder / f"{_FILE}.tmp"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        safetensors.torch.save_file(state, temporary, {"progress": msgspec.json.encode(progress).decode()})
        sync(temporary)
        temporary.rename(folder / _FILE)
        sync(folder)
    except (OSError, SafetensorError) as error:
        raise StoreError(
            f"cannot write the trainer's checkpoint into {folder}: free some space there ({error})"
        ) from error


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], Progress] | None:
    """The last checkpoint, or None where there is none. Raises StoreError for a damaged one."""
    path = folder / _FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            progress = msgspec.json.decode((file.metadata() or {}).get("progress", ""), type=Progress)
            return {name: file.get_tensor(name) for name in file.keys()}, progress  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError, msgspec.MsgspecError) as error:
        raise StoreError(f"{path} is damaged: remove it to go on from the newest published draft ({error})") from error


def joined(parts: Sequence[Progress]) -> Progress:
    """Merge the progress of all ranks, given in the order of their numbers."""
    # From the newest, so that ids of the same age stand together: a trainer forgets the oldest ids first.
    newest = zip_longest(*(reversed(part.used_trace_ids) for part in parts))
    used = dict.fromkeys(trace_id for row in newest for trace_id in row if trace_id is not None)
    return msgspec.structs.replace(
        parts[0],
        new_tokens=sum(part.new_tokens for part in parts),
        num_traces=sum(part.num_traces for part in parts),
        num_repeated=sum(part.num_repeated for part in parts),
        used_trace_ids=list(used)[:MOST_KNOWN_TRACES][::-1],
        replay={trace_id: priority for part in parts for trace_id, priority in (part.replay or {}).items()},
        held_out=list(dict.fromkeys(trace_id for part in parts for trace_id in part.held_out)),
        golden=list(dict.fromkeys(trace_id for part in parts for trace_id in part.golden)),
        tenants=joined_counts(part.tenants or TenantCounts(complete=False) for part in parts),
        domains={label: tenant for part in reversed(parts) for label, tenant in part.domain_tenants.items()},
    )


def share_of(progress: Progress, rank: int) -> Progress:
    """What a rank resumes: the counters go to rank 0 alone, so that their sum stays right."""
    return progress if rank == 0 else msgspec.structs.replace(progress, new_tokens=0, num_traces=0, num_repeated=0)
