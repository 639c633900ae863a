"""The CPU operators against slow, obvious references; needs no SGLang."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from tests.sglang.ops import sgl_kernel as ops

NUM_SLOTS, NUM_ROWS, NUM_COLUMNS = 64, 4, 24


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def request_table() -> Tensor:
    """Four rows of slots in no order; neighbouring requests share no slot in their first 16 columns."""
    slots = torch.randperm(NUM_SLOTS).view(NUM_ROWS, 16)
    return torch.cat((slots, torch.zeros(NUM_ROWS, NUM_COLUMNS - 16, dtype=torch.long)), 1).int()


# --- the request table ---


@pytest.mark.parametrize("ends", [[4, 5, 2], [2, 6, 1], [3, 7, 2], [1, 5, 0]])
def test_slots_are_written_to_and_read_from_each_requests_range(ends: list[int]) -> None:
    """Ranges of different lengths, of the same, and empty ones."""
    table = torch.zeros(NUM_ROWS, NUM_COLUMNS, dtype=torch.int32)
    rows, starts = [2, 0, 3], [1, 5, 0]
    where = torch.tensor(rows), table, torch.tensor(starts), torch.tensor(ends)
    ops.assign_req_to_token_pool_cpu(*where, torch.tensor([11, 12, 13, 14, 15, 16, 99]), NUM_COLUMNS)
    slots, expected = itertools.count(11), torch.zeros_like(table)
    for row, start, end in zip(rows, starts, ends, strict=True):
        for column in range(start, end):
            expected[row, column] = next(slots)
    assert torch.equal(table, expected)

    out = torch.full((7,), -7)
    ops.assign_extend_cache_locs_cpu(*where, out, NUM_COLUMNS)
    num_slots = next(slots) - 11
    assert out.tolist() == [*range(11, 11 + num_slots), *[-7] * (7 - num_slots)]


@pytest.mark.parametrize(("topk", "num_steps"), [(1, 3), (2, 2), (3, 1)])
def test_draft_branches_own_the_slots_behind_the_prefix(topk: int, num_steps: int) -> None:
    table, rows, seq_lens = request_table(), torch.tensor([3, 1]), torch.tensor([5, 2])
    out = torch.empty(2 * topk * num_steps, dtype=torch.long)
    ops.assign_draft_cache_locs_contiguous_cpu(rows, table, seq_lens, out, NUM_COLUMNS, topk, num_steps)
    branches = ops.build_draft_decode_metadata_cpu(table, rows, seq_lens, topk, num_steps, NUM_COLUMNS)
    assert branches.shape[0] == 2 * topk

    for request, (row, length) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        slots = table[row].tolist()
        own = out.view(2, topk, num_steps)[request].tolist()
        assert list(itertools.chain(*own)) == slots[length : length + topk * num_steps]
        for branch in range(topk):
            seen = branches[request * topk + branch, : length + num_steps].tolist()
            assert seen == slots[:length] + own[branch]


def test_cached_keys_move_in_every_layer_with_sources_read_first() -> None:
    layers = [torch.randn(10, 2, 3, dtype=torch.bfloat16), torch.randn(10, 5, dtype=torch.bfloat16)]
    expected = [layer.clone() for layer in layers]
    to, source = torch.tensor([3, 4, 5, 0, 0]), torch.tensor([4, 6, 3, 0, 0])
    for layer in expected:
        layer[to] = layer[source]
    addresses = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)
    ops.copy_all_layer_kv_cache_cpu(addresses, torch.tensor([12, 10]), to, source)
    assert all(torch.equal(*pair) for pair in zip(layers, expected, strict=True))


# --- after a verification ---


def test_bonus_tokens_and_accepted_slots() -> None:
    bonus = torch.empty(2, dtype=torch.int32)
    ops.fill_bonus_tokens_cpu(torch.tensor([5, 6, 7, 8, 9, 10]), torch.tensor([2, 1]), bonus, 3)
    assert bonus.tolist() == [6, 8]

    out = torch.zeros(6, dtype=torch.long)
    accept_index = torch.tensor([[0, 2, -1], [4, -1, -1]], dtype=torch.int32)
    ops.fill_accept_out_cache_loc_cpu(accept_index, torch.arange(100, 108), out)
    assert out.tolist() == [100, 102, 104, 0, 0, 0]


def test_input_ids_rotate_within_each_request() -> None:
    ids = torch.tensor([1, 2, 3, 4, 5, 6])
    ops.rotate_input_ids_cpu(ids, torch.tensor([0, 3, 4]), torch.tensor([3, 0, 2]), torch.tensor([[7], [8], [9]]))
    assert ids.tolist() == [2, 3, 7, 4, 6, 9]
    ops.rotate_input_ids_cpu(ids, torch.tensor([0]), torch.tensor([3]), torch.tensor([10]), torch.tensor([1]))
    assert ids.tolist() == [3, 10, 7, 4, 6, 9]


# --- trees ---


def build(parent_list: list[list[int]], selected: list[list[int]], seq_lens: list[int], topk: int) -> dict[str, Tensor]:
    batch_size, num_nodes = len(selected), len(selected[0]) + 1
    links = torch.full((3, batch_size, num_nodes), -1)
    mask = torch.ones(batch_size * num_nodes * num_nodes, dtype=torch.bool)
    positions = torch.empty(batch_size * num_nodes, dtype=torch.long)
    ops.build_tree_kernel_efficient_cpu(
        torch.tensor(parent_list).view(batch_size, -1),
        torch.tensor(selected),
        torch.tensor(seq_lens),
        mask,
        positions,
        *links,
        topk,
        3,
        num_nodes,
        1,
    )
    return {
        "index": links[0],
        "next_token": links[1],
        "next_sibling": links[2],
        "mask": mask.view(batch_size, num_nodes, num_nodes),
        "positions": positions.view(batch_size, num_nodes),
    }


def test_a_tree_made_by_hand() -> None:
    """Two trees of two branches a step; the second lacks candidate 1, the parent of its candidate 4.

            root               root
           /    \\               |
          1(0)   2(1)           1(0)
         /  \\     |            /  \\
      3(2)  4(3) 5(5)        2(2) 3(3)
                               |
                              5(6)
    """
    tree = build([[-1, 0, 1, 2, 3], [-1, 0, 1, 2, 3]], [[0, 1, 2, 3, 5], [0, 2, 3, 4, 6]], [10, 4], 2)
    assert tree["index"].tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert tree["next_token"].tolist() == [[1, 3, 5, -1, -1, -1], [1, 2, 5, -1, -1, -1]]
    assert tree["next_sibling"].tolist() == [[-1, 2, -1, 4, -1, -1], [-1, -1, 3, -1, -1, -1]]
    assert tree["positions"].tolist() == [[10, 11, 11, 12, 12, 12], [4, 5, 6, 6, 5, 7]]
    seen = [[[j for j in range(6) if row[j]] for row in tree_mask.tolist()] for tree_mask in tree["mask"]]
    assert seen == [
        [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5]],
        [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 4], [0, 1, 2, 5]],
    ]


@pytest.mark.parametrize("num_proposals", [0, 1, 4])
def test_a_chain_is_a_tree_with_one_branch(num_proposals: int) -> None:
    chain = list(range(num_proposals))
    tree = build([[-1, *chain[:-1]]] * 2, [chain] * 2, [7, 3], 1)
    num_nodes = num_proposals + 1
    assert tree["next_token"].tolist() == [[*range(1, num_nodes), -1]] * 2
    assert (tree["next_sibling"] == -1).all()
    assert torch.equal(tree["mask"], torch.ones(2, num_nodes, num_nodes, dtype=torch.bool).tril())
    assert tree["positions"].tolist() == [[7 + i for i in range(num_nodes)], [3 + i for i in range(num_nodes)]]


def test_a_tree_of_one_draft_step_hangs_on_the_root() -> None:
    tree = build([[]], [[0, 1, 2]], [5], 3)
    assert tree["next_token"].tolist() == [[1, -1, -1, -1]]
    assert tree["next_sibling"].tolist() == [[-1, 2, 3, -1]]


def random_forest(batch_size: int, topk: int, num_steps: int, num_nodes: int) -> tuple[dict[str, Tensor], Tensor]:
    """Trees as SGLang grows them, the best candidates by product of random probabilities; and their lengths."""
    parents, selected = [], []
    for _ in range(batch_size):
        scores = torch.rand(topk).sort(descending=True).values.tolist()
        leaves, parent_list = list(range(topk)), [-1]
        for _ in range(num_steps - 1):
            parent_list += leaves
            first = len(scores)
            scores += [scores[leaf] * p for leaf in leaves for p in torch.rand(topk).tolist()]
            leaves = sorted(range(first, len(scores)), key=lambda candidate: -scores[candidate])[:topk]
        best = sorted(range(len(scores)), key=lambda candidate: -scores[candidate])[: num_nodes - 1]
        parents.append(parent_list)
        selected.append(sorted(best))
    seq_lens = torch.randint(1, 9, (batch_size,))
    return build(parents, selected, seq_lens.tolist(), topk), seq_lens


def different_among_siblings(tree: dict[str, Tensor], vocab_size: int) -> Tensor:
    """A token for every node, no two alike under one parent."""
    tokens = torch.zeros_like(tree["index"])
    for batch, parent in itertools.product(*map(range, tokens.shape)):
        child = int(tree["next_token"][batch, parent])
        for token in torch.randperm(vocab_size):
            if child >= 0:
                tokens[batch, child] = token
                child = int(tree["next_sibling"][batch, child])
    return tokens


@pytest.mark.parametrize(("topk", "num_nodes"), [(1, 1), (1, 4), (2, 6), (4, 12)])
def test_verification_follows_the_longest_path_that_the_target_agrees_with(topk: int, num_nodes: int) -> None:
    """By brute force: of all nodes whose path holds only tokens that the target chose, the deepest one."""
    for _ in range(30):
        tree, seq_lens = random_forest(3, topk, 3, num_nodes)
        candidates = different_among_siblings(tree, vocab_size=4)
        chosen = torch.randint(0, 4, (3, num_nodes))
        predicts = torch.zeros(3 * num_nodes, dtype=torch.int32)
        accept_index = torch.full((3, 4), -1, dtype=torch.int32)
        num_accepted = torch.empty(3, dtype=torch.int32)
        ops.verify_tree_greedy_cpu(
            predicts=predicts,
            accept_index=accept_index,
            accept_token_num=num_accepted,
            candidates=candidates,
            retrive_index=tree["index"],
            retrive_next_token=tree["next_token"],
            retrive_next_sibling=tree["next_sibling"],
            target_predict=chosen,
        )
        for batch in range(3):
            paths = []
            for node in range(num_nodes):
                path = tree["mask"][batch, node].nonzero()[:, 0].tolist()
                if all(candidates[batch, b] == chosen[batch, a] for a, b in itertools.pairwise(path)):
                    paths.append(path)
            depth = max(map(len, paths))
            walked = [number - batch * num_nodes for number in accept_index[batch].tolist() if number >= 0]
            assert walked in paths
            assert len(walked) == depth == num_accepted[batch] + 1
            assert (tree["positions"][batch, walked] == seq_lens[batch] + torch.arange(depth)).all()
            assert predicts.view(3, -1)[batch, walked].tolist() == chosen[batch, walked].tolist()


# --- attention ---

NUM_HEADS, NUM_GROUPS, HEAD_DIM = 6, 2, 8
SCALE = 0.3


def softmax_attention(query_HD: Tensor, keys_LGD: Tensor, values_LGD: Tensor) -> Tensor:
    """One token's attention, written out head by head."""
    out = torch.empty(NUM_HEADS, HEAD_DIM, dtype=query_HD.dtype)
    for head in range(NUM_HEADS):
        group = head // (NUM_HEADS // NUM_GROUPS)
        weights = [math.exp(SCALE * float(query_HD[head] @ key[group])) for key in keys_LGD]
        values = [weight * value[group] for weight, value in zip(weights, values_LGD, strict=True)]
        out[head] = torch.stack(values).sum(0) / sum(weights)
    return out


def kv_buffers() -> tuple[Tensor, Tensor]:
    keys, values = torch.randn(2, NUM_SLOTS, NUM_GROUPS, HEAD_DIM, dtype=torch.float64)
    return keys, values


@pytest.mark.parametrize("lengths", [[5], [5, 5], [1, 7, 4]])
def test_decode_attention_stores_the_new_key_and_sees_the_whole_sequence(lengths: list[int]) -> None:
    keys, values = kv_buffers()
    table, num = request_table(), len(lengths)
    rows, seq_lens = torch.tensor([2, 0, 3][:num]), torch.tensor(lengths)
    query = torch.randn(num, NUM_HEADS, HEAD_DIM, dtype=torch.float64)
    new_key, new_value = torch.randn(2, num, NUM_GROUPS * HEAD_DIM, dtype=torch.float64)
    new_slots = table[rows, seq_lens - 1].long()
    out, none = torch.empty_like(query), None
    ops.decode_attention_cpu(
        query, keys, values, 1.0, 1.0, out, new_key, new_value, new_slots, none, table, rows, seq_lens,
        SCALE, 0.0, False, 0, none, none,
    )  # fmt: skip
    assert torch.equal(keys[new_slots], new_key.view(num, NUM_GROUPS, HEAD_DIM))
    assert torch.equal(values[new_slots], new_value.view(num, NUM_GROUPS, HEAD_DIM))
    for index, (row, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
        seen = table[row, :length].long()
        torch.testing.assert_close(out[index], softmax_attention(query[index], keys[seen], values[seen]))


@pytest.mark.parametrize(
    ("prefixes", "num_new", "with_tree"),
    [
        ([0], [4], False),
        ([0, 0], [3, 3], False),
        ([5, 0, 2], [1, 4, 3], False),
        ([5, 2], [3, 3], False),
        ([5, 2, 9], [4, 4, 4], True),
        ([0], [4], True),
    ],
    ids=["whole prompt", "two prompts", "chunks", "chain", "trees", "tree without a prefix"],
)
def test_extend_attention_sees_the_prefix_and_its_own_kind(
    prefixes: list[int], num_new: list[int], with_tree: bool
) -> None:
    keys, values = kv_buffers()
    table, num = request_table(), len(prefixes)
    rows, news = torch.tensor([2, 0, 3][:num]), torch.tensor(num_new)
    seq_lens, starts = torch.tensor(prefixes) + news, news.cumsum(0) - news
    query = torch.randn(sum(num_new), NUM_HEADS, HEAD_DIM, dtype=torch.float64)
    tree = random_forest(num, 2, 3, 4)[0]["mask"] if with_tree else None
    out, none = torch.empty_like(query), None
    ops.extend_attention_cpu(
        query, none, none, out, keys, values, 1.0, 1.0, table, rows, seq_lens, news, starts, max(num_new),
        SCALE, 0.0, False, 0, none, none, None if tree is None else tree.flatten(), True,
    )  # fmt: skip
    for batch, (prefix, length) in enumerate(zip(prefixes, num_new, strict=True)):
        for new in range(length):
            among_new = range(new + 1) if tree is None else tree[batch, new].nonzero()[:, 0].tolist()
            columns = [*range(prefix), *(prefix + other for other in among_new)]
            seen = table[rows[batch], columns].long()
            token = int(starts[batch]) + new
            torch.testing.assert_close(out[token], softmax_attention(query[token], keys[seen], values[seen]))


@pytest.mark.parametrize("lengths", [[5], [5, 5], [1, 7, 4]])
def test_one_new_token_each_is_plain_decoding(lengths: list[int]) -> None:
    """Bit for bit, whatever the tree's mask, which says nothing about a lone root; so a depth of 0 costs nothing."""
    keys, values = kv_buffers()
    table, num, none = request_table(), len(lengths), None
    rows, seq_lens = torch.tensor([2, 0, 3][:num]), torch.tensor(lengths)
    query = torch.randn(num, NUM_HEADS, HEAD_DIM, dtype=torch.float64)
    ones, starts, slots = torch.ones(num).int(), torch.arange(num), table[rows, seq_lens - 1].long()
    decoded, verified = torch.empty_like(query), torch.empty_like(query)
    ops.decode_attention_cpu(
        query, keys, values, 1.0, 1.0, decoded, none, none, slots, none, table, rows, seq_lens,
        SCALE, 0.0, False, 0, none, none,
    )  # fmt: skip
    ops.extend_attention_cpu(
        query, none, none, verified, keys, values, 1.0, 1.0, table, rows, seq_lens, ones, starts, 1,
        SCALE, 0.0, False, 0, none, none, torch.zeros(num, dtype=torch.bool), True,
    )  # fmt: skip
    assert torch.equal(decoded, verified)


def test_what_is_not_written_here_is_refused() -> None:
    keys, values = kv_buffers()
    query, none = torch.randn(1, NUM_HEADS, HEAD_DIM, dtype=torch.float64), None
    one = torch.ones(1, dtype=torch.long)
    for logit_cap, window, sinks in [(30.0, 0, None), (0.0, 128, None), (0.0, 0, torch.zeros(NUM_HEADS))]:
        with pytest.raises(NotImplementedError):
            ops.decode_attention_cpu(
                query, keys, values, 1.0, 1.0, torch.empty_like(query), none, none, one, none, request_table(), one,
                one, SCALE, logit_cap, False, window, none, sinks,
            )  # fmt: skip


def test_the_names_that_sglang_looks_up_are_there() -> None:
    assert torch.ops.sgl_kernel.decode_attention_cpu is ops.decode_attention_cpu
    assert torch.ops.sgl_kernel.extend_attention_cpu is ops.extend_attention_cpu
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")
