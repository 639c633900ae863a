"""The loop through real SGLang on a machine without a GPU: what it costs on day 0, what it learns, what a swap does.

.venv-sglang/bin/python -m benchmarks.sglang_cpu [--quick] [--json FILE] [--prompts FILE.jsonl] [--minutes 15]
                                                  [--parts day_0 swaps capture unseen]

Two servers stand side by side and are asked in short turns, so that a slow second of the machine meets both: one
without speculation and without the plugin, one with the plugin, adaptive depth 0 … 3, capture, and a fresh random
draft (`day_0`, six minutes). Then a trainer learns beside the second one under live traffic. It goes to and fro between
its first version and the last one (`swaps`). A third server with the last version and a fixed depth of 3 answers with
capture and without in turns (`capture`), and prompts that nobody has learnt from (`unseen`). --quick has no trainer and
no third server, and swaps between random drafts. What capture does after a turn's last token is in no turn. All of it
shows the integration, not SGLang's speed: its CPU operators here are the project's own in plain PyTorch.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.common import Median, Spread, Target, fill_in, finish, parser, pick_prompts
from slipstream.models import resolve_model
from slipstream.topics import Prompt
from speculator.checkpoint import draft_config_json, draft_state, model_key, target_fingerprint
from speculator.embedded_redis import EmbeddedRedis
from speculator.fresh import fresh_draft
from speculator.lineage import admit, ensure_lineage
from speculator.pointer import DraftPointer
from speculator.redis_client import connect
from speculator.store import DraftStore
from tests.sglang.server import SglangServer, speculative_flags

CLIENTS = 4
TURN_TOKENS = 48
DEPTH = 3
PARTS = ("day_0", "swaps", "capture", "unseen")
ENGINE_ID, FIXED_ID = "benchmark", "fixed"
_WARM_UP, _AFTERWARDS_S = 2, 0.5
SILENT = {"slipstream": {"capture": False}}
Kind = tuple[SglangServer, dict[str, Any]]
"""A server, and the sampling parameters that make the difference."""


@dataclass
class Bench:
    """What all phases share."""

    work: Path
    model_dir: Path
    store: DraftStore
    redis_url: str
    key: str
    prompts: list[Prompt]
    tokenizer: Any

    def ids(self, prompt: Prompt) -> list[int]:
        messages = [{"role": "user", "content": prompt.text}]
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))[-1024:]

    def draft_dir(self, version: int) -> Path:
        return self.store.root / "versions" / f"{version:06d}"

    def pointer(self) -> DraftPointer:
        return DraftPointer(connect(self.redis_url), self.key)

    def report(self, engine_id: str = ENGINE_ID) -> dict[str, str]:
        return self.pointer().engines().get(engine_id, {})

    def settled_report(self, engine_id: str) -> dict[str, str]:
        """Once two in a row, some seconds apart, say the same about capture."""
        before: dict[str, str] = {}
        for _ in range(20):
            report = self.report(engine_id)
            if before and all(report[name] == before[name] for name in ("captured", "appended", "dropped", "pending")):
                break
            before = report
            time.sleep(3)
        return report

    def plain_server(self) -> SglangServer:
        return SglangServer(self.model_dir, log_path=self.work / "plain.log")

    def live_server(self) -> SglangServer:
        config = self.work / "adaptive.json"
        config.write_text('{"1": {"candidate_steps": [0, 1, 2, 3]}}')
        return SglangServer(
            self.model_dir,
            log_path=self.work / "live.log",
            flags=[
                *speculative_flags(self.draft_dir(1), num_steps=DEPTH),
                *("--speculative-adaptive", "--speculative-adaptive-config", str(config)),
            ],
            env=self._plugin(ENGINE_ID),
        )

    def fixed_server(self, version: int) -> SglangServer:
        return SglangServer(
            self.model_dir,
            log_path=self.work / "fixed.log",
            flags=speculative_flags(self.draft_dir(version), num_steps=DEPTH),
            env=self._plugin(FIXED_ID),
        )

    def _plugin(self, engine_id: str) -> dict[str, str]:
        return {
            "SLIPSTREAM_ENABLED": "1",
            "SLIPSTREAM_REDIS_URL": self.redis_url,
            "SLIPSTREAM_STORE": str(self.store.root),
            "SLIPSTREAM_ENGINE_ID": engine_id,
            "SLIPSTREAM_CAPTURE": "1",
            # All of it, also where no trainer reads.
            "SLIPSTREAM_CAPTURE_FLOOR": "1",
            # Swaps are measured here, and come in quick succession.
            "SLIPSTREAM_WATCH": "0",
        }


def main() -> None:
    options = parser("The loop through real SGLang on a CPU")
    options.add_argument("--minutes", type=float, default=15, help="live learning, without --quick")
    options.add_argument("--turns", type=int, help="of each kind; default 30, quick 8")
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to run; default all")
    arguments = options.parse_args()
    rows: list[tuple[str, object]] = []
    targets: list[Target] = []
    document: dict[str, Any] = {"clients": CLIENTS, "depth": DEPTH}
    parts = set(arguments.parts) - ({"capture", "unseen"} if arguments.quick else set())
    if not parts:
        options.error("--quick has day_0 and swaps alone")
    fill_in(arguments, {"turns": (8, 30)})
    turns: int = arguments.turns
    with (
        _bench(arguments.model, arguments.prompts) as bench,
        bench.live_server() as live,
        bench.plain_server() as plain,
    ):
        if "day_0" in parts:
            _day_0(bench, plain, live, turns, rows, targets, document)
        if parts - {"day_0"}:
            version = (
                _another_random_version(bench) if arguments.quick else _learn(bench, live, arguments.minutes, document)
            )
        if "swaps" in parts:
            _swaps_under_load(bench, live, version, 20.0 if arguments.quick else 60.0, rows, targets, document)
        if parts & {"capture", "unseen"}:
            bench.pointer().publish(version)
            with bench.fixed_server(version) as fixed:
                if "capture" in parts:
                    _capture(bench, fixed, turns, rows, targets, document)
                if "unseen" in parts:
                    _unseen(bench, plain, fixed, live, rows, targets, document)
    finish(rows, targets, document, arguments.json)


@contextlib.contextmanager
def _bench(model: str, prompts: Path | None) -> Iterator[Bench]:
    model_dir = resolve_model(model)
    fingerprint = target_fingerprint(model_dir)
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(Path(folder) / "redis") as redis:
        store = DraftStore(Path(folder) / "drafts")
        chosen = pick_prompts(prompts, 2000)
        ensure_lineage(store, model_dir, fingerprint, texts=[prompt.text for prompt in chosen[200:]])
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        key = model_key(model_dir, fingerprint)
        yield Bench(Path(folder), model_dir, store, redis.url, key, chosen, tokenizer)


def _day_0(
    bench: Bench,
    plain: SglangServer,
    live: SglangServer,
    turns: int,
    rows: list[tuple[str, object]],
    targets: list[Target],
    document: dict[str, Any],
) -> None:
    """Token/s without speculation, with a random draft and capture, and with capture off."""
    kinds: dict[str, Kind] = {
        "plain": (plain, {}),
        "captured": (live, {}),
        "silent": (live, {"custom_params": SILENT}),
    }
    rates = _in_turns(bench, kinds, turns)
    ratios = {
        "day_0_ratio": _ratio(rates, "captured", "plain"),
        "day_0_without_capture_ratio": _ratio(rates, "silent", "plain"),
        "capture_ratio": _ratio(rates, "captured", "silent"),
    }
    rows += [
        *((f"day 0, {kind}: token/s", Spread.of(values)) for kind, values in rates.items()),
        ("day 0 / no speculation", ratios["day_0_ratio"]),
        ("day 0 without capture / no speculation", ratios["day_0_without_capture_ratio"]),
        ("capture on / off", ratios["capture_ratio"]),
    ]
    for name, at_least in (("day_0_ratio", 0.97), ("capture_ratio", 0.98)):
        targets.append(Target(name, ratios[name].value, at_least))
    document["day_0"] = {
        **_figures(rates),
        **{name: ratio.to_dict() for name, ratio in ratios.items()},
        "report": bench.report(),
    }


def _capture(
    bench: Bench,
    fixed: SglangServer,
    turns: int,
    rows: list[tuple[str, object]],
    targets: list[Target],
    document: dict[str, Any],
) -> None:
    """Token/s with capture and without, of one server that drafts in every round."""
    kinds: dict[str, Kind] = {"captured": (fixed, {}), "silent": (fixed, {"custom_params": SILENT})}
    # Two a client, so that half of the traces are made beside decoding.
    rates = _in_turns(bench, kinds, turns, per_client=2)
    ratio = _ratio(rates, "captured", "silent")
    report = bench.settled_report(FIXED_ID)
    rows += [
        *((f"fixed depth {DEPTH}, {kind}: token/s", Spread.of(values)) for kind, values in rates.items()),
        (f"fixed depth {DEPTH}: capture on / off", ratio),
    ]
    targets += [
        Target("capture_ratio_drafting", ratio.value, 0.98),
        Target("captured_requests", int(report["appended"]), (turns + _WARM_UP) * 2 * CLIENTS),
    ]
    document["capture"] = {
        **_figures(rates),
        "capture_ratio_drafting": ratio.to_dict(),
        "report": report,
    }


def _in_turns(bench: Bench, kinds: Mapping[str, Kind], turns: int, *, per_client: int = 1) -> dict[str, list[float]]:
    """Token/s of each kind in each turn, in which a client asks `per_client` times.

    In a turn all are asked the same, with another number in front, so that no server has read it before.
    """
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    num_prompts = CLIENTS * per_client
    for turn in range(-_WARM_UP, turns):
        first = num_prompts * (turn + _WARM_UP) % 96  # those from 100 on are learnt from, or asked unseen
        prompts = bench.prompts[first : first + num_prompts]
        shift = turn % len(kinds)
        order = [*list(kinds)[shift:], *list(kinds)[:shift]]
        for kind in order if turn // len(kinds) % 2 else reversed(order):
            server, params = kinds[kind]
            number = f"{turn + _WARM_UP:03d}{order.index(kind)}"
            texts = [f"Question {number}: {prompt.text[:1500]}" for prompt in prompts]
            batch = [bench.ids(replace(prompt, text=text)) for prompt, text in zip(prompts, texts, strict=True)]
            rate = _tokens_per_s(server, batch, params, max_new_tokens=TURN_TOKENS)
            # What is left to do for the traces of this turn is not to fall into the next.
            time.sleep(_AFTERWARDS_S)
            if turn >= 0:
                rates[kind].append(rate)
    return rates


def _figures(rates: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    return {
        "turns": min(map(len, rates.values())),
        "turn_tokens": TURN_TOKENS,
        "tokens_per_s": {kind: Spread.of(values).to_dict() for kind, values in rates.items()},
    }


def _ratio(rates: Mapping[str, Sequence[float]], above: str, below: str) -> Median:
    """Of the rates of the same turn."""
    return Median.of([first / second for first, second in zip(rates[above], rates[below], strict=True)])


def _tokens_per_s(
    server: SglangServer, batch: Sequence[list[int]], params: dict[str, Any], max_new_tokens: int
) -> float:
    values = {"max_new_tokens": max_new_tokens, "ignore_eos": True, **params}
    started_s = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda ids: server.generate(ids, **values), batch))
    return sum(len(answer["output_ids"]) for answer in answers) / (time.perf_counter() - started_s)


def _another_random_version(bench: Bench) -> int:
    draft = fresh_draft(bench.model_dir, seed=1)
    fingerprint = bench.store.manifest(1).target_fingerprint
    state = {**draft_state(draft), "d2t": bench.store.load(1)["d2t"], "t2d": bench.store.load(1)["t2d"]}
    config = draft_config_json(draft.config)
    version = bench.store.write(state, config, parent=1, target_fingerprint=fingerprint, info={}).version
    admit(bench.store, version, target_fingerprint=fingerprint, actor="benchmark", reason="random weights")
    return version


def _learn(bench: Bench, live: SglangServer, minutes: float, document: dict[str, Any]) -> int:
    """Live traffic with the trainer beside it; returns the last version that came into service."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "SLIPSTREAM_TRAINER_KEEP_VERSIONS": "1000",  # the first one comes back into service below
    }
    command = [sys.executable, "-m", "slipstream", "train", "--model", str(bench.model_dir)]
    places = ["--redis-url", bench.redis_url, "--store", str(bench.store.root), "--state", str(bench.work / "state")]
    log = (bench.work / "trainer.log").open("wb")
    trainer = subprocess.Popen([*command, *places], env=environment, stdout=log, stderr=log)
    prompts = itertools.cycle(bench.prompts[200:])
    deadline_s = time.monotonic() + 60 * minutes
    curve: list[dict[str, Any]] = []

    def client(_: int) -> int:
        tokens = 0
        while time.monotonic() < deadline_s:
            tokens += len(live.generate(bench.ids(next(prompts)), max_new_tokens=160)["output_ids"])
        return tokens

    try:
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(client, number) for number in range(CLIENTS)]
            while time.monotonic() < deadline_s:
                time.sleep(min(30.0, max(deadline_s - time.monotonic(), 0.1)))
                curve.append({"minute": round(minutes - (deadline_s - time.monotonic()) / 60, 2), **bench.report()})
                print(curve[-1], flush=True)
            tokens = sum(done.result() for done in clients)
    finally:
        trainer.terminate()
        trainer.wait(60)
        log.close()
    version = int(bench.report()["version"])
    document["learning"] = {"minutes": minutes, "completion_tokens": tokens, "version": version, "curve": curve}
    return version


def _swaps_under_load(
    bench: Bench,
    live: SglangServer,
    version: int,
    seconds: float,
    rows: list[tuple[str, object]],
    targets: list[Target],
    document: dict[str, Any],
) -> None:
    """Gaps between the chunks of four endless streams, without and with swaps between version 1 and `version`."""
    calm_ms, failed_calm = _gaps_ms(bench, live, seconds, swap=lambda: None)
    versions = itertools.cycle((1, version))
    pointer = bench.pointer()
    before = int(bench.report()["swaps"])
    swapping_ms, failed = _gaps_ms(bench, live, seconds, swap=lambda: pointer.publish(next(versions)))
    report = bench.report()
    swaps = int(report["swaps"]) - before
    p99 = statistics.quantiles(calm_ms, n=100)[98]
    rows += [
        ("gap without swaps: p50, p99, max (ms)", f"{statistics.median(calm_ms):.0f}, {p99:.0f}, {max(calm_ms):.0f}"),
        ("gap with swaps: p50, max (ms)", f"{statistics.median(swapping_ms):.0f}, {max(swapping_ms):.0f}"),
        (
            "swaps, failed requests, stall of the last (ms)",
            f"{swaps}, {failed_calm + failed}, {report['last_stall_ms']}",
        ),
    ]
    targets += [
        Target("swap_gap_over_p99", max(swapping_ms) / p99, 2.0, at_least=False),
        Target("failed_requests", failed_calm + failed, 0, at_least=False),
        Target("swaps", swaps, 5 if seconds >= 60 else 2),
        Target("target_unchanged", float(report["target_ok"]), 1),
    ]
    document["swaps"] = {
        "seconds": seconds,
        "num_swaps": swaps,
        "failed_requests": failed_calm + failed,
        "calm_ms": {"p50": statistics.median(calm_ms), "p99": p99, "max": max(calm_ms), "num_gaps": len(calm_ms)},
        "swapping_ms": {"p50": statistics.median(swapping_ms), "max": max(swapping_ms), "num_gaps": len(swapping_ms)},
        "last_stall_ms": float(report["last_stall_ms"]),
        "swap_failures": int(report["swap_failures"]),
    }


def _gaps_ms(bench: Bench, live: SglangServer, seconds: float, *, swap: Any) -> tuple[list[float], int]:
    prompts = itertools.cycle(bench.prompts[:200])
    deadline_s = time.monotonic() + seconds

    def client(_: int) -> tuple[list[float], int]:
        gaps, failed = [], 0
        while time.monotonic() < deadline_s:
            last_s = None
            try:
                for _ in live.stream(bench.ids(next(prompts)), max_new_tokens=128, ignore_eos=True):
                    now_s = time.perf_counter()
                    if last_s is not None:
                        gaps.append(1000 * (now_s - last_s))
                    last_s = now_s
            except Exception:
                failed += 1
        return gaps, failed

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        while time.monotonic() < deadline_s - seconds / 8:
            time.sleep(seconds / 8)
            swap()
        results = [done.result() for done in clients]
    return [gap for gaps, _ in results for gap in gaps], sum(failed for _, failed in results)


def _unseen(
    bench: Bench,
    plain: SglangServer,
    fixed: SglangServer,
    live: SglangServer,
    rows: list[tuple[str, object]],
    targets: list[Target],
    document: dict[str, Any],
) -> None:
    """SGLang's own accept length on prompts that nobody has learnt from, and token/s beside plain decoding."""
    prompts = bench.prompts[100:148]
    counted = []
    rates: dict[str, list[float]] = {"plain": [], "fixed": [], "live": []}
    same_text = 0
    for start in range(0, len(prompts), CLIENTS):
        batch = prompts[start : start + CLIENTS]
        tokens: dict[str, list[list[int]]] = {}
        kinds = [("plain", plain, {}), ("fixed", fixed, {"custom_params": SILENT}), ("live", live, {})]
        shift = start // CLIENTS % len(kinds)
        for kind, server, params in kinds[shift:] + kinds[:shift]:
            started_s = time.perf_counter()
            with ThreadPoolExecutor(CLIENTS) as pool:
                values = {"max_new_tokens": 96, **params}
                answers = list(pool.map(lambda p: server.generate(bench.ids(p), **values), batch))  # noqa: B023
            tokens[kind] = [answer["output_ids"] for answer in answers]
            rates[kind].append(sum(map(len, tokens[kind])) / (time.perf_counter() - started_s))
            if kind == "fixed":
                counted += [(p.domain, answer["meta_info"]) for p, answer in zip(batch, answers, strict=True)]
        same_text += sum(first == second for first, second in zip(tokens["plain"], tokens["fixed"], strict=True))
    accept_length = _accept_length([info for _, info in counted])
    by_domain = {}
    for domain in sorted({domain for domain, _ in counted}):
        infos = [info for other, info in counted if other == domain]
        by_domain[domain] = _accept_length(infos)
    speedup = {
        kind: Spread.of([fast / slow for fast, slow in zip(rates[kind], rates["plain"], strict=True)])
        for kind in ("fixed", "live")
    }
    rows += [
        ("accept length on unseen prompts (SGLang's count)", f"{accept_length:.3f}"),
        ("by domain", ", ".join(f"{domain} {length:.2f}" for domain, length in by_domain.items())),
        ("fixed depth 3 / no speculation", speedup["fixed"]),
        ("adaptive depth / no speculation", speedup["live"]),
        ("same text as without speculation", f"{same_text} of {len(prompts)} (bfloat16)"),
    ]
    targets.append(Target("accept_length", accept_length, 1.6))
    document["unseen"] = {
        "accept_length": accept_length,
        "accept_length_by_domain": by_domain,
        "speedup": {kind: spread.to_dict() for kind, spread in speedup.items()},
        "num_prompts": len(prompts),
        "same_text": same_text,
        "report": bench.report(),
    }


def _accept_length(counted: Sequence[dict[str, Any]]) -> float:
    """Tokens a verification, the bonus included, from what SGLang counts for each request."""
    accepted = sum(info["spec_num_correct_drafts"] for info in counted)
    return 1 + accepted / sum(info["spec_verify_ct"] for info in counted)


if __name__ == "__main__":
    main()
