"""The proposals of one request in a round: a tree of tokens; a chain is a tree without forks.

If the text can continue in several ways, one verification checks all of them and commits the target's. Nodes are the
proposals, parents before children. The root is the last committed token and has the number `ROOT`. The root is row 0
of the verification, node k row k + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

ROOT = -1


@dataclass(frozen=True)
class DraftTree:
    """`tokens`, their `parents`, and the proposer's own probability of each, given that its parent is accepted."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probabilities: tuple[float, ...] = ()

    @classmethod
    def chain(cls, tokens: Sequence[int], probabilities: Sequence[float]) -> Self:
        return cls(tuple(tokens), tuple(range(ROOT, len(tokens) - 1)), tuple(probabilities))

    @property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @property
    def reaches(self) -> list[float]:
        """R_k = Π p along the path to each node: the probability that it is reached and accepted."""
        reaches: list[float] = []
        for parent, probability in zip(self.parents, self.probabilities, strict=True):
            reaches.append(probability * (1.0 if parent == ROOT else reaches[parent]))
        return reaches

    @property
    def depth(self) -> int:
        """Number of nodes on the longest path."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return max(depths, default=0)

    def first(self, num_nodes: int) -> Self:
        """The tree of the first `num_nodes` nodes."""
        return type(self)(self.tokens[:num_nodes], self.parents[:num_nodes], self.probabilities[:num_nodes])

    def depth_first(self) -> list[int]:
        """The nodes in depth-first order, so that a path of first children has consecutive rows."""
        if self.is_chain:
            return list(range(len(self.tokens)))
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        order: list[int] = []
        waiting = children[ROOT][::-1]
        while waiting:
            order.append(node := waiting.pop())
            waiting += children.get(node, [])[::-1]
        return order

    def reordered(self, order: Sequence[int]) -> Self:
        """The same tree with its nodes in this order, parents before their children."""
        place = {ROOT: ROOT, **{node: number for number, node in enumerate(order)}}
        return type(self)(
            tuple(self.tokens[node] for node in order),
            tuple(place[self.parents[node]] for node in order),
            tuple(self.probabilities[node] for node in order),
        )

    def child(self, node: int, token: int) -> int | None:
        """The child of this node, or of the root, that proposes `token`."""
        for other in range(node + 1, len(self.tokens)):
            if self.parents[other] == node and self.tokens[other] == token:
                return other
        return None

    def walk(self, emit: Callable[[int, int], int]) -> tuple[list[int], list[int]]:
        """Follow the target from the root on; `emit(row, depth)` returns its token after a row, `depth` tokens after
        the root. Returns (tokens, the last of which no node proposed; nodes that proposed the others).
        """
        emitted, path, node = [emit(0, 0)], list[int](), ROOT
        while (child := self.child(node, emitted[-1])) is not None:
            path.append(node := child)
            emitted.append(emit(node + 1, len(path)))
        return emitted, path


NO_PROPOSALS = DraftTree()
