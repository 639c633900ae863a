"""Fuzz every input surface with thousands of hostile inputs, and count failures and hangs.

    python -m benchmarks.bad_inputs [--quick] [--json FILE] [--seed N] [--url URL]

Real parts: the gateway on a loopback port with every route (the engine is the tests' double, then a local engine over a
toy model), a Redis, draft stores on disk, a local engine over a toy model. What is sent stands in tests/hostile/:

* requests that schemathesis generates from the gateway's own OpenAPI document, with and without keys, as the schema
  allows and as it does not; any method on any path with any headers; a table of bodies; bytes that are no HTTP;
* damaged traces, recordings and stream entries; broken files of prompts and of rollout groups;
* damaged and forged draft versions, loaded as an engine does and installed into a running one;
* folders of a target with one thing broken, as doctor, train, drafts init and serve read them;
* Redis URLs with options of other clients;
* with `--url`, to that running `slipstream serve --engine sglang` alone: an extreme value in each of SGLang's fields.

A failure is an answer of 500 or above, or an exception that nobody meant to raise; a hang is an input that has no
answer after thirty seconds. Targets: no failure, no hang, at least 10,000 inputs (1,000 with `--quick` or `--url`).
"""

from __future__ import annotations

import itertools
import logging
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import structlog

from benchmarks.common.engines import engine_with, greedy
from benchmarks.common.report import Target, finish, parser
from speculator.draft.checkpoint import expected_shapes
from speculator.errors import DraftError, StoreError
from speculator.redis.client import connect
from speculator.redis.embedded import EmbeddedRedis
from tests.fixtures.drafts import make_draft
from tests.fixtures.toy import make_toy_model, random_draft
from tests.hostile import api, bodies, drafts, extremes, line_files, model_folders, redis_urls, traces, wire
from tests.hostile.api import API_KEY, KEYS, full_app, open_app
from tests.hostile.judge import FailureError, Outcome, Tally, tallied

# Name: (with --quick, without).
COUNTS = {
    "each operation": (20, 500),
    "local engine": (200, 20_000),
    "paths": (100, 2000),
    "bodies": (100, 2000),
    "requests": (100, 2000),
    "traces": (500, 5000),
    "recordings": (50, 500),
    "drafts": (100, 2000),
    "prompt files": (60, 2000),
    "model folders": (100, 2000),
    "Redis URLs": (200, 2000),
}


def gateway(folder: Path, client: Any, counts: Mapping[str, int], seed: int) -> Iterator[Tally]:
    choose = random.Random(seed).randrange
    with api.running(full_app(folder / "site", client), *KEYS) as site:
        documented = Tally("HTTP: documented operations")
        api.fuzz_operations(site, documented, count=counts["each operation"], fixed_seed=seed)
        yield documented
        paths = Tally("HTTP: any method, path and header")
        api.fuzz_paths(site, paths, count=counts["paths"], fixed_seed=seed)
        yield paths
        table, mutated = Tally("HTTP: table of bodies"), Tally("HTTP: mutated bodies")
        for path in api.GENERATING:
            api.send_bodies(site, table, path, bodies.hostile_bodies(path))
            api.send_bodies(site, mutated, path, bodies.mutated(path, choose, counts["bodies"] // 2))
        yield table
        yield mutated
        yield tallied(
            "socket: table of bytes",
            wire.inputs(site.url, {**wire.HOSTILE, **wire.bodies_as_requests()}, choose, 0),
        )
        yield tallied("socket: mutated requests", wire.inputs(site.url, {}, choose, counts["requests"]))
        yield _is_well(site.url, "HTTP: a good request afterwards")


def local_engine(folder: Path, counts: Mapping[str, int], seed: int) -> Iterator[Tally]:
    """The documented operations again, in front of an engine that computes."""
    model_dir, tally = make_toy_model(folder / bodies.MODEL), Tally("HTTP: local engine")
    settings = {"depth": 2, "context_length": 64}
    with (
        engine_with(model_dir, random_draft(model_dir, seed=0), 1, settings=settings) as engine,
        api.running(open_app(engine), *KEYS) as site,
    ):
        for again in itertools.count():
            missing = counts["local engine"] - tally.num_inputs
            if missing <= 0:
                break
            each = max(2, min(500, missing // len(api.operations(site))))
            api.fuzz_operations(site, tally, count=each, fixed_seed=seed + again)
        yield tally
        yield _is_well(site.url, "HTTP: local engine, a good request afterwards")


def _is_well(url: str, surface: str) -> Tally:
    """Check that the gateway still serves afterwards."""
    tally = Tally(surface)

    def attempt() -> Outcome:
        key = {"authorization": f"Bearer {API_KEY}"}
        answers = [
            httpx.get(url + path, headers=key, trust_env=False)
            for path in ("/health", "/slipstream/live", "/v1/models")
        ]
        answers += [
            httpx.post(url + path, json=bodies.fields(path), headers=key, trust_env=False) for path in api.GENERATING
        ]
        if any(answer.status_code != 200 for answer in answers):
            raise FailureError(f"answers of {[answer.status_code for answer in answers]}")
        return "200"

    tally.take("good", attempt)
    return tally


def stream_and_files(folder: Path, client: Any, counts: Mapping[str, int], seed: int) -> Iterator[Tally]:
    choose = random.Random(seed).randrange
    yield tallied("codec: mutated traces", traces.mutated_traces(choose, counts["traces"]))
    recordings = traces.mutated_recordings(folder / "mutated.rec", choose, counts["recordings"])
    yield tallied("recordings: mutated files", recordings)
    foreign = ((name, partial(traces.consume, client, fields)) for name, fields in traces.foreign_entries())
    yield tallied("stream: entries of others", foreign)
    yield tallied("Redis: odd draft pointers", traces.odd_pointers(client))


def draft_files(folder: Path, counts: Mapping[str, int], seed: int) -> Iterator[Tally]:
    choose = random.Random(seed).randrange
    original = drafts.Original.of(make_draft(), folder / "original")
    yield tallied("store: corpus of drafts", drafts.corpus_inputs(folder / "corpus", original))
    mutated = drafts.mutated_inputs(folder / "mutated", original, choose, counts["drafts"])
    yield tallied("store: mutated drafts", mutated)
    yield tallied("store: odd files", drafts.odd_places(folder / "places", original))


def settings_and_files(folder: Path, socket_url: str, counts: Mapping[str, int], seed: int) -> Iterator[Tally]:
    choose = random.Random(seed).randrange
    lines = line_files.inputs(folder / "lines.jsonl", choose, counts["prompt files"])
    yield tallied("files: prompts and rollout groups", lines)
    targets = model_folders.ModelFolders(folder / "targets").inputs(choose, counts["model folders"])
    yield tallied("model folders: one thing broken", targets)
    yield tallied("Redis URLs", redis_urls.inputs(choose, socket_url, counts["Redis URLs"]))


def hot_swap(folder: Path) -> Iterator[Tally]:
    """Install each damaged draft into a running engine: none may change its version or its answers."""
    tally = Tally("hot swap: corpus of drafts")
    model_dir = make_toy_model(folder / "toy")
    draft = random_draft(model_dir, seed=0)
    original = drafts.Original.of(draft, folder / "swap")
    shapes, d2t = expected_shapes(draft.config), original.state["d2t"]
    stores: dict[int, Any] = {}

    def load(version: int) -> Any:
        wanted = {"expected_fingerprint": drafts.FINGERPRINT, "expected_d2t": d2t, "expected_shapes": shapes}
        return stores[version].load(1, **wanted)

    with engine_with(model_dir, draft, 1, settings={"depth": 2}, load_draft=load) as engine:
        before = greedy(engine, [[5, 6, 7]], 16)

        def attempt(version: int) -> Outcome:
            try:
                engine.install_draft(version)
            except (DraftError, StoreError) as refusal:
                if (engine.draft_version, greedy(engine, [[5, 6, 7]], 16)) != (1, before):
                    raise FailureError("the engine is not as it was") from refusal
                return type(refusal).__name__
            raise FailureError("installed")

        files = {name: files for name, files in drafts.corpus(original) if "config" not in name}
        for version, (name, changed) in enumerate(files.items(), start=2):
            stores[version] = drafts.put(folder / "swaps" / str(version), changed)
            tally.take(name, partial(attempt, version))
    yield tally


def extreme_fields(url: str) -> Iterator[Tally]:
    """An extreme value in each field of SGLang's, sent to a server that runs; it answers afterwards as before."""
    tally = Tally("SGLang: extreme values")
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        for name, attempt in extremes.inputs(client, model):
            tally.take(name, attempt)
        yield tally
        yield tallied("SGLang: good requests afterwards", extremes.good_requests(client, model))


def own_surfaces(folder: Path, counts: Mapping[str, int], seed: int) -> Iterator[Tally]:
    with EmbeddedRedis(str(folder / "redis")) as server, connect(server.url) as client:
        yield from gateway(folder, client, counts, seed)
        yield from local_engine(folder, counts, seed)
        yield from stream_and_files(folder, client, counts, seed)
        yield from draft_files(folder, counts, seed)
        yield from settings_and_files(folder, server.url, counts, seed)
        yield from hot_swap(folder)


def main() -> None:
    options = parser("What becomes of inputs that were made to do harm", has_prompts=False, has_model=False)
    options.add_argument("--seed", type=int, default=0, help="of everything that is generated")
    options.add_argument("--url", help="of a `slipstream serve --engine sglang`, which alone is sent to")
    arguments = options.parse_args()
    counts = {name: pair[0 if arguments.quick else 1] for name, pair in COUNTS.items()}
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable(logging.ERROR)
    started_s = time.monotonic()
    tallies: list[Tally] = []
    with tempfile.TemporaryDirectory(prefix="slipstream-bad-") as scratch:
        folder = Path(scratch)
        for tally in (
            own_surfaces(folder, counts, arguments.seed) if arguments.url is None else extreme_fields(arguments.url)
        ):
            print(f"{tally.surface}: {tally.num_inputs}", flush=True)
            tallies.append(tally)
    _finish(tallies, arguments, time.monotonic() - started_s)


def _finish(tallies: list[Tally], arguments: Any, duration_s: float) -> None:
    rows: list[tuple[str, object]] = [("", "inputs  failures  hangs  slowest  what became of them")]
    for tally in tallies:
        became = ", ".join(f"{outcome} ×{count}" for outcome, count in tally.outcomes.most_common(8))
        counts = f"{tally.num_inputs:6}  {len(tally.failures):8}  {len(tally.hangs):5}  {tally.slowest_s:6.2f}s"
        rows.append((tally.surface, f"{counts}  {became}"))
        rows += [("", f"    {told}") for told in (*tally.failures[:5], *(f"hang: {name}" for name in tally.hangs[:5]))]
    total = sum(tally.num_inputs for tally in tallies)
    failures = sum(len(tally.failures) for tally in tallies)
    hangs = sum(len(tally.hangs) for tally in tallies)
    rows.append(("all", f"{total:6}  {failures:8}  {hangs:5}  in {duration_s:.0f} s"))
    targets = [
        Target("inputs", total, 1_000 if arguments.quick or arguments.url else 10_000),
        Target("failures", failures, 0, at_least=False),
        Target("hangs", hangs, 0, at_least=False),
    ]
    surfaces = {
        tally.surface: {
            "inputs": tally.num_inputs,
            "failures": tally.failures,
            "hangs": tally.hangs,
            "slowest_s": round(tally.slowest_s, 3),
            "outcomes": dict(tally.outcomes),
        }
        for tally in tallies
    }
    document = {"inputs": total, "seed": arguments.seed, "duration_s": round(duration_s, 1), "surfaces": surfaces}
    finish(rows, targets, document, arguments.json)


if __name__ == "__main__":
    main()
