"""What one request proposes in a round: a tree of tokens, of which a chain is one that nowhere forks.

Where the text can go on in several ways, a verification of all of them commits the one that the target takes. Nodes are
the proposals, in an order in which parents come before their children; the root, what was committed last, has no number
of its own: `ROOT`. With the root's row before them, node k is verified in row k + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

ROOT = -1


@dataclass(frozen=True)
class DraftTree:
    """`tokens`, their `parents`, and the proposer's own probability of each, where its parent is accepted."""

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
        """R_k = Π p over a node and those before it on its path: that it is reached and accepted."""
        reaches: list[float] = []
        for parent, probability in zip(self.parents, self.probabilities, strict=True):
            reaches.append(probability * (1.0 if parent == ROOT else reaches[parent]))
        return reaches

    @property
    def depth(self) -> int:
        """Nodes of the longest path."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return max(depths, default=0)

    def first(self, num_nodes: int) -> Self:
        """The tree of its first nodes."""
        return type(self)(self.tokens[:num_nodes], self.parents[:num_nodes], self.probabilities[:num_nodes])

    def depth_first(self) -> list[int]:
        """The nodes, each with its first child right behind it: a path of first children has rows that follow one
        another.
        """
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
        """The node behind this one, or behind the root, that proposes `token`."""
        for other in range(node + 1, len(self.tokens)):
            if self.parents[other] == node and self.tokens[other] == token:
                return other
        return None

    def walk(self, emit: Callable[[int, int], int]) -> tuple[list[int], list[int]]:
        """Follow what the target emits from the root on, `emit(row, depth)` in a row that is so many tokens behind it:
        the tokens, the last of which no node proposed, and the nodes that proposed the others.
        """
        emitted, path, node = [emit(0, 0)], list[int](), ROOT
        while (child := self.child(node, emitted[-1])) is not None:
            path.append(node := child)
            emitted.append(emit(node + 1, len(path)))
        return emitted, path


NO_PROPOSALS = DraftTree()
