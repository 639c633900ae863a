"""Compare Slipstream's adaptive depth with SGLang's own, by SGLang's own benchmarks.

.venv-sglang/bin/python -m benchmarks.sglang_adaptive [--script bench_adaptive_speculative.py] [--quick] [--json FILE]
                                                      [--prompts FILE.jsonl] [--drafts FOLDER] [--turns 5]

In a turn each of these servers is asked: ours, SGLang's adaptive speculation, and SGLang with one and with three steps.
All have the same draft, which learns from live traffic first, or comes from `--drafts` (see
benchmarks/sglang_hybrid.py).

SGLang's `bench_serving` asks for answers to prompts that differ from turn to turn. With `--script` it is instead a
script of SGLang's repository (benchmark/bench_adaptive_speculative.py): poems that no draft foresees in turn with one
line written again and again. Its few prompts come several times, so no server may remember text of other requests, and
ours goes on from a request's own text alone. Both run as they are.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.common.bench_serving import with_prompts
from benchmarks.common.report import Median, Spread, Target, fill_in, finish, parser, refusing
from benchmarks.sglang_cpu_phases import add_head_options, learnt_version
from benchmarks.sglang_cpu_scene import LEARNT_FROM, Scene, prepared
from benchmarks.sglang_hybrid import SUFFIX_DEPTH
from tests.sglang.server import SglangServer, speculative_flags

_STATIC = (1, 3)
_OVERALL = re.compile(r"^OVERALL\s+([\d.]+)/s\s+[\d.]+s\s+([\d.]+|nan)$", re.MULTILINE)


@refusing
def main() -> None:
    options = parser("Slipstream's choice of the depth against SGLang's adaptive speculation")
    options.add_argument("--script", type=Path, help="bench_adaptive_speculative.py of SGLang; default: bench_serving")
    add_head_options(options)
    options.add_argument("--turns", type=int)
    options.add_argument("--requests", type=int, help="of each phase of the script, or of a turn of bench_serving")
    options.add_argument("--max-tokens", type=int, help="of an answer")
    arguments = options.parse_args()
    requests = (2, 4) if arguments.script else (4, 12)
    fill_in(arguments, {"minutes": (1.0, 5.0), "turns": (2, 5), "requests": requests, "max_tokens": (64, 128)})
    rates: dict[str, list[float]] = {}
    lengths: dict[str, list[float]] = {}
    held_out = arguments.turns * arguments.requests if arguments.script is None else 0
    with prepared(arguments.model, arguments.prompts, held_out=held_out) as scene:
        version = learnt_version(scene, scene.prompts[LEARNT_FROM], arguments.drafts, arguments.minutes)
        with _servers(scene, version, remembers=arguments.script is None) as servers:
            names = list(servers)
            for turn in range(arguments.turns):
                shift = turn % len(names)
                for name in [*names[shift:], *names[:shift]]:
                    if arguments.script is None:
                        prompts = scene.prompts[turn * arguments.requests :][: arguments.requests]
                        served = with_prompts(servers[name], scene.model_dir, prompts, arguments.max_tokens)
                        found = served.tokens_per_s, served.accept_length
                    else:
                        found = _run(arguments.script, servers[name], arguments.requests, arguments.max_tokens)
                    rate, length = found
                    rates.setdefault(name, []).append(rate)
                    lengths.setdefault(name, []).append(length)
                print({name: rates[name][-1] for name in names}, flush=True)
            report = scene.report("ours")
    ratios = {
        name: Median.of([ours / other for ours, other in zip(rates["ours"], rates[name], strict=True)])
        for name in names
        if name != "ours"
    }
    best_static = min((ratios[f"static_{steps}"] for steps in _STATIC), key=lambda ratio: ratio.value)
    document = {
        "ours_over_adaptive": round(ratios["adaptive"].value, 4),
        "ours_over_best_static": round(best_static.value, 4),
        "intervals": {name: ratio.to_dict() for name, ratio in ratios.items()},
        "tokens_per_s": {name: Spread.of(each).to_dict() for name, each in rates.items()},
        "accept_length": {name: Spread.of(each).to_dict() for name, each in lengths.items()},
        "report": report,
    }
    rows: list[tuple[str, object]] = [
        (f"{name}: token/s; accept length", f"{Spread.of(rates[name])}; {Spread.of(lengths[name]).median:.2f}")
        for name in names
    ]
    rows += [(f"   ours / {name}", ratio) for name, ratio in ratios.items()]
    targets = [
        Target("ours / SGLang's adaptive", ratios["adaptive"].value, 1.05),
        Target("ours / the best static", best_static.value, 1.0),
    ]
    finish(rows, targets, document, arguments.json)


@contextlib.contextmanager
def _servers(scene: Scene, version: int, *, remembers: bool) -> Iterator[Mapping[str, SglangServer]]:
    # These requests have no capture policy; with UNMARKED=0 their text is not remembered for other requests.
    alone = {"SLIPSTREAM_CAPTURE": "0", "SLIPSTREAM_CAPTURE_UNMARKED": str(int(remembers))}
    draft_dir = scene.store.root / "versions" / f"{version:06d}"
    flags = {
        "adaptive": [*speculative_flags(draft_dir, num_steps=_STATIC[-1]), "--speculative-adaptive"],
        **{f"static_{steps}": speculative_flags(draft_dir, num_steps=steps) for steps in _STATIC},
    }
    with contextlib.ExitStack() as stack:
        servers = {"ours": scene.live_server(version, (), alone, name="ours", suffix_depth=SUFFIX_DEPTH)}
        servers |= {name: scene.plain_server(*each, name=name) for name, each in flags.items()}
        yield {name: stack.enter_context(server) for name, server in servers.items()}


def _run(script: Path, server: SglangServer, num_requests: int, max_tokens: int) -> tuple[float, float]:
    """Tokens a second and accept length over all phases."""
    command = [
        *(sys.executable, str(script), "--port", str(server.port), "--requests", str(num_requests)),
        *("--max-tokens", str(max_tokens), "--warmup", "0"),
    ]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1200).stdout
    found = _OVERALL.search(said)
    if found is None:
        raise RuntimeError(f"{script} ended without its last line:\n{said[-2000:]}")
    return float(found[1]), float(found[2])


if __name__ == "__main__":
    main()
