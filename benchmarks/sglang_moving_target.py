"""A target in training on SGLang: what its drafts accept, and how long its rollouts take.

.venv-sglang/bin/python -m benchmarks.sglang_moving_target --policies FOLDER [--quick] [--json FILE] [--minutes 3]
                                                           [--turns 2] [--groups 4] [--samples 8] [--slots 8]

FOLDER has the weights after every few steps of GRPO, as `python -m examples.grpo.train --keep-every 3 --out RUN` leaves
them in RUN/targets. First a head learns from rollouts of the target as it is, for `--minutes`. Then four servers move
to one policy after the other, and in each turn each of them draws the same groups at temperature 1:

* `live`: the head alone, three proposals a round, swapped whenever the trainer has published a better one;
* `static`: the same with the head as it was before the first policy;
* `rollout`: `/v1/rollouts` of a gateway, with everything as users have it; the trainer learns from its samples;
* `plain`: plain requests to SGLang without speculation, while the trainer stands still.

No server gets a prompt twice.

Targets: with every policy `live` has at least 0.9 of the accept length that it had at first; `rollout` takes at most
0.8 of the time of `plain` for a token, over all policies.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.report import Spread, Target, fill_in, finish, parser
from benchmarks.sglang_scene.phases import SILENT, accept_length, training
from benchmarks.sglang_scene.servers import SUFFIX_DEPTH, Scene, prepared
from serving.sglang.outside.weights import update_weights
from slipstream.client import Group, Rollouts
from speculator.redis.embedded import EmbeddedRedis
from tests.sglang.server import SglangServer

LIVE, STATIC, ROLLOUT, PLAIN = ARMS = ("live", "static", "rollout", "plain")
_ADMIN_KEY = "of-this-run-alone"
_UPDATE_S = 120.0
_MOST = 9
"""Largest number of a question in the turns."""


@dataclass(frozen=True)
class Drawn:
    """What one server did in one turn."""

    tokens: int
    seconds: float
    answers: Sequence[dict[str, Any]] = ()
    """SGLang's own, of plain requests."""


@dataclass(frozen=True)
class Stage:
    arguments: argparse.Namespace
    scene: Scene
    servers: dict[str, SglangServer]
    """By arm; that of `rollout` is behind the gateway."""
    gateway_url: str

    def move(self, version: int, folder: Path) -> None:
        """Give every server the weights in the folder."""
        body = {"version": version, "path": folder.name}
        key = {"authorization": f"Bearer {_ADMIN_KEY}"}
        url = f"{self.gateway_url}/v1/target-version"
        httpx.post(url, json=body, headers=key, timeout=_UPDATE_S, trust_env=False).raise_for_status()
        urls = [self.servers[arm].url for arm in (LIVE, STATIC, PLAIN)]
        _, failed = update_weights(urls, version, folder, timeout_s=_UPDATE_S)
        assert not failed, failed

    def draw(self, arm: str, prompts: Sequence[str]) -> Drawn:
        began_s = time.perf_counter()
        if arm == ROLLOUT:
            num_tokens = sum(self.rollout(prompts))
            return Drawn(num_tokens, time.perf_counter() - began_s)
        ids = [self.scene.ids(prompt) for prompt in prompts for _ in range(self.arguments.samples)]
        with ThreadPoolExecutor(len(ids)) as pool:
            answers = list(pool.map(lambda asked: self._ask(self.servers[arm], asked), ids))
        seconds = time.perf_counter() - began_s
        return Drawn(sum(len(answer["output_ids"]) for answer in answers), seconds, answers)

    def rollout(self, prompts: Sequence[str]) -> Iterator[int]:
        """The number of tokens of each sample."""
        groups = [
            Group(
                prompt=self.scene.ids(prompt),
                n=self.arguments.samples,
                max_tokens=self.arguments.max_tokens,
                temperature=1.0,
            )
            for prompt in prompts
        ]
        with Rollouts(self.gateway_url) as rollouts:
            for sample in rollouts.start(groups):
                assert sample.state == "finished", sample
                yield len(sample.tokens)

    def _ask(self, server: SglangServer, ids: Sequence[int]) -> dict[str, Any]:
        return server.generate(ids, max_new_tokens=self.arguments.max_tokens, temperature=1.0, **SILENT)


def main() -> None:
    arguments = _arguments()
    policies = _policies(arguments.policies)
    rows = list[dict[str, Any]]()
    asked = sums(random.Random(0), 1, _MOST)
    with prepared(arguments.model, None) as scene, _staged(scene, arguments) as stage, training(scene) as trainer:
        version = _warm_up(stage, arguments.minutes)
        with _heads_alone(stage, version):
            for number, folder in enumerate([None, *policies]):
                if folder is not None:
                    stage.move(number, folder)
                drawn: dict[str, list[Drawn]] = {arm: [] for arm in ARMS}
                for turn in range(arguments.turns):
                    prompts = list(itertools.islice(asked, arguments.groups))
                    for arm in random.Random(f"{number} {turn}").sample(ARMS, len(ARMS)):
                        if arm == PLAIN:
                            trainer.pause()
                        drawn[arm].append(stage.draw(arm, prompts))
                        trainer.resume()
                rows.append(_row(folder, drawn, int(scene.report(LIVE)["version"])))
                print(rows[-1], flush=True)
    _report(rows, version, arguments)


def _policies(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), key=lambda step: int(step.name.removeprefix("step-")))


def _warm_up(stage: Stage, minutes: float) -> int:
    """Rollouts of the target as it is; the version that came into service last."""
    asked, deadline_s = sums(random.Random(1), 10, 99), time.monotonic() + 60 * minutes
    while time.monotonic() < deadline_s:
        sum(stage.rollout(list(itertools.islice(asked, stage.arguments.groups))))
    return int(stage.scene.report(ROLLOUT)["version"])


def sums(rng: random.Random, low: int, high: int) -> Iterator[str]:
    """The questions of `examples/grpo` with numbers from `low` to `high`, each once."""
    pairs = list(itertools.product(range(low, high + 1), repeat=2))
    return (f"What is {a} + {b}?" for a, b in rng.sample(pairs, len(pairs)))


def _row(folder: Path | None, drawn: dict[str, list[Drawn]], version: int) -> dict[str, Any]:
    def rate(arm: str) -> float:
        return sum(turn.tokens for turn in drawn[arm]) / sum(turn.seconds for turn in drawn[arm])

    def accepted(arm: str) -> float:
        return accept_length([answer for turn in drawn[arm] for answer in turn.answers])

    return {
        "policy": folder.name if folder else "step-0",
        "version": version,
        **{arm: round(accepted(arm), 3) for arm in (LIVE, STATIC)},
        "tokens_per_s": {arm: round(rate(arm), 1) for arm in ARMS},
        "tokens": {arm: sum(turn.tokens for turn in drawn[arm]) for arm in ARMS},
        "seconds": {arm: round(sum(turn.seconds for turn in drawn[arm]), 2) for arm in ARMS},
    }


def _report(rows: Sequence[dict[str, Any]], version: int, arguments: argparse.Namespace) -> None:
    kept = {arm: [row[arm] / rows[0][arm] for row in rows] for arm in (LIVE, STATIC)}
    per_token = {
        arm: sum(row["seconds"][arm] for row in rows) / sum(row["tokens"][arm] for row in rows)
        for arm in (ROLLOUT, PLAIN)
    }
    ratio = per_token[ROLLOUT] / per_token[PLAIN]
    by_policy = [row["tokens_per_s"][PLAIN] / row["tokens_per_s"][ROLLOUT] for row in rows]
    table: list[tuple[str, object]] = [
        *(
            (
                f"{row['policy']}: accept length live, static; time, rollout / plain",
                f"{row[LIVE]:.2f}, {row[STATIC]:.2f}; {times:.2f}",
            )
            for row, times in zip(rows, by_policy, strict=True)
        ),
        *((f"{arm}: accept length over that at first", Spread.of(values)) for arm, values in kept.items()),
        ("time of a token, rollout / plain, all policies", f"{ratio:8.2f}"),
    ]
    document = {
        "policies": list(rows),
        "live_kept": Spread.of(kept[LIVE]).to_dict(),
        "static_kept": Spread.of(kept[STATIC]).to_dict(),
        "rollout_over_plain": round(ratio, 4),
        "version_at_first": version,
    }
    targets = [
        Target("live: least accept length over that at first", min(kept[LIVE]), 0.9),
        Target("time of a token, rollout over plain", ratio, 0.8, at_least=False),
    ]
    finish(table, targets, document, arguments.json)


@contextlib.contextmanager
def _staged(scene: Scene, arguments: argparse.Namespace) -> Iterator[Stage]:
    """The servers of `rollout` and `plain`, and the gateway."""
    flags = ("--stream-interval", "4", "--max-running-requests", str(arguments.slots))
    served = scene.live_server(1, flags, name=ROLLOUT, suffix_depth=SUFFIX_DEPTH)
    plain = scene.plain_server("--max-running-requests", str(arguments.slots), name=PLAIN)
    with served, plain:
        settings = {
            "SLIPSTREAM_GATEWAY_ADMIN_KEY": _ADMIN_KEY,
            "SLIPSTREAM_GATEWAY_TARGETS_DIR": str(arguments.policies.resolve()),
        }
        with scene.gateway(served.url, "--engine-id", ROLLOUT, **settings) as url:
            yield Stage(arguments, scene, {ROLLOUT: served, PLAIN: plain}, url)


@contextlib.contextmanager
def _heads_alone(stage: Stage, version: int) -> Iterator[None]:
    """Add the servers of `live` and `static`."""
    scene, flags = stage.scene, ("--max-running-requests", str(stage.arguments.slots))
    with EmbeddedRedis(scene.folder / "apart") as apart:
        off = {"SLIPSTREAM_CAPTURE": "0"}
        live = scene.fixed_server(version, off, flags=flags, name=LIVE)
        # Its Redis has no pointer to follow.
        static = scene.fixed_server(version, {**off, "SLIPSTREAM_REDIS_URL": apart.url}, flags=flags, name=STATIC)
        with live, static:
            stage.servers.update({LIVE: live, STATIC: static})
            yield


def _arguments() -> argparse.Namespace:
    options = parser("Drafts and rollouts of a target in training, on SGLang", has_prompts=False)
    options.add_argument(
        "--policies", type=Path, required=True, metavar="FOLDER", help="with folders step-N of weights"
    )
    options.add_argument("--minutes", type=float, help="that the head learns at first; default 3, quick 0.5")
    options.add_argument("--turns", type=int, help="of each policy; default 2, quick 1")
    options.add_argument("--groups", type=int, default=4, help="of a turn")
    options.add_argument("--samples", type=int, default=8, help="of a group")
    options.add_argument("--max-tokens", type=int, default=24, help="of a sample")
    options.add_argument("--slots", type=int, default=8, help="requests that a server decodes together")
    arguments = options.parse_args()
    fill_in(arguments, {"minutes": (0.5, 3.0), "turns": (1, 2)})
    num_prompts = (1 + len(_policies(arguments.policies))) * arguments.turns * arguments.groups
    if not 0 < num_prompts <= _MOST**2:
        options.error(f"{num_prompts} prompts in all turns, and there are {_MOST**2}: fewer --turns or --groups")
    return arguments


if __name__ == "__main__":
    main()
