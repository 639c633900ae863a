"""Faults of traces: stream entries that a trainer must refuse."""

from __future__ import annotations

import dataclasses
import json
import random

import msgspec
import safetensors.torch
import torch

from benchmarks.faults.fault import Observed, fault
from benchmarks.faults.loop import Loop
from speculator.trace import SCHEMA_VERSION, decode_trace, encode_trace

OF_EACH = 20


def corrupted(payload: bytes, rng: random.Random) -> dict[str, bytes]:
    """From one good trace, one broken trace of each kind that must be refused."""
    trace = decode_trace(payload)
    other = msgspec.structs.replace(trace.header, target_fingerprint="0" * 64)
    header_end = 8 + int.from_bytes(payload[:8], "little")
    metadata = json.loads(payload[8:header_end])["__metadata__"]
    tensors = safetensors.torch.load(payload)
    name = "aux_scale" if "aux_scale" in tensors else "aux_hidden"
    not_finite = {**tensors, name: torch.full_like(tensors[name], float("nan"))}
    schema, unknown = (f'schema_version\\":{version}'.encode() for version in (SCHEMA_VERSION, SCHEMA_VERSION + 6))
    return {
        "no trace": rng.randbytes(len(payload)),
        "truncated": payload[: rng.randrange(len(payload))],
        "unknown schema": payload.replace(schema, unknown),
        "of target 000…": encode_trace(dataclasses.replace(trace, header=other)),
        "NaN features": safetensors.torch.save(not_finite, metadata),
    }


@fault(
    f"traces that are undecodable, truncated, of an unknown schema, of another target, with NaN: {OF_EACH} of each",
    "each is set aside with the reason and counted; training goes on",
)
def bad_traces(loop: Loop) -> Observed:
    rng = random.Random(0)
    with loop.stream() as stream:
        good = stream.recent(1 << 20)[-1]
        before = stream.lag()
        sent = 0
        for turn in range(OF_EACH):
            for kind, payload in corrupted(good.payload, rng).items():
                stream.append(payload, trace_id=f"{kind} {turn}")
                sent += 1
    took_s = loop.wait(lambda: loop.lag().dead_lettered - before.dead_lettered >= sent, "all to be set aside", 60)
    resumed_s = loop.wait_until_settled()
    after = loop.lag()
    steps = loop.trainer_metrics()
    set_aside = after.dead_lettered - before.dead_lettered
    return Observed(
        told=f"{set_aside} of {sent} set aside within {took_s:.1f} s, {after.acked - before.acked - set_aside} good "
        f"ones settled meanwhile, {steps.total('slipstream_trainer_steps_total', outcome='skipped'):.0f} steps skipped",
        checks={
            "each was set aside": set_aside == sent,
            "training goes on": after.acked - before.acked > set_aside,
            "the weights are whole": steps.total("slipstream_trainer_healthy") == 1,
            "no trace lost": after.lost == before.lost,
        },
        figures={"sent": sent, "set_aside": set_aside, "took_s": took_s, "resumed_s": resumed_s},
    )


@fault(
    "all of the above, when the last answer has been given",
    "captured = appended + dropped; appended = learned from + set aside + lost, and nothing waits for ever",
)
def accounts(loop: Loop) -> Observed:
    """Two balances must hold: of the last engine process's traces, and of all entries of the stream. Waiting entries
    are counted as those in no other account.
    """
    loop.load.stop()
    settled_s = loop.wait(lambda: _waiting(loop) == 0, "all traces to be used", 120)
    books = loop.books()
    lag = books.lag
    learnt = lag.acked - lag.dead_lettered
    return Observed(
        told=f"{books.captured:.0f} = {books.appended:.0f} + {books.dropped:.0f}; "
        f"{lag.appended} = {learnt} + {lag.dead_lettered} + {lag.lost}, after {settled_s:.1f} s",
        checks={
            "captured adds up": books.captured == books.appended + books.dropped,
            "appended adds up": lag.appended == lag.acked + lag.lost,
        },
        figures={"appended": lag.appended, "learnt": learnt, "dead_lettered": lag.dead_lettered, "lost": lag.lost},
    )


def _waiting(loop: Loop) -> float:
    books = loop.books()
    return books.waiting + books.lag.pending + books.lag.undelivered
