"""Draft trees: every path of a tree is kept whatever the order of its nodes, and the target's own path is followed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculator.proposals.draft_tree import ROOT, DraftTree


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Children of one node have different tokens."""
    parents: list[int] = []
    tokens: list[int] = []
    for node in range(draw(st.integers(0, 9))):
        parent = draw(st.integers(ROOT, node - 1))
        taken = [token for token, other in zip(tokens, parents, strict=True) if other == parent]
        free = [token for token in range(12) if token not in taken]
        parents.append(parent)
        tokens.append(draw(st.sampled_from(free)))
    probabilities = draw(st.lists(st.floats(0.01, 1), min_size=len(tokens), max_size=len(tokens)))
    return DraftTree(tuple(tokens), tuple(parents), tuple(probabilities))


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """What each node proposes behind the root, by node."""
    found: dict[int, tuple[int, ...]] = {ROOT: ()}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        found[node] = (*found[parent], token)
    return [found[node] for node in range(len(tree.tokens))]


@given(trees())
def test_depth_first_it_is_the_same_tree_and_first_children_follow_their_parents(tree: DraftTree) -> None:
    order = tree.depth_first()
    ordered = tree.reordered(order)
    assert [ordered.tokens[number] for number in range(len(order))] == [tree.tokens[node] for node in order]
    told = dict(zip(paths(tree), tree.reaches, strict=True))
    assert dict(zip(paths(ordered), ordered.reaches, strict=True)) == pytest.approx(told)
    assert all(parent < node for node, parent in enumerate(ordered.parents))
    for node in (ROOT, *range(len(tree.tokens))):
        children = [other for other, parent in enumerate(tree.parents) if parent == node]
        place = paths(ordered).index(paths(tree)[node]) if node != ROOT else ROOT
        if children:
            assert paths(ordered)[place + 1] == paths(tree)[children[0]]
    assert ordered.depth_first() == list(range(len(tree.tokens)))


@given(trees(), st.lists(st.integers(0, 11), min_size=12, max_size=12))
def test_what_the_target_emits_is_followed_as_far_as_it_was_proposed(tree: DraftTree, text: list[int]) -> None:
    rows: list[int] = []

    def emit(row: int, depth: int) -> int:
        rows.append(row)
        return text[depth]

    emitted, path = tree.walk(emit)
    longest = max((len(one) for one in paths(tree) if one == tuple(text[: len(one)])), default=0)
    assert emitted == text[: longest + 1]
    assert [tree.tokens[node] for node in path] == emitted[:-1]
    assert rows == [0, *(node + 1 for node in path)], "no row is sampled that is not committed"


@given(trees(), st.integers(0, 10))
def test_the_first_nodes_are_a_tree_which_is_as_deep_as_its_longest_path(tree: DraftTree, num_nodes: int) -> None:
    first = tree.first(num_nodes)
    assert paths(first) == paths(tree)[:num_nodes]
    assert first.reaches == tree.reaches[:num_nodes]
    assert tree.depth == max(map(len, paths(tree)), default=0)


def test_a_chain_is_a_tree_that_does_not_fork() -> None:
    chain = DraftTree.chain([5, 6, 7], [0.5, 0.5, 0.2])
    assert chain.is_chain
    assert chain.parents == (ROOT, 0, 1)
    assert chain.reaches == pytest.approx([0.5, 0.25, 0.05])
    assert chain.depth == 3
    forked = DraftTree((5, 6, 7), (ROOT, 0, 0), (0.5, 0.5, 0.2))
    assert not forked.is_chain
    assert forked.reaches == pytest.approx([0.5, 0.25, 0.1])
    assert forked.depth == 2
    assert DraftTree().is_chain
    assert DraftTree().walk(lambda row, depth: 9 + row + depth) == ([9], [])


def test_a_node_is_asked_for_by_its_parent_and_token() -> None:
    tree = DraftTree((1, 2, 1, 3), (ROOT, 0, 1, 0), (1.0,) * 4)
    for node, token in itertools.product((ROOT, 0, 1, 2, 3), range(5)):
        wanted = {(ROOT, 1): 0, (0, 2): 1, (1, 1): 2, (0, 3): 3}.get((node, token))
        assert tree.child(node, token) == wanted
