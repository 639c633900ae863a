"""The steps of target and draft against the time that reading their weights takes.

    python -m benchmarks.step [--quick] [--json FILE] [--threads 1] [--compile-target] [--int8-target]

A step of one token reads every weight once: bytes of weights over the measured read bandwidth is its floor. The read,
our step, the same over oneDNN's products and PyTorch's attention, and Hugging Face's (over these and the same slots)
take turns, on the same threads; with --compile-target the compiled step over oneDNN, too. --int8-target times our step
in 8 bits; its floor is half as high.
The draft reads its pairs and proposes after a step of the target, as in a round: its weights are in no cache then.
Target: a step of one token, as a server with the same --compile-target runs it, within 1.6 × of the floor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.common import Spread, Target, finish, parser
from serving.local.draft import DraftSource, ServingDraft
from serving.local.kernels.library import compute_with
from serving.local.kernels.slots import PanelSlots
from serving.local.target import Target as TargetModel
from slipstream.models import resolve_model
from speculator.checkpoint import expected_shapes
from speculator.fresh import fresh_draft
from speculator.model import DraftConfig
from speculator.sampling import SamplingParams

WINDOWS = ((1, 1), (1, 2), (1, 5), (4, 1), (8, 1), (8, 5))  # batch × new tokens
DRAFT_WINDOWS = ((1, 1), (1, 3), (4, 1), (4, 3), (8, 1), (8, 3))  # batch × pairs to read
READ_BYTES = 256 << 20


def main() -> None:
    options = parser("The target's step against the memory floor", has_prompts=False)
    options.add_argument("--threads", type=int, default=1, help="the demo's engine has one")
    options.add_argument("--context", type=int, default=200, help="positions before the new tokens")
    options.add_argument("--compile-target", action="store_true", help="time the compiled step over oneDNN, too")
    options.add_argument("--int8-target", action="store_true", help="time the step in 8 bits, too")
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    compute_with(arguments.threads)
    repeats = 12 if arguments.quick else 40
    model_dir = resolve_model(arguments.model)
    new_target = partial(TargetModel, model_dir, num_slots=8, context_length=arguments.context + 64, cache_margin=8)
    targets = {"ours": new_target(), "hugging_face": new_target(fused=False), "onednn": new_target(own_kernels=False)}
    if arguments.compile_target:
        targets["compiled"] = new_target(compile_threads=arguments.threads, own_kernels=False)
    if arguments.int8_target:
        targets["int8"] = new_target(int8=True)
    weight_bytes = _weight_bytes(targets["ours"])
    rows: list[tuple[str, object]] = [
        (f"threads {arguments.threads}, context {arguments.context}, {repeats} repeats", "median    (min … max)"),
        ("bytes of weights a step reads", f"{weight_bytes / 1e6:8.1f} MB"),
    ]
    document: dict[str, object] = {"threads": arguments.threads, "weight_bytes": weight_bytes, "repeats": repeats}
    source = torch.ones(READ_BYTES // 4)
    ratios: dict[tuple[int, int], dict[str, Spread]] = {}
    for window in WINDOWS:
        times_ms = _target_times(targets, source, arguments.context, *window, repeats)
        ratios[window] = _ratios(targets, times_ms)
        spreads = {name: Spread.of(values) for name, values in times_ms.items()}
        rows += _described(" × ".join(map(str, window)), spreads, ratios[window])
        document["x".join(map(str, window))] = {
            **{f"{name}_ms": spread.to_dict() for name, spread in spreads.items()},
            **{name: ratio.to_dict() for name, ratio in ratios[window].items()},
        }
    draft_model = fresh_draft(model_dir, seed=0).to(torch.bfloat16)
    draft = ServingDraft(draft_model, 1, num_slots=8, length=arguments.context + 64)
    for batch, num_pairs in DRAFT_WINDOWS:
        times_ms = _draft_times(targets["ours"], draft, source, arguments.context, batch, num_pairs, repeats)
        for part, num_bytes in _draft_bytes(draft_model.config).items():
            times_ms[f"{part}_floor"] = [value * num_bytes / READ_BYTES for value in times_ms["floor"]]
        del times_ms["floor"]
        spreads = {name: Spread.of(values) for name, values in times_ms.items()}
        rows += [(f"draft, {batch} × {num_pairs} pairs: {name}, ms", spread) for name, spread in spreads.items()]
        document[f"draft_{batch}x{num_pairs}"] = {f"{name}_ms": spread.to_dict() for name, spread in spreads.items()}
    # What a server with the same flags runs.
    is_compiled = arguments.compile_target and not isinstance(targets["ours"].cache, PanelSlots)
    judged = ratios[1, 1]["compiled_over_floor" if is_compiled else "over_floor"].median
    finish(rows, [Target("step_over_floor", judged, 1.6, at_least=False)], document, arguments.json)


def _target_times(
    targets: Mapping[str, TargetModel],
    source: torch.Tensor,
    context: int,
    batch: int,
    num_new: int,
    repeats: int,
) -> dict[str, list[float]]:
    """Milliseconds of a step of each target, and of reading what the first one reads."""
    ours = targets["ours"]
    tokens = torch.randint(len(ours.embed), (batch, num_new), generator=torch.Generator().manual_seed(0))
    steps = {name: partial(_step, target, tokens, [context] * batch) for name, target in targets.items()}
    times_ms = interleaved({"floor": source.sum, **steps}, repeats)
    times_ms["floor"] = [value * _weight_bytes(ours) / READ_BYTES for value in times_ms["floor"]]
    return times_ms


def _ratios(targets: Mapping[str, TargetModel], times_ms: Mapping[str, list[float]]) -> dict[str, Spread]:
    ratios = {
        "over_floor": _ratio(times_ms["ours"], times_ms["floor"]),
        "hugging_face_over_ours": _ratio(times_ms["hugging_face"], times_ms["ours"]),
    }
    weight_bytes = _weight_bytes(targets["ours"])
    for kind in [kind for kind in targets if kind not in ("ours", "hugging_face")]:
        share = _weight_bytes(targets[kind]) / weight_bytes
        ratios[f"{kind}_over_floor"] = _ratio(times_ms[kind], [share * floor for floor in times_ms["floor"]])
        ratios[f"ours_over_{kind}"] = _ratio(times_ms["ours"], times_ms[kind])
    return ratios


def _described(name: str, spreads: Mapping[str, Spread], ratios: Mapping[str, Spread]) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = [
        (f"{name}: floor, ms", spreads["floor"]),
        (f"{name}: step, ms", spreads["ours"]),
        (f"{name}: Hugging Face's step, ms", spreads["hugging_face"]),
        (f"{name}: step over floor", ratios["over_floor"]),
        (f"{name}: Hugging Face's step over ours", ratios["hugging_face_over_ours"]),
    ]
    for kind in [kind for kind in spreads if f"{kind}_over_floor" in ratios]:
        rows += [
            (f"{name}: {kind} step, ms", spreads[kind]),
            (f"{name}: {kind} step over its floor", ratios[f"{kind}_over_floor"]),
            (f"{name}: step over {kind}", ratios[f"ours_over_{kind}"]),
        ]
    return rows


def _draft_bytes(config: DraftConfig) -> dict[str, int]:
    """Bytes of weights that reading pairs, the first proposal and every further one need."""
    sizes = {name: 2 * math.prod(shape) for name, shape in expected_shapes(config).items()}
    layer = sum(size for name, size in sizes.items() if name.startswith("midlayer."))
    return {
        "read": sizes["fc.weight"] + layer,
        "first": sizes["lm_head.weight"],
        "further": layer + sizes["lm_head.weight"],
    }


@torch.inference_mode()
def _draft_times(
    target: TargetModel,
    draft: ServingDraft,
    source: torch.Tensor,
    context: int,
    batch: int,
    num_pairs: int,
    repeats: int,
) -> dict[str, list[float]]:
    """Milliseconds by part, each turn after a step of the target."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(len(target.embed), (batch, num_pairs), generator=generator)
    aux = torch.randn(batch * num_pairs, 3 * target.embed.shape[1], generator=generator).to(target.embed)
    starts = [context + 3 * row for row in range(batch)]
    lengths = [start + num_pairs + 1 for start in starts]
    sources = [DraftSource(SamplingParams(temperature=0), seed=0)] * batch
    chains = []

    def read() -> None:
        output = draft.read(tokens.tolist(), aux, first_slot=0, starts=starts)
        chains[:] = [draft.chain(output, lengths=lengths, sources=sources)]

    runs: dict[str, Callable[[], object]] = {
        "floor": source.sum,
        "target": lambda: _step(target, tokens[:, :1], starts),
        "read": read,
        "first": lambda: next(chains[0]),
        "further": lambda: next(chains[0]),
    }
    times_ms = interleaved(runs, repeats)
    del times_ms["target"]
    return times_ms


def _weight_bytes(target: TargetModel) -> int:
    """Bytes of layers and output projection, once each; the embedding is looked up, not read."""
    width, inner, heads, groups, head_dim = sizes_of(target.config)
    attention = 2 * width * (heads + groups) * head_dim
    layers = target.config["num_hidden_layers"] * (attention + 3 * width * inner)
    return int((layers + target.embed.numel()) * (1 if target.is_int8 else target.embed.element_size()))


def sizes_of(config: dict[str, Any]) -> tuple[int, int, int, int, int]:
    """Hidden size, inner size, query heads, key heads, head size."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    return (
        hidden,
        config["intermediate_size"],
        heads,
        config["num_key_value_heads"],
        config.get("head_dim") or hidden // heads,
    )


@torch.inference_mode()
def _step(target: TargetModel, tokens: torch.Tensor, starts: list[int]) -> list[int]:
    hidden, _ = target.forward(tokens, first_slot=0, starts=starts)
    return target.ranking.likeliest(target.logits(hidden).flatten(0, 1))


def interleaved(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each run, in turns; the first two turns warm up."""
    times_ms: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 2):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if turn >= 2:
                times_ms[name].append(1000 * (time.perf_counter() - started))
    return times_ms


def _ratio(above: list[float], below: list[float]) -> Spread:
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])


if __name__ == "__main__":
    main()
