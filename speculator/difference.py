"""What two draft versions differ in: their tensors, their configs and what was said about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from speculator.store import Manifest


class TensorChange(msgspec.Struct, frozen=True, kw_only=True):
    """How one tensor changed from `a` to `b`, each flattened to one vector."""

    name: str
    shapes: list[list[int]]
    """Of `a` and of `b`; where they differ nothing else is known."""
    num_changed: int | None = None
    """Elements that are not equal."""
    relative_l2: float | None = None
    """|b − a| / |a|; None for a map of token ids, and where a is 0."""
    cosine: float | None = None
    """a·b / (|a| |b|)."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    a: int
    b: int
    tensors: list[TensorChange]
    config: dict[str, list[Any]]
    """What is not equal, as [in a, in b]; null stands for absent too."""
    manifest: dict[str, list[Any]]
    """The same of the manifests, with dots for what lies inside: `info.trained_tokens`."""


Side = tuple[Manifest, Mapping[str, Any], Mapping[str, Tensor]]


def compare(a: Side, b: Side) -> Difference:
    """From manifest, config and tensors of two versions."""
    names = sorted(a[2].keys() | b[2].keys())
    return Difference(
        a=a[0].version,
        b=b[0].version,
        tensors=[_tensor_change(name, a[2].get(name), b[2].get(name)) for name in names],
        config=_unequal(a[1], b[1]),
        manifest=_unequal(msgspec.to_builtins(a[0]), msgspec.to_builtins(b[0])),
    )


def _tensor_change(name: str, a: Tensor | None, b: Tensor | None) -> TensorChange:
    shapes = [[] if tensor is None else list(tensor.shape) for tensor in (a, b)]
    if a is None or b is None or a.shape != b.shape:
        return TensorChange(name=name, shapes=shapes)
    num_changed = int((a != b).sum())
    if not a.is_floating_point():
        return TensorChange(name=name, shapes=shapes, num_changed=num_changed)
    # Sums of millions of products: in float32 equal tensors differ in the fourth decimal.
    x, y = a.flatten().double(), b.flatten().double()
    length_x, length_y = float(x.norm()), float(y.norm())
    return TensorChange(
        name=name,
        shapes=shapes,
        num_changed=num_changed,
        relative_l2=float((y - x).norm()) / length_x if length_x else None,
        cosine=float(torch.dot(x, y)) / (length_x * length_y) if length_x and length_y else None,
    )


def _unequal(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[Any]]:
    flat_a, flat_b = dict(_flat(a)), dict(_flat(b))
    pairs = {name: [flat_a.get(name), flat_b.get(name)] for name in sorted(flat_a.keys() | flat_b.keys())}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
