"""The whole loop with real SGLang on a CPU: cost with an untrained draft, gain from learning, effect of swaps.

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

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.common.report import Target, fill_in, finish, parser, percentile, refusing
from benchmarks.sglang_scene import phases
from benchmarks.sglang_scene.phases import CLIENTS, TURN_TOKENS, Swaps, Turns, Unseen
from benchmarks.sglang_scene.servers import DEPTH, UNSEEN, prepared

PARTS = ("day_0", "swaps", "capture", "unseen")


@refusing
def main() -> None:
    options = parser("The loop through real SGLang on a CPU")
    options.add_argument("--minutes", type=float, default=15, help="live learning, without --quick")
    options.add_argument("--turns", type=int, help="of each kind; default 30, quick 8")
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to run; default all")
    arguments = options.parse_args()
    parts = set(arguments.parts) - ({"capture", "unseen"} if arguments.quick else set())
    if not parts:
        options.error("--quick has day_0 and swaps alone")
    fill_in(arguments, {"turns": (8, 30)})
    found = Found([], [], {"clients": CLIENTS, "depth": DEPTH})
    with (
        prepared(arguments.model, arguments.prompts, held_out=UNSEEN.stop if "unseen" in parts else 0) as scene,
        scene.live_server() as live,
        scene.plain_server() as plain,
    ):
        if "day_0" in parts:
            found.add_day_0(phases.day_0(scene, plain, live, arguments.turns))
        if parts - {"day_0"}:
            if arguments.quick:
                version = scene.add_random()
            else:
                learning = phases.learn(scene, live, arguments.minutes)
                found.document["learning"] = asdict(learning)
                version = learning.version
        if "swaps" in parts:
            found.add_swaps(phases.swaps(scene, live, version, 20.0 if arguments.quick else 60.0))
        if parts & {"capture", "unseen"}:
            scene.pointer.publish(version)
            with scene.fixed_server(version) as fixed:
                if "capture" in parts:
                    found.add_capture(phases.capture(scene, fixed, arguments.turns))
                if "unseen" in parts:
                    found.add_unseen(phases.unseen(scene, plain, fixed, live))
    finish(found.rows, found.targets, found.document, arguments.json)


@dataclass
class Found:
    """Results of the phases so far: the table, the targets, and the JSON document."""

    rows: list[tuple[str, object]]
    targets: list[Target]
    document: dict[str, Any]

    def add_day_0(self, turns: Turns) -> None:
        ratios = {
            "day_0_ratio": turns.ratio("captured", "plain"),
            "day_0_without_capture_ratio": turns.ratio("silent", "plain"),
            "capture_ratio": turns.ratio("captured", "silent"),
        }
        self.rows += [
            *((f"day 0, {kind}: token/s", spread) for kind, spread in turns.spreads().items()),
            ("day 0 / no speculation", ratios["day_0_ratio"]),
            ("day 0 without capture / no speculation", ratios["day_0_without_capture_ratio"]),
            ("capture on / off", ratios["capture_ratio"]),
        ]
        for name, at_least in (("day_0_ratio", 0.97), ("capture_ratio", 0.98)):
            self.targets.append(Target(name, ratios[name].value, at_least))
        self.document["day_0"] = {
            **_figures(turns),
            **{name: ratio.to_dict() for name, ratio in ratios.items()},
            "report": turns.report,
        }

    def add_swaps(self, swaps: Swaps) -> None:
        calm_ms, swapping_ms = swaps.calm.ms, swaps.swapping.ms
        calm = {"p50": statistics.median(calm_ms), "p99": percentile(calm_ms, 99), "max": max(calm_ms)}
        swapping = {"p50": statistics.median(swapping_ms), "max": max(swapping_ms)}
        counts = f"{swaps.num_swaps}, {swaps.failed_requests}"
        self.rows += [
            ("gap without swaps: p50, p99, max (ms)", ", ".join(f"{value:.0f}" for value in calm.values())),
            ("gap with swaps: p50, max (ms)", ", ".join(f"{value:.0f}" for value in swapping.values())),
            ("swaps, failed requests, stall of the last (ms)", f"{counts}, {swaps.report['last_stall_ms']}"),
        ]
        self.targets += [
            Target("swap_gap_over_p99", swapping["max"] / calm["p99"], 2.0, at_least=False),
            Target("failed_requests", swaps.failed_requests, 0, at_least=False),
            Target("swaps", swaps.num_swaps, 5 if swaps.seconds >= 60 else 2),
        ]
        self.document["swaps"] = {
            "seconds": swaps.seconds,
            "num_swaps": swaps.num_swaps,
            "failed_requests": swaps.failed_requests,
            "calm_ms": {**calm, "num_gaps": len(calm_ms)},
            "swapping_ms": {**swapping, "num_gaps": len(swapping_ms)},
            "last_stall_ms": float(swaps.report["last_stall_ms"]),
            "swap_failures": int(swaps.report["swap_failures"]),
        }

    def add_capture(self, turns: Turns) -> None:
        ratio = turns.ratio("captured", "silent")
        self.rows += [
            *((f"fixed depth {DEPTH}, {kind}: token/s", spread) for kind, spread in turns.spreads().items()),
            (f"fixed depth {DEPTH}: capture on / off", ratio),
        ]
        self.targets += [
            Target("capture_ratio_drafting", ratio.value, 0.98),
            Target("captured_requests", int(turns.report["appended"]), turns.num_requests),
        ]
        self.document["capture"] = {
            **_figures(turns),
            "capture_ratio_drafting": ratio.to_dict(),
            "report": turns.report,
        }

    def add_unseen(self, unseen: Unseen) -> None:
        by_domain = ", ".join(f"{domain} {length:.2f}" for domain, length in unseen.accept_length_by_domain.items())
        self.rows += [
            ("accept length on unseen prompts (SGLang's count)", f"{unseen.accept_length:.3f}"),
            ("by domain", by_domain),
            ("fixed depth 3 / no speculation", unseen.speedup["fixed"]),
            ("adaptive depth / no speculation", unseen.speedup["live"]),
            ("same text as without speculation", f"{unseen.same_text} of {unseen.num_prompts} (bfloat16)"),
        ]
        self.targets.append(Target("accept_length", unseen.accept_length, 1.6))
        speedup = {kind: spread.to_dict() for kind, spread in unseen.speedup.items()}
        self.document["unseen"] = {**vars(unseen), "speedup": speedup}


def _figures(turns: Turns) -> dict[str, Any]:
    return {
        "turns": turns.num_turns,
        "turn_tokens": TURN_TOKENS,
        "tokens_per_s": {kind: spread.to_dict() for kind, spread in turns.spreads().items()},
    }


if __name__ == "__main__":
    main()
