"""Compare a draft that keeps learning with the same draft frozen when the traffic changed, both on live traffic.

    python -m benchmarks.static_adaptive [--quick] [--json FILE] [--prompts FILE.jsonl] [--suffix-depth 0]
                                         [--minutes 12] [--clients 2] [--seed 7]

Two local engines of one process answer in turns, so that never more than one computes, and the trainer of the service
learns from the answers of both. They follow its versions together, until the topics change: from then on one of them
keeps the draft that it has. Then the first topics come back. Which engine has the next turn is drawn for each pair of
turns. Both turns ask as many prompts of each domain, each its own: no prompt comes twice in a run.

The changed traffic, for `--minutes`, is of the domain with the most prompts. The first is of all others: half of them
before, the rest on return.

A turn's clock runs while all clients wait for an answer. Figures are medians over pairs of turns, with their 95%
intervals: before the change, where both serve the same draft, so that what is not 1 is noise; in the last quarter of
the changed traffic; and on return. Earlier text is not remembered unless `--suffix-depth` says so: it would hide what
the draft brings.

Targets: on changed traffic adaptive / static ≥ 1.1 in tokens a second, and ≥ 1.25 in accepted tokens of the head per
token of the answers; ≥ 0.95 in tokens a second on return.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.common.engines import engine_with
from benchmarks.common.report import Median, Target, fill_in, finish, parser, prompts_of, refusing
from serving.capture.recorder import TraceRecorder
from serving.engine import CapturePolicy, GenerateRequest
from serving.hotswap.breaker import LiveWatch
from serving.hotswap.follower import DraftFollower
from serving.local.engine import LocalEngine
from slipstream.children import Child, running_child
from slipstream.demo.topics import Prompt
from slipstream.models import resolve_model
from speculator.draft.checkpoint import expected_shapes, model_key, target_fingerprint
from speculator.draft.initialization import fresh_draft
from speculator.draft.sampling_params import SamplingParams
from speculator.errors import ConfigError
from speculator.redis.client import connect
from speculator.redis.control_plane import DraftPointer
from speculator.redis.embedded import EmbeddedRedis
from speculator.redis.trace_stream import TraceStream, cap_for
from speculator.versions.lineage import ensure_lineage, load_draft
from speculator.versions.store import DraftStore

MAX_TOKENS = 160
MLP_WIDTH, DRAFT_VOCABULARY = 512, 4096
"""The demo's head, for the same reason: it costs half as much as the default."""
PROMPTS_A_CLIENT = 3
"""Prompts of a client in a turn."""
QUICK_COUPLES = 36
"""Pairs of prompts of the first topics, with `--quick`."""
ARMS = STATIC, ADAPTIVE = ("static", "adaptive")
BEFORE, CHANGED, BACK = ("before", "changed", "back")


@dataclass(frozen=True)
class Turn:
    """Figures of one engine in one turn; `seconds` in which every client waited for an answer."""

    tokens: int
    seconds: float
    head_tokens: float
    answer_tokens: int


Pair = dict[str, Turn]
Couple = tuple[Prompt, Prompt]
"""Two prompts of one domain, one for each engine."""


class Stage:
    """Both engines, the traffic, and the trainer beside them."""

    def __init__(
        self, engines: dict[str, LocalEngine], followers: dict[str, DraftFollower], trainer: Child, *, clients: int
    ) -> None:
        self.engines, self.followers, self.trainer, self.clients = engines, followers, trainer, clients

    def freeze(self) -> None:
        """Stop the static engine from following new versions; it keeps the draft that both have."""
        self.followers[STATIC].stop()
        self.engines[STATIC].install_draft(self.engines[ADAPTIVE].draft_version)

    async def play(self, couples: Sequence[Couple], minutes: float, *, rng: random.Random) -> list[Pair]:
        """Play pairs of turns for so long, or until too few prompts are left for another one."""
        end_s, pairs = time.monotonic() + 60 * minutes, list[Pair]()
        left, a_turn = list(couples), PROMPTS_A_CLIENT * self.clients
        while time.monotonic() < end_s and len(left) >= a_turn:
            self.trainer.check()
            taken, pair = [left.pop() for _ in range(a_turn)], {}
            for number, arm in enumerate(rng.sample(ARMS, len(ARMS))):
                pair[arm] = await self._turn(self.engines[arm], [couple[number] for couple in taken])
            pairs.append(pair)
        return pairs

    async def _turn(self, engine: LocalEngine, prompts: list[Prompt]) -> Turn:
        waiting, arrived = iter(prompts), list[tuple[float, int]]()
        began_s, before = time.perf_counter(), _accepted(engine)

        async def client() -> float:
            for prompt in waiting:
                await _ask(engine, prompt, arrived)
            return time.perf_counter()

        end_s = min(await asyncio.gather(*(client() for _ in range(self.clients))))
        return Turn(
            tokens=sum(count for at_s, count in arrived if at_s <= end_s),
            seconds=end_s - began_s,
            head_tokens=_accepted(engine) - before,
            answer_tokens=sum(count for _, count in arrived),
        )


async def _ask(engine: LocalEngine, prompt: Prompt, arrived: list[tuple[float, int]]) -> None:
    tokens = engine.tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
    request = GenerateRequest(
        request_id=f"{id(prompt)}-{len(arrived)}",
        prompt_token_ids=tuple(tokens[-(engine.info.context_length - MAX_TOKENS) :]),
        max_tokens=MAX_TOKENS,
        sampling=SamplingParams(temperature=0),
        policy=CapturePolicy(domain=prompt.domain),
    )
    async for chunk in engine.generate(request):
        arrived.append((time.perf_counter(), len(chunk.token_ids)))


def _accepted(engine: LocalEngine) -> float:
    """Tokens of the head that the engine has accepted so far."""
    (family,) = engine.metrics.accepted.collect()
    return sum(
        sample.value
        for sample in family.samples
        if sample.name.endswith("_total") and sample.labels["source"] == "head"
    )


@refusing
def main() -> None:
    arguments = _arguments()
    prompts = prompts_of(arguments.prompts)
    rng = random.Random(arguments.seed)
    first, other = _topics(prompts, rng)
    first = first[:QUICK_COUPLES] if arguments.quick else first
    middle, a_turn = len(first) // 2, PROMPTS_A_CLIENT * arguments.clients
    if min(middle, len(other)) < a_turn:
        raise ConfigError(
            f"too few prompts for {arguments.clients} clients: a turn takes {a_turn} pairs of a domain, and there are "
            f"{middle} before the change and {len(other)} of the changed traffic"
        )
    with ExitStack() as opened:
        stage = _stage(arguments, prompts, opened)
        with ExitStack() as following:
            for follower in stage.followers.values():
                follower.start()
                following.callback(follower.stop)
            learnt = asyncio.run(stage.play(first[:middle], math.inf, rng=rng))
            stage.freeze()
            changed = asyncio.run(stage.play(other, arguments.minutes, rng=rng))
            back = asyncio.run(stage.play(first[middle:], math.inf, rng=rng))
            versions = {arm: engine.draft_version for arm, engine in stage.engines.items()}
    phases = {BEFORE: _later(learnt, 2), CHANGED: _later(changed, 4), BACK: back}
    speeds = {phase: _speed(pairs) for phase, pairs in phases.items()}
    heads = {phase: _head(pairs) for phase, pairs in phases.items()}
    rows: list[tuple[str, object]] = [
        ("phase", "adaptive / static: tokens a second; accepted tokens of the head a token; pairs; tokens a second"),
        *(
            (
                phase,
                f"{speeds[phase]};  {heads[phase]};  {len(pairs)};  "
                + ", ".join(f"{arm} {_rate(pairs, arm):.1f}" for arm in ARMS),
            )
            for phase, pairs in phases.items()
        ),
        ("versions at the end", versions),
    ]
    document = {
        "suffix_depth": arguments.suffix_depth,
        "speed": {phase: speed.to_dict() for phase, speed in speeds.items()},
        "head_tokens": {phase: ratio.to_dict() for phase, ratio in heads.items()},
        "versions": versions,
    }
    targets = [
        Target("tokens a second on changed traffic, adaptive / static", speeds[CHANGED].value, 1.1),
        Target("accepted tokens of the head there", heads[CHANGED].value, 1.25),
        Target("tokens a second on return", speeds[BACK].value, 0.95),
    ]
    finish(rows, targets, document, arguments.json)


def _topics(prompts: Sequence[Prompt], rng: random.Random) -> tuple[list[Couple], list[Couple]]:
    """The first traffic and the changed one, in a random order. Raises ConfigError where there is one domain only."""
    by_domain: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in rng.sample(prompts, len(prompts)):
        by_domain[prompt.domain].append(prompt)
    if len(by_domain) < 2:
        raise ConfigError("all prompts have one domain: use prompts of several")
    couples = {domain: list(zip(of[::2], of[1::2], strict=False)) for domain, of in by_domain.items()}
    other = couples.pop(max(by_domain, key=lambda domain: len(by_domain[domain])))
    first = [couple for of in couples.values() for couple in of]
    return rng.sample(first, len(first)), other


def _later(pairs: list[Pair], parts: int) -> list[Pair]:
    """The last of so many equal parts, two pairs at least."""
    return pairs[-max(len(pairs) // parts, 2) :]


def _speed(pairs: list[Pair]) -> Median:
    def speed(turn: Turn) -> float:
        return turn.tokens / turn.seconds

    return Median.of([speed(pair[ADAPTIVE]) / speed(pair[STATIC]) for pair in pairs])


def _rate(pairs: list[Pair], arm: str) -> float:
    return sum(pair[arm].tokens for pair in pairs) / sum(pair[arm].seconds for pair in pairs)


def _head(pairs: list[Pair]) -> Median:
    def share(turn: Turn) -> float:
        return (turn.head_tokens + 1) / turn.answer_tokens  # + 1: it is a divisor, too

    return Median.of([share(pair[ADAPTIVE]) / share(pair[STATIC]) for pair in pairs])


def _stage(arguments: argparse.Namespace, prompts: list[Prompt], opened: ExitStack) -> Stage:
    model_dir = resolve_model(arguments.model)
    folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-")))
    redis_url = opened.enter_context(EmbeddedRedis(folder / "redis")).url
    fingerprint = target_fingerprint(model_dir)
    key, store = model_key(model_dir, fingerprint), DraftStore(folder / "drafts")
    version = ensure_lineage(
        store,
        model_dir,
        fingerprint,
        draft_vocab_size=DRAFT_VOCABULARY,
        intermediate_size=MLP_WIDTH,
        seed=arguments.seed,
        texts=[prompt.text for prompt in prompts],
    )
    embed = fresh_draft(model_dir, seed=0).embed
    stream = TraceStream(connect(redis_url), key, max_bytes=cap_for(model_dir))
    recorder = TraceRecorder(stream, max_buffer_bytes=64 << 20)
    opened.callback(recorder.close, timeout_s=10)
    engines: dict[str, LocalEngine] = {}
    followers: dict[str, DraftFollower] = {}
    for arm in ARMS:
        draft = load_draft(store, version, embed=embed, target_fingerprint=fingerprint)
        watch = LiveWatch(version)
        engines[arm] = opened.enter_context(
            engine_with(
                model_dir,
                draft,
                1,
                draft_version=version,
                settings={"suffix_depth": arguments.suffix_depth, "engine_id": arm},
                load_draft=partial(
                    store.load,
                    expected_fingerprint=fingerprint,
                    expected_d2t=draft.d2t.cpu(),
                    expected_shapes=expected_shapes(draft.config),
                ),
                on_trace=recorder.submit,
                on_round=watch.observe,
            )
        )
        followers[arm] = DraftFollower(
            engines[arm],
            DraftPointer(connect(redis_url), key),
            engine_id=arm,
            watch=watch,
            lifecycle=store.lifecycle,
        )
    places = ["--model", str(model_dir), "--redis-url", redis_url, "--store", str(folder / "drafts")]
    trainer = opened.enter_context(running_child("train", [*places, "--state", str(folder / "state")], folder))
    return Stage(engines, followers, trainer, clients=arguments.clients)


def _arguments() -> argparse.Namespace:
    options = parser("A draft that goes on learning beside one that stopped")
    options.add_argument("--suffix-depth", type=int, default=0, help="most proposals of earlier text; 0 keeps none")
    options.add_argument("--minutes", type=float, help="of the changed traffic; default 12, quick 1")
    options.add_argument("--clients", type=int, default=2)
    options.add_argument("--seed", type=int, default=7)
    arguments = options.parse_args()
    fill_in(arguments, {"minutes": (1.0, 12.0)})
    return arguments


if __name__ == "__main__":
    main()
