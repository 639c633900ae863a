"""Checks and measurements that need a GPU, in stages of at most eight minutes.

make gpu [ARGS="--stage 1 4 --folder DIR --json FILE --again --quick --device cpu"]

1 device: the tests of what waits, streams, graphs and swaps on the GPU itself; what capture costs a step of an 8B and a
  70B, on the scheduler's thread and on the GPU (benchmarks/gpu/launch.py); how many of its requests reach Redis.
2 server: real SGLang serves a small model with the plugin: capture against Hugging Face, depth, labels at any
  temperature, swaps, trees (tests/sglang).
3 asleep: an 8B of random weights without drafts, and with the plugin and a draft that has learnt nothing.
4 drafting: SGLang's EAGLE-3 alone and with the plugin, capturing nobody, half of a batch, and all; swaps under load;
  at accept lengths 1, 2 and 4.
5 shared: a small model served and learnt from on one card: what clients wait for the trainer.

Each stage leaves its figures in the folder, and one that has them from the same machine, versions and `--quick` is not
run again. All figures go to one JSON file, and to a page of the same name beside it. Where there is no GPU, or with
`--device cpu`, the same steps run on the CPU with a tiny target: they show that the command works, not what a GPU does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.report import Target, finish

if TYPE_CHECKING:
    from benchmarks.gpu.scale import Scene

_STAGES = {1: "device", 2: "server", 3: "asleep", 4: "drafting", 5: "shared"}
_DEVICE_TESTS = tuple(
    f"tests/serving/sglang/{name}"
    for name in (
        "capture",
        "test_cuda.py",
        "test_no_waiting.py",
        "test_penalties.py",
        "test_runtime.py",
        "test_swap.py",
    )
)
_SERVER_TESTS = tuple(f"tests/sglang/test_{name}.py" for name in ("capture", "depth", "swap", "tree"))
_QUICK_SERVER_TESTS = (
    *(
        f"tests/sglang/test_capture.py::test_{name}"
        for name in (
            "every_finished_request_has_its_trace",
            "the_targets_likeliest_token_is_the_served_one",
            "accepted_counts_are_sglangs_own",
        )
    ),
    "tests/sglang/test_depth.py::test_a_draft_that_has_learnt_nothing_sleeps",
)


def main() -> None:
    options = argparse.ArgumentParser(description="The plugin on a GPU")
    options.add_argument("--stage", type=int, nargs="+", choices=_STAGES, default=list(_STAGES))
    options.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU where there is one")
    options.add_argument("--folder", type=Path, default=Path("runs/gpu"), help="of the figures of each stage")
    options.add_argument("--again", action="store_true", help="run stages whose figures are there, too")
    options.add_argument("--quick", action="store_true", help="fewer repeats and tests, smaller batches")
    options.add_argument(
        "--json", type=Path, metavar="FILE", help="of all figures (default: figures.json in the folder)"
    )
    arguments = options.parse_args()
    json_file: Path = arguments.json or arguments.folder / "figures.json"
    if arguments.device == "cpu":
        # Set before PyTorch looks for GPUs, in this process and in the servers that it starts.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    arguments.folder.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {"machine": _machine(arguments.device)}
    of = {**document["machine"], "quick": arguments.quick}
    for stage in arguments.stage:
        name = _STAGES[stage]
        file = arguments.folder / f"{stage}-{name}.json"
        known = {} if arguments.again or not file.exists() else json.loads(file.read_text())
        if known.get("of") != of:
            print(f"stage {stage}: {name}", flush=True)
            begun_s = time.monotonic()
            figures = _run(name, quick=arguments.quick)
            known = {"of": of, "figures": {**figures, "seconds": round(time.monotonic() - begun_s, 1)}}
            file.write_text(json.dumps(known, indent=2) + "\n")
        document[name] = known["figures"]
    rows, targets = _summary(document)
    page = json_file.with_suffix(".md")
    page.write_text(_page(rows, targets, json_file.name))
    print(f"figures in {json_file}, as a page in {page}", flush=True)
    finish(rows, targets, document, json_file)


def _page(rows: list[tuple[str, object]], targets: list[Target], raw: str) -> str:
    lines = ["# A run of `make gpu`", "", f"Date: {date.today().isoformat()}. Raw figures: [{raw}]({raw}).", ""]
    lines += ["| figure | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""]
    return "\n".join([*lines, *(f"* {target}" for target in targets)]) + "\n"


def _machine(wanted: str | None) -> dict[str, Any]:
    import torch

    from serving.sglang.plugin.checks import sglang_version

    is_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not is_gpu:
        sys.exit("PyTorch finds no GPU: leave --device out to run the same steps on the CPU")
    return {
        "device": torch.cuda.get_device_name() if is_gpu else "cpu",
        "torch": torch.__version__,
        "sglang": sglang_version(),
    }


def _run(name: str, *, quick: bool) -> dict[str, Any]:
    from benchmarks.gpu import launch, scale, shared, yielded
    from tests.sglang.server import IS_ON_GPU

    if name == "device":
        size = {"num_requests": 4, "answer": 100} if quick else {}
        found = {"tests": _tests(_DEVICE_TESTS), **launch.measure(quick=quick)}
        return {**found, "yield": yielded.measure(**size)}
    if name == "server":
        return {"tests": _tests(_QUICK_SERVER_TESTS if quick else _SERVER_TESTS)}
    if name == "shared":
        learning_s, turns, turn_s = (8.0, 1, 4.0) if quick else (120.0, 5, 20.0)
        return shared.measure(clients=16 if IS_ON_GPU else 2, learning_s=learning_s, turns=turns, turn_s=turn_s)
    repeats = 1 if quick else 3
    stages: dict[str, Callable[[Scene], dict[str, Any]]] = {
        "asleep": lambda scene: scale.asleep(scene, repeats),
        "drafting": lambda scene: scale.drafting(
            scene, repeats, num_swaps=2 if quick else 8, accept_lengths=() if quick else (1, 4)
        ),
    }
    shape = scale.LARGE if IS_ON_GPU else scale.SMALL
    batches = (1, 16, 64, 256) if IS_ON_GPU else (1, 4)
    with (
        tempfile.TemporaryDirectory() as folder,
        scale.prepared(Path(folder), shape, batches[:2] if quick else batches) as scene,
    ):
        return {"shape": shape.name, **stages[name](scene)}


def _tests(paths: tuple[str, ...]) -> dict[str, int]:
    """How many tests passed and how many did not."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        # Warnings of a different PyTorch version must not fail the tests.
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-W", "default"]
        subprocess.run([*command, f"--junitxml={report}", *paths], check=False)
        return _counts(report)


def _counts(report: Path) -> dict[str, int]:
    import xml.etree.ElementTree as ElementTree

    suite = ElementTree.parse(report).getroot()[0]  # noqa: S314
    total, failed, skipped = (int(suite.attrib[key]) for key in ("tests", "failures", "skipped"))
    failed += int(suite.attrib["errors"])
    return {"passed": total - failed - skipped, "failed": failed, "skipped": skipped}


def _summary(document: dict[str, Any]) -> tuple[list[tuple[str, object]], list[Target]]:
    rows: list[tuple[str, object]] = [(name, value) for name, value in document["machine"].items()]
    targets = []
    for name in _STAGES.values():
        # Stages of an earlier checkout have no time.
        if "seconds" in document.get(name, {}):
            rows.append((f"stage {name}", f"{document[name]['seconds']} s"))
    for name in ("device", "server"):
        if name in document:
            tests = document[name]["tests"]
            rows.append((f"tests of {name}", ", ".join(f"{count} {word}" for word, count in tests.items())))
            targets.append(Target(f"{name}_tests_failed", tests["failed"], 0, at_least=False))
    for step in document.get("device", {}).get("steps", ()):
        on_device = f", {step['device_ms']:.2f} ms on the GPU" if "device_ms" in step else ""
        counts = f"{step['launches']} launches, {step['bytes_a_token']:,} bytes a token"
        rows.append(
            (
                f"capture, d = {step['width']}, {step['captured']} of {step['batch']}",
                f"{step['host_ms']:.2f} ms of the scheduler's thread{on_device}, {counts}",
            )
        )
    if "device" in document:
        for batch, took_ms in document["device"]["remembering_ms"].items():
            rows.append((f"earlier text, {batch} requests", f"{took_ms:.2f} ms of the scheduler's thread"))
        targets.append(Target("remembering_ms", document["device"]["remembering_ms"]["64"], 0.1, at_least=False))
        for one in document["device"]["penalties"]:
            on_device = f", {one['device_ms']:.2f} ms on the GPU" if "device_ms" in one else ""
            cost = f"{one['host_ms']:.2f} ms of the scheduler's thread{on_device}, {one['launches']} launches"
            rows.append((f"penalties, {one['batch']} requests", cost))
        rows.append(("assembler's Python a request and step", f"{document['device']['assembling_us']:.1f} µs"))
        targets += _of_threads(document["device"])
        came = document["device"]["yield"]
        rows.append(("traces of long requests of an 8B", f"{came['appended']} of {came['finished']} reach Redis"))
        targets.append(Target("yield_of_traces", came["appended"] / came["finished"], 0.95))
    for name in ("asleep", "drafting"):
        times = document.get(name, {}).get("ms_a_token", {})
        rows += [(cell.replace("_", " "), f"{spread['median']:.2f} ms a token") for cell, spread in times.items()]
        if report := document.get(name, {}).get("report"):
            cause = "; SGLang simulates acceptance, so traces do not fit their answers" if name == "drafting" else ""
            dropped = report.get("dropped_by_reason") or "none"
            rows.append((f"traces of {name}", f"{report['captured']} captured, dropped: {dropped}{cause}"))
    if "drafting" in document:
        rows.append(("stall of swaps (ms)", ", ".join(f"{ms:.2f}" for ms in document["drafting"]["swaps"]["stall_ms"])))
    if "shared" in document:
        shared = document["shared"]
        gaps = ", ".join(f"{shared['p99_ms'][name]:.1f} {name}" for name in ("with", "without"))
        rows.append(("p99 between tokens beside a trainer (ms)", f"{gaps}; {shared['p99_ratio']:.3f} ×"))
    is_gpu = document["machine"]["device"] != "cpu"
    targets += _ratios(document) if is_gpu else []
    if is_gpu and "shared" in document:
        targets.append(Target("p99_beside_a_trainer", document["shared"]["p99_ratio"], 1.1, at_least=False))
    return rows, targets


_MOST_MS = {64: (0.1, 0.3), 256: (0.1, 0.8)}
"""By batch size: most milliseconds a step of the scheduler's thread, with no request captured and with half."""


def _of_threads(device: dict[str, Any]) -> list[Target]:
    targets = [Target("assembler_us", device["assembling_us"], 5.0, at_least=False)]
    for step in device["steps"]:
        batch, captured = step["batch"], step["captured"]
        if batch in _MOST_MS and captured < batch:
            name = f"scheduler_ms_{step['width']}_{captured}_of_{batch}"
            targets.append(Target(name, step["host_ms"], _MOST_MS[batch][captured > 0], at_least=False))
    return targets


def _ratios(document: dict[str, Any]) -> list[Target]:
    """Targets for ratios; none on a CPU, where a tiny target's time is mostly Python's."""
    targets = []
    for stage, ours, theirs, bound in (
        ("asleep", "asleep", "plain", 0.97),
        ("drafting", "plugin", "eagle_alone", 0.98),
        ("drafting", "plugin_captured", "plugin", 0.98),
    ):
        times = document.get(stage, {}).get("ms_a_token", {})
        for cell, spread in times.items():
            name, _, batch = cell.rpartition("_")
            if name == ours:
                ratio = times[f"{theirs}_{batch}"]["median"] / spread["median"]
                targets.append(Target(f"{ours}_over_{theirs}_at_{batch}", ratio, bound))
    return targets


if __name__ == "__main__":
    main()
