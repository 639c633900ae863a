"""Inject faults into the running loop, one after another, and compare what was promised with what was observed.

    python -m benchmarks.chaos [--quick] [--json FILE] [--only WORD] [--model DIR_OR_ID]

Redis, `slipstream serve` and `slipstream train` run as processes of their own on loopback, with clients that never stop
asking; half of their questions are known ones whose greedy answer must stay the same. The default target is a toy of
eight random layers, in float64, where texts do not depend on what is decoded together. A full disk is a small tmpfs;
where none may be mounted those rows are left out, and say so. Random weights are left out on the toy, whose draft is
hardly better.

Exit code 1 when a promise is broken. --quick leaves out the faults that take longest.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.common.report import parser
from benchmarks.faults import drafts, processes, redis, requests, traces
from benchmarks.faults.fault import Fault, Observed
from benchmarks.faults.loop import STREAM_MAX_BYTES, Loop
from slipstream.demo.report import host
from slipstream.models import resolve_model
from speculator.errors import SlipstreamError
from tests.fixtures.toy import make_toy_model

Seen = dict[str, Observed | str]
"""By fault: its observation, or the error that ended it."""
_NO_SMALL_DISK = Observed(told="left out: no tmpfs may be mounted here", checks={})
_NO_GOOD_DRAFT = Observed(told="left out: hardly worse than what a toy's draft learns; --model tries it", checks={})
_LEFT_OUT = (_NO_SMALL_DISK, _NO_GOOD_DRAFT)
_BOTH = ("--suffix-depth", "0")
"""Suffix drafts off: half of the questions repeat, so they would leave the head almost no work."""
_TOY = (*_BOTH, "--dtype", "float64", "--draft-vocab-size", "24", "--context-length", "256")
_REAL = (*_BOTH, "--dtype", "float32", "--draft-vocab-size", "2048", "--context-length", "512")
FAULTS = (
    redis.killed,
    redis.paused,
    redis.out_of_memory,
    redis.on_a_full_disk,
    processes.trainer_killed,
    processes.trainer_ended,
    processes.store_full,
    traces.bad_traces,
    drafts.bad_files,
    drafts.many_swaps,
    drafts.random_weights,
    requests.malformed,
    requests.giant,
    requests.leaving,
    requests.burst,
    processes.engine_killed,
    processes.engine_ended,
    traces.accounts,
)


def main() -> None:
    options = parser("Faults in the running loop", has_prompts=False, has_model=False)
    options.add_argument("--only", default="", metavar="WORD", help="faults whose name has it")
    options.add_argument("--model", help="directory, id or bundled name; default: a toy")
    arguments = options.parse_args()
    chosen = [each for each in FAULTS if arguments.only in each.name and not (arguments.quick and each.is_slow)]
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        seen = _run(Path(folder), arguments.model, chosen)
    for line in table(chosen, seen):
        print(line)
    broken = [fault.name for fault in chosen if not _holds(seen.get(fault.name, ""))]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(_document(chosen, seen), indent=2) + "\n")
    sys.exit(1 if broken else 0)


def _run(folder: Path, model: str | None, chosen: list[Fault]) -> Seen:
    if model is None:
        loop = Loop(folder, make_toy_model(folder / "toy"), _TOY)
    else:
        loop = Loop(folder, resolve_model(model), _REAL, disk_bytes=1 << 30, patience=3.0)
    seen = Seen()
    with loop.running() as has_small_disks:
        for number, fault in enumerate(chosen, 1):
            print(f"[{number}/{len(chosen)}] {fault.name} …", file=sys.stderr, flush=True)
            if fault.needs_small_disks and not has_small_disks:
                seen[fault.name] = _NO_SMALL_DISK
                continue
            if fault.needs_good_draft and model is None:
                seen[fault.name] = _NO_GOOD_DRAFT
                continue
            try:
                lost_before = loop.lag().lost
                observed = fault.inject(loop)
                seen[fault.name] = _with_losses(observed, loop.lag().lost - lost_before)
            except TimeoutError as error:
                seen[fault.name] = str(error)
            except SlipstreamError as error:
                # A process has ended, so later observations would mean nothing.
                seen[fault.name] = str(error)
                break
    return seen


def _with_losses(observed: Observed, num_lost: int) -> Observed:
    """Tell of traces that were lost: neither expiry nor erasure removes unused ones here, so the stream was full."""
    if not num_lost:
        return observed
    told = f"{observed.told}; {num_lost} traces too many for the stream's {STREAM_MAX_BYTES >> 20} MiB, counted as lost"
    return dataclasses.replace(observed, told=told, figures={**observed.figures, "lost_meanwhile": num_lost})


def table(chosen: list[Fault], seen: Seen) -> list[str]:
    """Lines of Markdown."""
    lines = ["| fault | promise | observed | holds |", "|---|---|---|---|"]
    for fault in chosen:
        observed = seen.get(fault.name, "not reached")
        told = observed if isinstance(observed, str) else observed.told
        lines.append(f"| {fault.name} | {fault.promise} | {told} | {_verdict(observed)} |")
    return lines


def _verdict(observed: Observed | str) -> str:
    if observed in _LEFT_OUT:
        return "–"
    if _holds(observed):
        return "yes"
    return "**no**" if isinstance(observed, str) else f"**no**: {', '.join(observed.broken)}"


def _holds(observed: Observed | str) -> bool:
    return isinstance(observed, Observed) and not observed.broken


def _document(chosen: list[Fault], seen: Seen) -> dict[str, object]:
    return {
        "faults": [
            {
                "name": fault.name,
                "promise": fault.promise,
                # Null: it was not tried.
                "holds": None if observed in _LEFT_OUT else _holds(observed),
                "observed": observed if isinstance(observed, str) else observed.told,
                "figures": {} if isinstance(observed, str) else observed.figures,
            }
            for fault in chosen
            for observed in (seen.get(fault.name, "not reached"),)
        ],
        "host": host(),
    }


if __name__ == "__main__":
    main()
