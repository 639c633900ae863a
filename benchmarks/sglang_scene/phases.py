"""The phases of benchmarks/sglang_cpu.py: the requests and measurements of each."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.report import Median, Spread, in_order
from benchmarks.sglang_scene.servers import FIXED_ID, IN_TURNS, LEARNT_FROM, UNSEEN, Scene
from slipstream.children import Child, running_child
from slipstream.demo.topics import Prompt
from speculator.versions.store import DraftStore
from tests.sglang.server import SglangServer

CLIENTS = 4
TURN_TOKENS = 48
_WARM_UP_TURNS = 2
_AFTERWARDS_S = 0.5
_UNSEEN_TOKENS = 96
Kind = tuple[SglangServer, Mapping[str, Any]]
"""(server, sampling parameters) of one compared kind."""
SILENT = {"custom_params": {"slipstream": {"capture": False}}}


def _answers(kind: Kind, prompts: Sequence[list[int]], **sampling: Any) -> tuple[list[dict[str, Any]], float]:
    """SGLang's answers to the clients, and their tokens a second."""
    server, params = kind
    started_s = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda ids: server.generate(ids, **sampling, **params), prompts))
    return answers, sum(len(answer["output_ids"]) for answer in answers) / (time.perf_counter() - started_s)


# -- turns


@dataclass(frozen=True)
class Turns:
    """Token/s of each kind in each turn."""

    rates: dict[str, list[float]]
    num_prompts: int
    """Prompts of a turn."""
    report: dict[str, str]
    """Report of the server with the plugin, after the last turn."""

    @property
    def num_turns(self) -> int:
        return min(map(len, self.rates.values()))

    @property
    def num_requests(self) -> int:
        """Requests of each kind, warm-up included."""
        return (self.num_turns + _WARM_UP_TURNS) * self.num_prompts

    def spreads(self) -> dict[str, Spread]:
        return {kind: Spread.of(rates) for kind, rates in self.rates.items()}

    def ratio(self, above: str, below: str) -> Median:
        """Ratio of two kinds' rates in the same turn."""
        pairs = zip(self.rates[above], self.rates[below], strict=True)
        return Median.of([first / second for first, second in pairs])


def day_0(scene: Scene, plain: SglangServer, live: SglangServer, num_turns: int) -> Turns:
    """Compare no speculation, a random draft with capture, and one without capture."""
    kinds: dict[str, Kind] = {"plain": (plain, {}), "captured": (live, {}), "silent": (live, SILENT)}
    num_prompts = CLIENTS
    rates = _in_turns(scene, kinds, num_turns, num_prompts)
    return Turns(rates, num_prompts, scene.report())


def capture(scene: Scene, fixed: SglangServer, num_turns: int) -> Turns:
    """Compare capture on and off, on one server that drafts in every round."""
    kinds: dict[str, Kind] = {"captured": (fixed, {}), "silent": (fixed, SILENT)}
    num_prompts = 2 * CLIENTS  # so that half of the traces are made beside decoding
    rates = _in_turns(scene, kinds, num_turns, num_prompts)
    return Turns(rates, num_prompts, scene.settled_report(FIXED_ID))


def _in_turns(scene: Scene, kinds: Mapping[str, Kind], num_turns: int, num_prompts: int) -> dict[str, list[float]]:
    """In each turn all kinds get the same prompts, with a new number in front, so that no prefix cache has them."""
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(-_WARM_UP_TURNS, num_turns):
        first = num_prompts * (turn + _WARM_UP_TURNS) % IN_TURNS.stop
        prompts = scene.prompts[first : first + num_prompts]
        order = in_order(kinds, turn)
        for kind in order if turn // len(kinds) % 2 else reversed(order):
            number = f"{turn + _WARM_UP_TURNS:03d}{order.index(kind)}"
            asked = [scene.ids(f"Question {number}: {prompt.text[:1500]}") for prompt in prompts]
            _, rate = _answers(kinds[kind], asked, max_new_tokens=TURN_TOKENS, ignore_eos=True)
            # Work on this turn's traces must not fall into the next turn.
            time.sleep(_AFTERWARDS_S)
            if turn >= 0:
                rates[kind].append(rate)
    return rates


# -- learning


@dataclass(frozen=True)
class Learning:
    minutes: float
    completion_tokens: int
    version: int
    """The last one that came into service."""
    curve: list[dict[str, Any]]
    """Reports, by minute."""


def learn(scene: Scene, live: SglangServer, minutes: float, prompts: Iterable[Prompt] | None = None) -> Learning:
    """Live traffic of these prompts, or the scene's, with the trainer beside it."""
    prompts = itertools.cycle(prompts or scene.prompts[LEARNT_FROM])
    deadline_s = time.monotonic() + 60 * minutes
    curve: list[dict[str, Any]] = []

    def client(_: int) -> int:
        tokens = 0
        while time.monotonic() < deadline_s:
            tokens += len(live.generate(scene.ids(next(prompts).text), max_new_tokens=160)["output_ids"])
        return tokens

    with training(scene), ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        while time.monotonic() < deadline_s:
            time.sleep(min(30.0, max(deadline_s - time.monotonic(), 0.1)))
            curve.append({"minute": round(minutes - (deadline_s - time.monotonic()) / 60, 2), **scene.report()})
            print(curve[-1], flush=True)
        tokens = sum(done.result() for done in clients)
    return Learning(minutes, tokens, int(scene.report()["version"]), curve)


def training(scene: Scene) -> contextlib.AbstractContextManager[Child]:
    """A trainer of the scene's drafts, until the end."""
    places = ["--redis-url", scene.redis_url, "--store", str(scene.store.root), "--state", str(scene.folder / "state")]
    # Older versions come back into service in some phases.
    keep = {"SLIPSTREAM_TRAINER_KEEP_VERSIONS": "1000"}
    return running_child("train", ["--model", str(scene.model_dir), *places], scene.folder, **keep)


def add_head_options(options: argparse.ArgumentParser) -> None:
    """The options that `learnt_version` takes."""
    options.add_argument("--drafts", type=Path, metavar="FOLDER", help="take the head from here, or keep it here")
    options.add_argument("--minutes", type=float, help="that the head learns")


def learnt_version(scene: Scene, prompts: Sequence[Prompt], kept: Path | None, minutes: float) -> int:
    """The newest version of a head that has learnt from these prompts."""
    if kept is not None and kept.exists():
        shutil.rmtree(scene.store.root)
        shutil.copytree(kept, scene.store.root)
    else:
        with scene.live_server() as live:
            learn(scene, live, minutes, prompts)
        if kept is not None:
            shutil.copytree(scene.store.root, kept)
    version = DraftStore(scene.store.root).latest()
    assert version is not None
    return version


# -- swaps


@dataclass(frozen=True)
class Gaps:
    """Gaps between the chunks of endless streams."""

    ms: list[float]
    failed_requests: int


@dataclass(frozen=True)
class Swaps:
    seconds: float
    """Duration without swaps, and again with swaps."""
    calm: Gaps
    swapping: Gaps
    num_swaps: int
    report: dict[str, str]

    @property
    def failed_requests(self) -> int:
        return self.calm.failed_requests + self.swapping.failed_requests


def swaps(scene: Scene, live: SglangServer, version: int, seconds: float) -> Swaps:
    """Four endless streams, without and with swaps between version 1 and `version`."""
    calm = _gaps(scene, live, seconds, swap=lambda: None)
    versions = itertools.cycle((1, version))
    before = int(scene.report()["swaps"])
    swapping = _gaps(scene, live, seconds, swap=lambda: scene.pointer.publish(next(versions)))
    report = scene.report()
    return Swaps(seconds, calm, swapping, int(report["swaps"]) - before, report)


def _gaps(scene: Scene, live: SglangServer, seconds: float, *, swap: Callable[[], object]) -> Gaps:
    """`swap` is called seven times, after equal parts of the time."""
    prompts = itertools.cycle(scene.prompts[IN_TURNS])
    deadline_s = time.monotonic() + seconds

    def client(_: int) -> Gaps:
        gaps_ms = list[float]()
        failed = 0
        while time.monotonic() < deadline_s:
            last_s = None
            try:
                for _event in live.stream(scene.ids(next(prompts).text), max_new_tokens=128, ignore_eos=True):
                    now_s = time.perf_counter()
                    if last_s is not None:
                        gaps_ms.append(1000 * (now_s - last_s))
                    last_s = now_s
            except Exception:
                failed += 1
        return Gaps(gaps_ms, failed)

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        while time.monotonic() < deadline_s - seconds / 8:
            time.sleep(seconds / 8)
            swap()
        found = [done.result() for done in clients]
    return Gaps([gap for one in found for gap in one.ms], sum(one.failed_requests for one in found))


# -- unseen prompts


@dataclass(frozen=True)
class Unseen:
    accept_length: float
    """Accept length at fixed depth, as SGLang counts it."""
    accept_length_by_domain: dict[str, float]
    speedup: dict[str, Spread]
    """Tokens a second over those of plain decoding."""
    num_prompts: int
    same_text: int
    """Number of answers at fixed depth that equal those of plain decoding."""
    report: dict[str, str]


def unseen(scene: Scene, plain: SglangServer, fixed: SglangServer, live: SglangServer) -> Unseen:
    """Measure prompts that the draft has not learnt from."""
    kinds: dict[str, Kind] = {"plain": (plain, {}), "fixed": (fixed, SILENT), "live": (live, {})}
    prompts = scene.prompts[UNSEEN]
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    answers: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for turn, first in enumerate(range(0, len(prompts), CLIENTS)):
        asked = [scene.ids(prompt.text) for prompt in prompts[first : first + CLIENTS]]
        for kind in in_order(kinds, turn):
            batch, rate = _answers(kinds[kind], asked, max_new_tokens=_UNSEEN_TOKENS)
            answers[kind] += batch
            rates[kind].append(rate)
    pairs = zip(answers["plain"], answers["fixed"], strict=True)
    return Unseen(
        accept_length=accept_length(answers["fixed"]),
        accept_length_by_domain=_by_domain(prompts, answers["fixed"]),
        speedup={
            kind: Spread.of([fast / slow for fast, slow in zip(rates[kind], rates["plain"], strict=True)])
            for kind in ("fixed", "live")
        },
        num_prompts=len(prompts),
        same_text=sum(one["output_ids"] == other["output_ids"] for one, other in pairs),
        report=scene.report(),
    )


def _by_domain(prompts: Sequence[Prompt], answers: Sequence[dict[str, Any]]) -> dict[str, float]:
    lengths = {}
    for domain in sorted({prompt.domain for prompt in prompts}):
        pairs = zip(prompts, answers, strict=True)
        lengths[domain] = accept_length([answer for prompt, answer in pairs if prompt.domain == domain])
    return lengths


def accept_length(answers: Sequence[dict[str, Any]]) -> float:
    """Tokens a verification, the bonus included, from what SGLang counts for each request."""
    counted = [answer["meta_info"] for answer in answers]
    num_rounds = sum(int(info["spec_verify_ct"]) for info in counted)
    return 1 + sum(int(info["spec_num_correct_drafts"]) for info in counted) / num_rounds
