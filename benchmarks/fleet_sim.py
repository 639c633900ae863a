"""Ten, a hundred, a thousand engines, simulated: how a version spreads, what learning costs, and what is full first.

    python -m benchmarks.fleet_sim [--quick] [--json FILE] [--engines 10 100 1000] …

No engine and no trainer runs here. What decides does: the waves (speculator/waves.py), the watch (serving/watch.py),
the capture's sampling (serving/capture_share.py). Every figure that goes in is printed with where it is from: measured
when this starts, measured before (the page is named), or assumed (benchmarks/fleet_inputs.py). Each engine is one of an
8B target that generates 1,000 token/s.

    good             a version whose accept length is 5% higher: until it is on all engines
    good_store_x10   the same, with a store whose line is ten times as fast
    minus_10         one that is 10% worse: until none runs it any more, and what ran it meanwhile
    useless          random weights, whose proposals are never accepted: the same
    stream_…         what capture sends, by the stream's cap (512 MiB is the default), and what one trainer makes of it

Load: each resource's use by all engines, as a share of what one of it has; the first to pass 1 is what has to be
divided. Targets: random weights are never run by more than one engine, and every good version gets to all. One that is
10% worse may pass a watch: the trainer's second look (trainer/review.py), which is not simulated, is there for it.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks.common import Target, fill_in, finish, parser
from benchmarks.fleet_capture import Flow, settle
from benchmarks.fleet_inputs import (
    ACCEPT_LENGTH,
    ANSWER_TOKENS,
    PROMPT_TOKENS,
    Input,
    assumed,
    measure_redis,
    measure_store,
    measured,
    trace_of_8b,
    version_bytes,
)
from benchmarks.fleet_model import Setup, Spreading, Trial, spread_over, trials
from serving.capture_share import DEFAULT_FLOOR

VERSIONS = {"good": 0.05, "minus_10": -0.10, "useless": -1.0}
"""By the change of the accept length."""
FASTER = "good_store_x10"
STREAMS = {"stream_512_mib": 512 << 20, "stream_16_gib": 16 << 30}
"""Caps of the stream; the first is the default."""
_BATCH = 16


def inputs(arguments: argparse.Namespace) -> tuple[dict[str, Input], dict[str, float]]:
    """The figures by name; and Redis's CPU by command."""
    trace = trace_of_8b()
    redis = measure_redis(trace, arguments.engines, repeats=1 if arguments.quick else 4)
    found = {
        "tokens_per_s": assumed(1000, "token/s an engine", "as the goal says"),
        "answer_tokens": assumed(ANSWER_TOKENS, "tokens an answer", "and 200 of its prompt are captured"),
        "trace_positions": assumed(PROMPT_TOKENS + ANSWER_TOKENS, "positions a trace", "the same"),
        "accept_length": assumed(ACCEPT_LENGTH, "tokens a verification", "as in docs/local-loop.md, 2.06 … 2.20"),
        "request_spread": Input(
            value=0.11, unit="of the acceptance", source="docs/versions.md: accept length by answer ±20%"
        ),
        "trace_bytes": measured(len(trace), "bytes an answer", "encoded, d = 4,096, K = 64, five proposals a round"),
        "trace_bytes_per_token": measured(len(trace) / ANSWER_TOKENS, "bytes an answer token", "the same"),
        "version_bytes": measured(version_bytes(), "bytes a version", "shapes of a draft for 8B, 32,000 tokens"),
        "verify_bytes_per_s": measured(measure_store(), "bytes/s", "DraftStore.load of a version on a disk in memory"),
        "store_bytes_per_s": assumed(
            arguments.store_gbit / 8 * 1e9, "bytes/s", f"a shared store with {arguments.store_gbit:g} Gbit/s"
        ),
        "exchange_s": Input(value=0.0054, unit="s", source="docs/sglang.md: 2.2 … 5.4 ms; less than a poll, left out"),
        "poll_s": Input(value=0.5, unit="s", source="SLIPSTREAM_POLL_S"),
        "report_s": Input(value=2.0, unit="s", source="serving/hotswap.py: every fourth poll"),
        "trainer_tokens_per_s": Input(
            value=arguments.trainer_tokens,
            unit="token/s a trainer",
            source="docs/learning.md: 2 CPU threads, a 135M target; no GPU and no 8B target was measured",
        ),
        "source_positions_per_s": Input(
            value=7846, unit="positions/s a rank", source="benchmarks/redis_path.py on this machine: read, decode, ack"
        ),
        "checkpoint_s": Input(value=30.0, unit="s", source="SLIPSTREAM_TRAINER_CHECKPOINT_INTERVAL_S"),
        "capture_floor": Input(value=DEFAULT_FLOOR, unit="of the answers", source="serving/capture_share.py"),
        "redis_trace_s_per_mb": measured(
            redis["trace_s_per_mb"], "s of its thread a MB", "append, read, ack, append-only file"
        ),
        "redis_poll_s": measured(redis["poll_s"], "s of its thread a poll", "pin and pointer"),
        "redis_sample_s": measured(redis["sample_s"], "s of its thread a look", "the stream's lag, once a second"),
        "redis_report_s": measured(redis["report_s"], "s of its thread a report", "report, depth, target, orders"),
    }
    return found, redis


def spreading(
    found: dict[str, Input], pool: list[Trial], num_engines: int, seeds: int, *, faster: float = 1.0
) -> list[Spreading]:
    """One outcome a seed. `faster`: how many times as fast the store is."""
    setup = Setup(
        num_engines=num_engines,
        version_bytes=found["version_bytes"].value,
        store_bytes_per_s=faster * found["store_bytes_per_s"].value,
        engine_bytes_per_s=found["verify_bytes_per_s"].value,
        poll_s=found["poll_s"].value,
        look_s=found["report_s"].value,
        report_s=found["report_s"].value,
    )
    outcomes = []
    for seed in range(seeds):
        rng = random.Random(f"{num_engines} {seed}")
        drawn = itertools.cycle(rng.sample(pool, len(pool)))
        outcomes.append(spread_over(setup, partial(next, drawn), rng))
    return outcomes


def _flow(found: dict[str, Input], num_engines: int, stream_max_bytes: int) -> Flow:
    return settle(
        traces_per_s=num_engines * found["tokens_per_s"].value / found["answer_tokens"].value,
        trainer_traces_per_s=found["trainer_tokens_per_s"].value / found["answer_tokens"].value,
        trace_bytes=found["trace_bytes"].value,
        stream_max_bytes=stream_max_bytes,
        checkpoint_s=found["checkpoint_s"].value,
        floor=found["capture_floor"].value,
    )


def touched_requests(found: dict[str, Input], outcome: Spreading) -> float:
    """Those under way when the version came, and those that came while it was there."""
    per_s = found["tokens_per_s"].value / found["answer_tokens"].value
    return outcome.num_touched * _BATCH + outcome.exposed_s * per_s


def loads(found: dict[str, Input], redis: dict[str, float], num_engines: int, flow: Flow) -> dict[str, float]:
    """Shares of one trainer, of one Redis's thread, of the store's line for a version each 30 s; all of the fleet."""
    value = {name: one.value for name, one in found.items()}
    tokens = num_engines * value["tokens_per_s"]
    positions = tokens * value["trace_positions"] / value["answer_tokens"]
    all_mb = tokens * value["trace_bytes_per_token"] / 1e6
    asked = num_engines * redis[f"ask_{num_engines}_s"] / value["report_s"]
    looked = redis[f"look_{num_engines}_s"] / value["report_s"]
    return {
        "trainer, all answers once": tokens / value["trainer_tokens_per_s"],
        "trainer's reading, all answers": positions / value["source_positions_per_s"],
        "redis, all answers": all_mb * value["redis_trace_s_per_mb"],
        "redis, answers as sampled": flow.bytes_per_s / 1e6 * value["redis_trace_s_per_mb"],
        "redis, polls, reports, sampling": num_engines
        * (
            value["redis_poll_s"] / value["poll_s"]
            + value["redis_report_s"] / value["report_s"]
            + value["redis_sample_s"]
        ),
        "redis, while a version spreads": asked + looked,
        "store, a version every 30 s": num_engines * value["version_bytes"] / value["store_bytes_per_s"] / 30,
    }


def options() -> argparse.ArgumentParser:
    found = parser("A fleet, simulated", has_prompts=False, has_model=False)
    found.add_argument("--engines", type=int, nargs="+", default=[10, 100, 1000])
    found.add_argument("--seeds", type=int)
    found.add_argument("--trials", type=int, help="real verdicts to draw from, of each kind of version")
    found.add_argument("--store-gbit", type=float, default=10.0, help="of the shared store's line")
    found.add_argument("--trainer-tokens", type=float, default=1324.0, help="token/s that one trainer learns")
    return found


def main() -> None:
    arguments = options().parse_args()
    fill_in(arguments, {"seeds": (1, 3), "trials": (10, 40)})
    found, redis = inputs(arguments)
    rows: list[tuple[str, object]] = [("SIMULATED", "no engine, no trainer; the policies are the real ones")]
    rows += [(f"input {name}", one) for name, one in found.items()]
    document: dict[str, Any] = {
        "simulated": True,
        "inputs": {name: {"value": one.value, "unit": one.unit, "source": one.source} for name, one in found.items()},
        "redis_cpu": redis,
    }
    pools = {
        name: trials(
            change,
            accept_length=found["accept_length"].value,
            spread=found["request_spread"].value,
            batch=_BATCH,
            verifications_per_s=found["tokens_per_s"].value / found["accept_length"].value,
            poll_s=found["poll_s"].value,
            count=arguments.trials,
        )
        for name, change in VERSIONS.items()
    }
    rows += [
        (f"watch: {name}", f"kept in {sum(one.is_kept for one in pool)} of {len(pool)}") for name, pool in pools.items()
    ]
    document["kept_share"] = {name: sum(one.is_kept for one in pool) / len(pool) for name, pool in pools.items()}
    most_touched, reached = 0.0, 1.0
    for num_engines in arguments.engines:
        of_size: dict[str, Any] = {}
        for name, pool, faster in (*((name, pool, 1.0) for name, pool in pools.items()), (FASTER, pools["good"], 10.0)):
            outcomes = spreading(found, pool, num_engines, arguments.seeds, faster=faster)
            rows.append((f"{num_engines:>5} engines: {name}", _said(found, outcomes)))
            of_size[name] = _figures(found, outcomes)
            if name in ("good", FASTER):
                reached = min(reached, statistics.mean(one.promoted_s is not None for one in outcomes))
            elif name == "useless":
                most_touched = max([most_touched, *(one.num_touched for one in outcomes)])
        flows = {name: _flow(found, num_engines, num_bytes) for name, num_bytes in STREAMS.items()}
        of_size |= {name: asdict(flow) for name, flow in flows.items()}
        rows += [(f"{num_engines:>5} engines: {name}", _said_of_capture(flow)) for name, flow in flows.items()]
        of_size["load"] = loads(found, redis, num_engines, flows["stream_16_gib"])
        ordered = sorted(of_size["load"].items(), key=lambda each: -each[1])
        rows += [(f"{num_engines:>5} engines: load", f"{load:10.4g}  {name}") for name, load in ordered]
        document[f"{num_engines}_engines"] = of_size
    targets = [
        Target("random_weights_engines", most_touched, 1.0, at_least=False),
        Target("good_version_reached_all", reached, 1.0),
    ]
    finish(rows, targets, document, arguments.json)


def _figures(found: dict[str, Input], outcomes: list[Spreading]) -> dict[str, Any]:
    def median(values: list[float]) -> float:
        return round(statistics.median(values), 3)

    return {
        "settled_s": median([one.settled_s for one in outcomes]),
        "engines_touched": median([one.num_touched for one in outcomes]),
        "most_engines_touched": max(one.num_touched for one in outcomes),
        "requests_touched": median([touched_requests(found, one) for one in outcomes]),
        "exposed_s": median([one.exposed_s for one in outcomes]),
        "barred_s": median([one.barred_s for one in outcomes if one.barred_s is not None] or [0.0]),
        "num_kept": median([one.kept for one in outcomes]),
        "waves": median([one.waves for one in outcomes]),
        "most_reading_at_once": median([one.most_staging for one in outcomes]),
        "asks_per_s": median([one.asks / one.settled_s for one in outcomes]),
        "looks_per_s": median([one.looks / one.settled_s for one in outcomes]),
        "spread_mb_per_s": median([one.spread_bytes / one.settled_s / 1e6 for one in outcomes]),
    }


def _said(found: dict[str, Input], outcomes: list[Spreading]) -> str:
    said = _figures(found, outcomes)
    if said["barred_s"]:
        return (
            f"{said['settled_s']:7.1f} s until it is on none; run by {said['engines_touched']:.0f}, at most "
            f"{said['most_engines_touched']}, for "
            f"{said['exposed_s']:.1f} s, {said['requests_touched']:.0f} requests"
        )
    return (
        f"{said['settled_s']:7.1f} s until it is on all; {said['waves']:.0f} waves; "
        f"{said['most_reading_at_once']:.0f} read the store at once; {said['num_kept']:.0f} verdicts for it; "
        f"{said['spread_mb_per_s']:.2f} MB/s of places"
    )


def _said_of_capture(flow: Flow) -> str:
    return (
        f"share {flow.share:.3f}: {flow.bytes_per_s / 1e6:.1f} MB/s, {flow.learnt_share:.2%} of the answers learnt, "
        f"{flow.lost_share:.1%} of the captured lost, {flow.unsettled_share:.1%} cut before their checkpoint"
    )


if __name__ == "__main__":
    main()
