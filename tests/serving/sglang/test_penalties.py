"""Penalties at the nodes of a tree are those of plain decoding along the path, and nothing waits for the device."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from serving.sglang.device import Device
from serving.sglang.penalties import TreePenalties, paths
from tests.serving.sglang.harness import Request
from tests.serving.sglang.slow_device import NoWaiting, SlowDevice

VOCAB = 11
STOPS = (3, 4, 8, 9)
"""The request's own, the model's, the tokenizer's, and one that was added to that."""
PENALTIES = (
    {},
    {"frequency_penalty": 0.5},
    {"presence_penalty": -0.7},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": -0.2, "presence_penalty": 0.4, "repetition_penalty": 0.8, "min_new_tokens": 9},
    {"min_new_tokens": 6},
)


class Tree:
    """Random proposals of one request: each node's parent comes before it."""

    def __init__(self, dice: random.Random, root: int, *, num_nodes: int, num_children: int, depth: int) -> None:
        self.parents, self.tokens, levels = [-1], [root], [0]
        while len(self.parents) < num_nodes:
            open_ = [n for n in range(len(levels)) if levels[n] < depth - 1 and self.parents.count(n) < num_children]
            self.parents.append(dice.choice(open_))
            self.tokens.append(dice.randrange(VOCAB))
            levels.append(levels[self.parents[-1]] + 1)

    def path(self, node: int) -> list[int]:
        """From the root."""
        return [] if node < 0 else [*self.path(self.parents[node]), node]

    def links(self) -> tuple[list[int], list[int]]:
        children = [[n for n, parent in enumerate(self.parents) if parent == node] for node in range(len(self.parents))]
        next_sibling = [-1] * len(children)
        for siblings in children:
            for one, other in itertools.pairwise(siblings):
                next_sibling[one] = other
        return [own[0] if own else -1 for own in children], next_sibling


def plainly(request: Request, logits: Tensor, answer: list[int], *, lags: bool) -> Tensor:
    """What SGLang's penalties make of logits behind this answer in plain decoding, one after another."""
    params, logits = request.sampling_params, logits.clone()
    counted = [*request.origin_input_ids[-1:], *answer[:-1]] if lags else answer
    for token, count in Counter(counted).items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
        factor = params.repetition_penalty
        logits[token] *= factor if logits[token] < 0 else 1 / factor
    if len(answer) < params.min_new_tokens:
        logits[list(STOPS)] = -torch.inf
    return logits


def new_request(rid: str, **params: Any) -> Request:
    own, of_model, of_tokenizer, added = STOPS
    request = Request([5, 6, 7], rid, stop_token_ids={own}, **params)
    request.tokenizer = SimpleNamespace(eos_token_id=of_tokenizer, additional_stop_token_ids={added})
    request.eos_token_ids = {of_model}
    return request


SHAPES = pytest.mark.parametrize(("num_nodes", "num_children", "depth"), [(1, 1, 1), (4, 1, 4), (9, 3, 4)])
LAGS = pytest.mark.parametrize("lags", [False, True])


@LAGS
@SHAPES
def test_each_node_has_the_penalties_of_its_own_path(num_nodes: int, num_children: int, depth: int, lags: bool) -> None:
    watched = NoWaiting()

    def on_device(*objects: Any) -> NoWaiting:
        watched.place(*objects)
        return watched

    check_against_plain(SlowDevice(watched), on_device, num_nodes, num_children, depth, lags=lags)
    assert watched.num_operators


def check_against_plain(
    layer: Device,
    on_device: Callable[..., AbstractContextManager[object]],
    num_nodes: int,
    num_children: int,
    depth: int,
    *,
    lags: bool,
) -> None:
    """Eight steps of random trees; `on_device` moves tensors to the device and returns what notices waiting for it."""
    dice = random.Random(num_nodes)
    penalties = TreePenalties(layer, lags=lags)
    requests = [new_request(str(number), **params) for number, params in enumerate(PENALTIES)]
    requests[1].output_ids = [2, 2, 4]  # it was retracted, and its prompt is read again
    answers = [[*request.output_ids, dice.randrange(VOCAB)] for request in requests]
    for request in requests:
        penalties.prefilled(request)
    for step in range(8):
        trees = [
            Tree(dice, answer[-1], num_nodes=num_nodes, num_children=num_children, depth=depth) for answer in answers
        ]
        links = [tree.links() for tree in trees]
        levels = [[len(tree.path(node)) - 1 for node in range(num_nodes)] for tree in trees]
        verify_input = SimpleNamespace(
            draft_token=torch.tensor([tree.tokens for tree in trees]).flatten(),
            draft_token_num=num_nodes,
            retrieve_next_token=torch.tensor([first for first, _ in links]),
            retrieve_next_sibling=torch.tensor([sibling for _, sibling in links]),
            positions=torch.tensor(
                [[2 + len(answer) + at for at in own] for answer, own in zip(answers, levels, strict=True)]
            ).flatten(),
            topk=num_children,
            spec_steps=depth - 1,
        )
        logits = torch.randn(len(requests) * num_nodes, VOCAB, generator=torch.Generator().manual_seed(step))
        accepted = [tree.path(dice.randrange(num_nodes)) for tree in trees]
        index = torch.full((len(requests), depth), -1)
        for row, path in enumerate(accepted):
            index[row, : len(path)] = torch.tensor(path) + row * num_nodes
        expected = [
            plainly(
                request,
                logits[row * num_nodes + node],
                answer[:-1] + [tree.tokens[n] for n in tree.path(node)],
                lags=lags,
            )
            for row, (request, answer, tree) in enumerate(zip(requests, answers, trees, strict=True))
            for node in range(num_nodes)
        ]
        info = SimpleNamespace(acc_additive_penalties=torch.zeros(1), acc_scaling_penalties=None)
        batch = SimpleNamespace(reqs=requests, sampling_info=info, forward_mode=SimpleNamespace(is_idle=lambda: False))
        with on_device(verify_input, logits, index):
            penalties.around_sampling(
                lambda *_, index=index: (None, None, index),
                verify_input,
                batch,
                SimpleNamespace(next_token_logits=logits),
            )
        torch.testing.assert_close(logits.cpu(), torch.stack(expected))
        assert info.acc_additive_penalties is None, "SGLang adds nothing more"
        for row, path in enumerate(accepted):
            bonus = dice.randrange(VOCAB)
            answers[row] += [*(trees[row].tokens[node] for node in path[1:]), bonus]
        if step == 4:
            # One ends, and more come than there was room for.
            penalties.released(requests.pop(2))
            late = [new_request(f"late-{number}", presence_penalty=0.3) for number in range(12)]
            for request in late:
                penalties.prefilled(request)
            requests += late
            answers = [*answers[:2], *answers[3:], *([1] for _ in late)]


def test_a_batch_without_penalties_is_left_alone() -> None:
    penalties = TreePenalties(SlowDevice(NoWaiting()), lags=False)
    penalties.prefilled(Request([1], "a"))
    info = SimpleNamespace(acc_additive_penalties=None)
    batch = SimpleNamespace(sampling_info=info, forward_mode=SimpleNamespace(is_idle=lambda: False))
    assert penalties.around_sampling(lambda *given: given, 1, batch, 2) == (1, batch, 2)
    idle = SimpleNamespace(sampling_info=None, forward_mode=SimpleNamespace(is_idle=lambda: True))
    assert penalties.around_sampling(lambda *given: given, 1, idle, 2) == (1, idle, 2)


def test_paths_end_at_the_root() -> None:
    next_token, next_sibling = torch.tensor([[1, 3, -1, -1]]), torch.tensor([[-1, 2, -1, -1]])
    assert paths(next_token, next_sibling, num_children=2, depth=3).tolist() == [
        [[0, 4, 4], [1, 0, 4], [2, 0, 4], [3, 1, 0]]
    ]
