"""Our kernels beside oneDNN's or PyTorch's products and PyTorch's attention: a step's linear layers, and its attention.

    python -m benchmarks.kernels [--quick] [--json FILE] [--threads 1]

Layers of the model's sizes with random weights, each read from memory once before any is read again, as in a step. In 8
bits, and in float32, all sides get bfloat16 and give it. Ways take turns. There is no target: benchmarks.step has one.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import Spread, finish, parser
from benchmarks.step import interleaved, sizes_of
from serving.local.attention import KVSlots, SlotWindow
from serving.local.int8 import Int8Linear, is_exact
from serving.local.kernels.build import found_kernels
from serving.local.kernels.layers import Bfloat16Linear, KernelLinear, VnniLinear, gather
from serving.local.kernels.library import Heads, Kernels, Norm, Way, Window, compute_with
from serving.local.kernels.slots import PanelSlots
from serving.local.packed import PackedLinear, can_pack, has_onednn
from slipstream.models import resolve_model
from speculator.errors import ConfigError

TOKENS = (1, 5, 8, 16, 64)
CONTEXTS = ((1, 1, 200), (1, 5, 200), (8, 1, 200), (8, 5, 200), (1, 32, 200), (1, 32, 900))
"""Requests, new tokens of each, positions before them."""


def main() -> None:
    options = parser("Our kernels beside the libraries'", has_prompts=False)
    options.add_argument("--threads", type=int, default=1, help="the demo's engine has one")
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    compute_with(arguments.threads)
    kernels = found_kernels()
    if kernels is None:
        raise ConfigError("there are no kernels for this machine: see the line above")
    config = json.loads((resolve_model(arguments.model) / "config.json").read_text())
    repeats = 9 if arguments.quick else 25
    rows: list[tuple[str, object]] = [(f"threads {arguments.threads}, {repeats} repeats, ms", "median    (min … max)")]
    document: dict[str, Any] = {"threads": arguments.threads, "repeats": repeats}
    with torch.inference_mode():
        for part, timed in (
            ("products", _products(config, kernels, repeats)),
            ("attention", _attention(config, kernels, repeats)),
        ):
            for size, times_ms in timed.items():
                spreads = {way: Spread.of(values) for way, values in times_ms.items()}
                rows += [(f"{part}, {size}: {way}", spread) for way, spread in spreads.items()]
                document[f"{part}, {size}"] = {way: spread.to_dict() for way, spread in spreads.items()}
    finish(rows, [], document, arguments.json)


def _products(config: dict[str, Any], kernels: Kernels, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of all linear layers of a pass, by the number of its tokens."""
    hidden, inner, heads, groups, head_dim = sizes_of(config)
    of_layer = (
        (hidden, (heads + 2 * groups) * head_dim),
        (heads * head_dim, hidden),
        (hidden, 2 * inner),
        (inner, hidden),
    )
    linears = [
        nn.Linear(*sizes, bias=False).bfloat16().requires_grad_(False)
        for sizes in (*of_layer * config["num_hidden_layers"], (hidden, config["vocab_size"]))
    ]
    made: dict[str, Callable[[nn.Linear], nn.Module]] = {
        "bfloat16, ours": lambda linear: Bfloat16Linear(linear, kernels)
    }
    if kernels.way is not Way.FLOAT:
        made["bfloat16, ours as float"] = partial(Bfloat16Linear, kernels=kernels, way=Way.FLOAT)
    if can_pack():
        made["bfloat16, oneDNN"] = PackedLinear
    else:
        made |= {"bfloat16, PyTorch": lambda linear: linear, "float32, PyTorch": _WideLinear}
    if has_onednn() and is_exact():
        made["8 bits, oneDNN"] = Int8Linear
    if Way.WHOLE8 in kernels.ways:
        made["8 bits, ours"] = lambda linear: VnniLinear(linear, kernels)
    ways = {way: [make(linear) for linear in linears] for way, make in made.items()}
    for layers in ways.values():
        gather([layer for layer in layers if isinstance(layer, KernelLinear)])  # as in service
    widths = [linear.in_features for linear in linears]
    del linears
    timed = {}
    for num_tokens in TOKENS:
        by_width = {width: torch.randn(num_tokens, width).bfloat16() for width in set(widths)}
        inputs = [by_width[width] for width in widths]
        runs = {way: partial(_multiply, layers, inputs) for way, layers in ways.items()}
        timed[f"{num_tokens} tokens"] = interleaved(runs, repeats)
    return timed


class _WideLinear(nn.Module):
    """In float32, from bfloat16 to bfloat16."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._wide = copy.deepcopy(linear).float()

    def forward(self, x: Tensor) -> Tensor:
        return self._wide(x.float()).to(x.dtype)  # type: ignore[no-any-return]


def _multiply(layers: Sequence[nn.Module], inputs: Sequence[Tensor]) -> None:
    for layer, x in zip(layers, inputs, strict=True):
        layer(x)


def _attention(config: dict[str, Any], kernels: Kernels, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of all layers' attention, keys and values stored, by requests × tokens and the context before.

    Ours rotates queries and keys, too.
    """
    _, _, heads, groups, head_dim = sizes_of(config)
    num_layers, num_slots = config["num_hidden_layers"], 8
    longest = max(sum(context[1:]) for context in CONTEXTS)
    theirs = KVSlots(num_layers, num_slots, groups, longest, head_dim, torch.zeros(1, dtype=torch.bfloat16))
    for kept in theirs.read(slice(0, num_slots), longest):
        for part in kept:
            part.normal_()
    ours = PanelSlots(num_layers, num_slots, groups, longest, head_dim)
    ours.storage.normal_()
    timed = {}
    for batch, num_new, before in CONTEXTS:
        qkv = torch.randn(batch * num_new, heads + 2 * groups, head_dim).bfloat16()
        queries, kv = qkv.split([heads, 2 * groups], 1)
        queries = queries.reshape(batch, -1, groups, head_dim)
        runs = {
            "PyTorch": partial(_attend, theirs, num_layers, queries, kv, [before] * batch, num_new),
            "ours": partial(_attend_by, kernels, ours, qkv, [before] * batch, num_new),
        }
        timed[f"{batch} × {num_new} behind {before}"] = interleaved(runs, repeats)
    return timed


def _attend(cache: KVSlots, num_layers: int, queries: Tensor, kv: Tensor, starts: list[int], num_new: int) -> None:
    window, scale = SlotWindow(0, starts, num_new, kv), kv.shape[-1] ** -0.5
    for layer in range(num_layers):
        window.attend_rows(cache, layer, queries, kv, scale)


def _attend_by(kernels: Kernels, cache: PanelSlots, qkv_MNh: Tensor, starts: list[int], num_new: int) -> None:
    groups, (num_tokens, num_heads, head_dim) = cache.storage.shape[2], qkv_MNh.shape
    heads = Heads(num_heads // groups - 2, groups, head_dim, head_dim**-0.5, Norm(), Norm())
    windows = [Window(slot, start, num_new) for slot, start in enumerate(starts)]
    rotation = torch.ones(cache.length, head_dim), torch.zeros(cache.length, head_dim)
    for layer in cache.storage:
        kernels.attend(heads, windows, rotation, qkv_MNh.view(num_tokens, -1), layer)


if __name__ == "__main__":
    main()
