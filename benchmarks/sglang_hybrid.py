"""Compare head and suffix drafts together in SGLang with either alone, and with SGLang's own n-gram drafts.

.venv-sglang/bin/python -m benchmarks.sglang_hybrid [--quick] [--json FILE] [--prompts FILE.jsonl] [--minutes 5]
                                                    [--drafts FOLDER] [--turns 20] [--warm-up 2] [--clients 2]

First a head learns from live traffic for some minutes; with `--drafts` it is kept in that folder, and taken from there
the next time. Then four servers stand beside each other: the head alone, earlier text alone (beside a head that has
learnt nothing, and sleeps), both, and SGLang with `--speculative-algorithm NGRAM`, which is asked in `mixed` only. In a
turn each is asked the same, a new prompt for each client, which streams one answer. What counts is the time in which
all of them decode; a turn without such a time is left out. Half of the prompts of each domain are for learning, the
other half for the turns, fewer of them where the prompts of a workload do not suffice. No prompt is in two workloads.

`editing` asks for small changes in programs (prompts of domains with "code" in their names), `rag` has long prompts
whose answers copy, `mixed` takes all domains in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common.decoding import NeverTogetherError, decode
from benchmarks.common.report import Median, Spread, Target, fill_in, finish, in_order, parser, prompts_of, refusing
from benchmarks.common.workloads import EDITS, asks_for
from benchmarks.sglang_scene.phases import add_head_options, learnt_version
from benchmarks.sglang_scene.servers import SUFFIX_DEPTH, Scene, prepared
from slipstream.demo.topics import Prompt
from speculator.errors import ConfigError
from tests.sglang.server import SglangServer

_TOKENS = 128
_LONGEST_PROMPT = 3500
"""Longest prompt in characters; a longer one is cut at its beginning."""
_FLAGS = ("--stream-interval", "4", "--dtype", "float32")
"""In float32 all servers write the same text, on which the accept length of a turn depends."""
_BETTER = {"editing": 1.3, "rag": 1.3, "mixed": 1.1}
"""Targets: rate with both sources over that of the head alone."""


@dataclass
class Measured:
    """Measurements of each server, by turn."""

    rates: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    accept_lengths: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    left_out: int = 0
    """Turns in which one answer ended before another began, on some server."""

    def ratio(self, below: str) -> Median:
        """Rate of `both` over that of `below`, turn by turn."""
        return Median.of([ours / other for ours, other in zip(self.rates["hybrid"], self.rates[below], strict=True)])

    def to_dict(self) -> dict[str, Any]:
        ratios = {f"hybrid_over_{name}": self.ratio(name) for name in self.rates if name != "hybrid"}
        return {
            **{name: round(ratio.value, 4) for name, ratio in ratios.items()},
            "intervals": {name: ratio.to_dict() for name, ratio in ratios.items()},
            "tokens_per_s": {name: Spread.of(rates).to_dict() for name, rates in self.rates.items()},
            "accept_length": {name: Spread.of(lengths).to_dict() for name, lengths in self.accept_lengths.items()},
            "turns": len(self.rates["hybrid"]),
            "turns_left_out": self.left_out,
        }


@refusing
def main() -> None:
    options = parser("Earlier text beside the head in SGLang, against either alone")
    add_head_options(options)
    options.add_argument("--turns", type=int, help="of each workload")
    options.add_argument("--warm-up", type=int, default=2, help="turns before those that count")
    options.add_argument("--clients", type=int, default=2)
    options.add_argument("--workloads", nargs="+", choices=_BETTER, default=list(_BETTER))
    arguments = options.parse_args()
    fill_in(arguments, {"minutes": (1.0, 5.0), "turns": (4, 20)})
    learnt_from, asked_for = _halves(prompts_of(arguments.prompts))
    turns = _turns(arguments.workloads, asked_for, arguments)
    with prepared(arguments.model, arguments.prompts) as scene:
        version = learnt_version(scene, learnt_from, arguments.drafts, arguments.minutes)
        with _servers(scene, version) as servers:
            workloads = {}
            for name, texts in turns.items():
                asked = {of: server for of, server in servers.items() if of != "ngram" or name == "mixed"}
                workloads[name] = _measure(scene, asked, texts, warm_up=arguments.warm_up)
                print(f"{name}: {workloads[name].to_dict()}", flush=True)
            reports = {name: scene.report(name) for name in ("head", "suffix", "hybrid")}
    document = {
        "workloads": {name: measured.to_dict() for name, measured in workloads.items()},
        "version": version,
        "reports": reports,
    }
    finish(_rows(workloads), _targets(workloads), document, arguments.json)


def _halves(prompts: Sequence[Prompt]) -> tuple[list[Prompt], dict[str, list[Prompt]]]:
    """(prompts to learn from, domain after domain; prompts for the turns, by domain)."""
    by_domain: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in dict.fromkeys(prompts):
        by_domain[prompt.domain].append(prompt)
    learnt = [prompt for row in itertools.zip_longest(*(of[::2] for of in by_domain.values())) for prompt in row]
    return [prompt for prompt in learnt if prompt], {domain: of[1::2] for domain, of in by_domain.items()}


@contextlib.contextmanager
def _servers(scene: Scene, version: int) -> Iterator[Mapping[str, SglangServer]]:
    num_nodes = str(1 + SUFFIX_DEPTH)
    ngram = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", num_nodes)
    silent = {"SLIPSTREAM_CAPTURE": "0"}
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(server)
            for name, server in {
                "hybrid": scene.live_server(version, _FLAGS, silent, name="hybrid", suffix_depth=SUFFIX_DEPTH),
                "head": scene.live_server(version, _FLAGS, silent, name="head"),
                "suffix": scene.live_server(1, _FLAGS, silent, name="suffix", suffix_depth=SUFFIX_DEPTH),
                "ngram": scene.plain_server(*ngram, *_FLAGS, name="ngram"),
            }.items()
        }


def _turns(
    workloads: Sequence[str], by_domain: Mapping[str, Sequence[Prompt]], arguments: argparse.Namespace
) -> dict[str, list[list[str]]]:
    """Texts of the clients by workload and turn, warm-up included; all are different. Raises ConfigError where a
    workload has too few prompts for a turn that counts.
    """
    clients, warm_up = arguments.clients, arguments.warm_up
    left, found = {domain: list(of) for domain, of in by_domain.items()}, {}
    # `mixed` first: it takes a few of each domain, and what is left of a domain is for the others.
    for name in sorted(dict.fromkeys(workloads), reverse=True, key="mixed".__eq__):
        prompts = _prompts(name, left)[: clients * (warm_up + arguments.turns)]
        num_turns = len(prompts) // clients
        if num_turns <= warm_up:
            raise ConfigError(
                f"{name} has {len(prompts)} new prompts for {warm_up} turns of {clients} clients before those that "
                "count: give more --prompts, or other --workloads"
            )
        if num_turns < warm_up + arguments.turns:
            print(f"{name}: {num_turns - warm_up} turns, for which there are prompts", flush=True)
        used = set(prompts)
        left = {domain: [prompt for prompt in of if prompt not in used] for domain, of in left.items()}
        texts = [prompt.text for prompt in prompts]
        if name == "editing":
            pairs = zip(itertools.cycle(EDITS), texts, strict=False)
            texts = [asks_for(edit, _program(text)) for edit, text in pairs]
        found[name] = [texts[clients * turn :][:clients] for turn in range(num_turns)]
    return {name: found[name] for name in workloads}


def _prompts(workload: str, by_domain: Mapping[str, Sequence[Prompt]]) -> list[Prompt]:
    if workload == "mixed":
        return [prompt for row in itertools.zip_longest(*by_domain.values()) for prompt in row if prompt]
    word = {"editing": "code", "rag": "rag"}[workload]
    return [prompt for domain, of in by_domain.items() if word in domain for prompt in of]


def _program(text: str) -> str:
    """The first code block of the text."""
    parts = text.split("```")
    return parts[1].removeprefix("python").strip("\n") if len(parts) > 2 else text


def _measure(
    scene: Scene, servers: Mapping[str, SglangServer], turns: Sequence[Sequence[str]], *, warm_up: int
) -> Measured:
    measured = Measured()
    for turn, texts in enumerate(turns):
        asked = [scene.ids(text[-_LONGEST_PROMPT:]) for text in texts]
        found = {}
        for name in in_order(servers, turn):
            with contextlib.suppress(NeverTogetherError):
                found[name] = decode(servers[name], asked, max_new_tokens=_TOKENS)
        if turn < warm_up:
            continue
        if len(found) < len(servers):
            measured.left_out += 1
            continue
        for name, decoded in found.items():
            measured.rates[name].append(decoded.rate)
            measured.accept_lengths[name].append(decoded.accept_length)
    if not measured.rates:
        raise ConfigError("in no turn did all clients decode at the same time: give prompts with longer answers")
    return measured


def _rows(workloads: Mapping[str, Measured]) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = []
    for name, measured in workloads.items():
        for server, rates in measured.rates.items():
            length = Spread.of(measured.accept_lengths[server])
            rows.append((f"{name}, {server}: token/s; accept length", f"{Spread.of(rates)}; {length.median:.2f}"))
        rows += [(f"   both / {below}", measured.ratio(below)) for below in measured.rates if below != "hybrid"]
    return rows


def _targets(workloads: Mapping[str, Measured]) -> list[Target]:
    targets = []
    for name, measured in workloads.items():
        targets.append(Target(f"{name}: both / head", measured.ratio("head").value, _BETTER[name]))
        worse = min(measured.ratio("head").value, measured.ratio("suffix").value)
        targets.append(Target(f"{name}: both / the better part", worse, 0.98))
        if name == "mixed":
            targets.append(Target(f"{name}: both / n-grams", measured.ratio("ngram").value, 1.1))
    return targets


if __name__ == "__main__":
    main()
