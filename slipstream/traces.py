"""`slipstream traces`: record the trace stream into files, summarise, prune and export them."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import redis

from speculator.errors import TraceError
from speculator.host import json_line
from speculator.recording import RecordingHeader, RecordingReader, RecordingWriter
from speculator.redis.client import RedisKeys, redis_errors
from speculator.redis.trace_deletion import remove_from_recording
from speculator.trace import BranchRows, Trace, decode_trace
from trainer.release.gate import recorded_rounds
from trainer.statistics import AcceptanceCounts

_POLL_MS = 500
_CHUNK = 16


class StreamCopy:
    """Reads a stream's entries without a consumer group, so the trainer's reads and counts are not affected."""

    def __init__(self, client: redis.Redis, model_key: str) -> None:
        self._redis: Any = client
        self._key = RedisKeys(model_key=model_key).traces
        self._after = "0"

    @redis_errors
    def read(self, block_ms: int) -> list[bytes]:
        """The next few payloads in the stream's order; waits up to `block_ms` (0 does not) for the first."""
        reply = self._redis.xread({self._key: self._after}, count=_CHUNK, block=block_ms or None)
        entries = reply[0][1] if reply else []
        if entries:
            self._after = entries[-1][0].decode()
        return [fields[b"payload"] for _, fields in entries if b"payload" in fields]


def record(
    source: StreamCopy,
    path: Path,
    header: RecordingHeader,
    *,
    seconds: float,
    on_traces: Callable[[int], object] = lambda _: None,
) -> dict[str, int]:
    """Append the stream's traces, and those that arrive in the next `seconds`, each trace id once. `on_traces` gets the
    number read so far.

    Returns counts: recorded, known (already in the file), unusable, and the bytes of an unfinished tail that were
    removed. Raises ConfigError or StreamError; what was copied until then is in the file.
    """
    counts = {"recorded": 0, "known": 0, "unusable": 0}
    end_s = time.monotonic() + seconds
    with RecordingWriter(path, header) as writer:
        counts["removed_bytes"] = writer.num_removed_bytes
        while True:
            left_ms = int(1000 * (end_s - time.monotonic()))
            payloads = source.read(min(max(left_ms, 0), _POLL_MS))
            for payload in payloads:
                counts[_keep(writer, payload, header.target_fingerprint)] += 1
            on_traces(counts["recorded"] + counts["known"] + counts["unusable"])
            if not payloads and time.monotonic() >= end_s:
                return counts


def _keep(writer: RecordingWriter, payload: bytes, target_fingerprint: str) -> str:
    try:
        header = decode_trace(payload).header
    except TraceError:
        return "unusable"
    if header.target_fingerprint != target_fingerprint:
        return "unusable"
    if header.trace_id in writer.known_ids:
        return "known"
    writer.append(payload, trace_id=header.trace_id)
    return "recorded"


def prune(path: Path, hours: float) -> int:
    """Remove traces older than `hours` from a recording; returns how many. Raises ConfigError."""
    before_ms = int(1000 * (time.time() - 3600 * hours))
    return remove_from_recording(path, lambda header: header.created_ms < before_ms).removed


def summary(path: Path) -> dict[str, Any]:
    """Counts of a recording, in all and by domain. Raises ConfigError where the file is not a recording."""
    domains: dict[str, Counter[str]] = defaultdict(Counter)
    rounds: dict[str, AcceptanceCounts] = defaultdict(AcceptanceCounts)
    versions: Counter[int] = Counter()
    temperatures: Counter[float] = Counter()
    with RecordingReader(path) as reader:
        for trace in reader.traces():
            domain = trace.header.domain
            domains[domain].update(
                traces=1, tokens=trace.num_tokens, completion_tokens=trace.num_completion_tokens,
                proposals=int((trace.rounds.draft_tokens >= 0).sum()), accepted=int(trace.rounds.num_accepted.sum()),
                branch_rows=trace.num_branches,
            )  # fmt: skip
            rounds[domain] += recorded_rounds(trace)
            versions.update(trace.rounds.draft_version.tolist())
            temperatures[trace.header.sampling.temperature] += 1
        total = sum(domains.values(), Counter())
        return {
            "file": str(path),
            "model": reader.header.model,
            "target_fingerprint": reader.header.target_fingerprint,
            "created_ms": reader.header.created_ms,
            "note": reader.header.note,
            "bytes": reader.num_bytes,
            "cut_off_bytes": reader.num_cut_bytes,
            "damaged_entries": reader.num_damaged,
            "bytes_per_token": round(reader.num_bytes / max(total["tokens"], 1), 1),
            **_counts(total, sum(rounds.values(), AcceptanceCounts())),
            "domains": {domain: _counts(domains[domain], rounds[domain]) for domain in domains},
            "temperatures": _by_text(temperatures),
            "draft_versions": {str(version): count for version, count in sorted(versions.items())},
        }


def _by_text(temperatures: Counter[float]) -> dict[str, int]:
    """Traces by temperature, in ascending order; temperatures that read the same are added."""
    found: Counter[str] = Counter()
    for value, count in sorted(temperatures.items()):
        found[f"{value:g}"] += count
    return found


def _counts(counts: Counter[str], rounds: AcceptanceCounts) -> dict[str, Any]:
    names = ("traces", "tokens", "completion_tokens", "proposals", "accepted", "branch_rows")
    return {
        **{name: counts[name] for name in names},
        "rounds": int(rounds.num_rounds),
        "accept_length": round(rounds.length, 4),
    }


def sentences(document: dict[str, Any]) -> str:
    """A `summary` as text for a terminal."""

    def about(counts: dict[str, Any]) -> str:
        return (
            f"{counts['traces']} traces, {counts['completion_tokens']} completion tokens, "
            f"{counts['accepted']} of {counts['proposals']} proposals accepted, "
            f"{counts['accept_length']:.2f} tokens a verification"
        )

    versions = [int(version) for version in document["draft_versions"]]
    lines = [
        f"{document['file']}: {document['model']}, {document['bytes']} bytes, "
        f"{document['bytes_per_token']} a token{', ' + document['note'] if document['note'] else ''}",
        about(document),
        *(f"  {domain or '(no domain)'}: {about(counts)}" for domain, counts in document["domains"].items()),
        f"drafted by versions {min(versions)} to {max(versions)}" if versions else "nothing was drafted",
    ]
    if document["damaged_entries"] or document["cut_off_bytes"]:
        damaged, cut_off = document["damaged_entries"], document["cut_off_bytes"]
        lines.append(f"{damaged} entries are damaged; the last {cut_off} bytes are an incomplete entry")
    return "\n".join(lines)


def export(path: Path, out: BinaryIO) -> int:
    """Write one JSON object a trace, everything but the features; returns how many."""
    count = 0
    with RecordingReader(path) as reader:
        for trace in reader.traces():
            out.write(json_line(_row(trace)) + b"\n")
            count += 1
    return count


def _row(trace: Trace) -> dict[str, Any]:
    """A trace as JSON values. Log-probabilities are in the order of their ids; rows without any are empty lists."""
    header = trace.header
    start, prompt = header.first_position, max(header.num_prompt_tokens - header.first_position, 0)
    known = trace.target_topk_ids >= 0
    return {
        **msgspec.structs.asdict(header),
        "prompt_token_ids": trace.token_ids[:prompt].tolist(),
        "completion_token_ids": trace.token_ids[prompt:].tolist(),
        "constrained_positions": (start + np.flatnonzero(trace.constrained)).tolist(),
        "target_topk_ids": [ids[mask].tolist() for ids, mask in zip(trace.target_topk_ids, known, strict=True)],
        "target_topk_logprobs": [
            _rounded(row[mask]) for row, mask in zip(trace.target_topk_logprobs, known, strict=True)
        ],
        "rounds": list(_round_rows(trace)),
        "branches": [] if trace.branches is None else list(_branch_rows(trace.branches)),
    }


def _branch_rows(rows: BranchRows) -> Iterator[dict[str, Any]]:
    """Rows behind rejections; `proposal` is the index within its round."""
    for round_, node, ids, logprobs in zip(rows.round, rows.node, rows.topk_ids, rows.topk_logprobs, strict=True):
        top = {"target_topk_ids": ids[ids >= 0].tolist(), "target_topk_logprobs": _rounded(logprobs[ids >= 0])}
        yield {"round": int(round_), "proposal": int(node), **top}


def _round_rows(trace: Trace) -> Iterator[dict[str, Any]]:
    rounds = trace.rounds
    for row, tokens in enumerate(rounds.draft_tokens):
        proposed = tokens >= 0
        yield {
            "position": int(rounds.position[row]),
            "draft_version": int(rounds.draft_version[row]),
            "num_accepted": int(rounds.num_accepted[row]),
            "tokens": tokens[proposed].tolist(),
            "logprobs": _rounded(rounds.draft_logprobs[row][proposed]),
            "parents": rounds.draft_parents[row][proposed].tolist(),
        }


def _rounded(values: np.ndarray) -> list[float]:
    # JSON has no −inf, the log-probability of a kept token with probability 0.
    return [round(value, 4) if np.isfinite(value) else -1e4 for value in values.astype(float).tolist()]
