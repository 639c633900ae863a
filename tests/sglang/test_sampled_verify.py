"""Sampled verification on a CPU: SGLang's own `eagle_sample`, hooked, on trees over a toy vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers import sampler
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.speculative import eagle_utils
from torch import Tensor

from serving.sglang.plugin import contract, hooks
from serving.sglang.sampled_verify import (
    SampledVerify,
    drawn_tokens,
    rejecting_targets,
    sampled_targets,
    served_probs,
)
from tests.sglang.ops.sgl_kernel.tree import verify_tree_greedy_cpu

DRAWS = 10_000
TREE = {"retrieve_next_token": [1, 3, -1, -1], "retrieve_next_sibling": [-1, 2, -1, -1]}
"""Two proposals under the root, and one under the first of them."""
TOKENS = [9, 0, 1, 2]
CHI_SQUARE_999 = {2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52}
"""Values that a right sampler exceeds once in a thousand times, by degrees of freedom."""


def info(**changes: Any) -> Any:
    """As of one request at temperature 1."""
    values = {
        "is_all_greedy": False,
        "temperatures": torch.ones(1, 1),
        "top_ks": torch.tensor([1 << 30]),
        "top_ps": torch.ones(1),
        "min_ps": torch.zeros(1),
        "need_top_k_sampling": False,
        "need_top_p_sampling": False,
        "need_min_p_sampling": False,
        "sampling_seed": None,
    }
    return SimpleNamespace(**values | changes)


def walked(targets_BN: Tensor) -> tuple[Tensor, Tensor]:
    """What the tree commits for each row of choices: tokens [B, 3], −1 behind the last, and their number [B]."""
    size = len(targets_BN)
    index_BN = torch.arange(size * 4).view(size, 4)
    predicts, accepted = torch.zeros(size * 4, dtype=torch.int32), torch.full((size, 3), -1, dtype=torch.int32)
    counts = torch.empty(size, dtype=torch.int32)
    links = {name: torch.tensor(values).expand(size, 4) for name, values in TREE.items()}
    candidates = torch.tensor(TOKENS).expand(size, 4)
    verify_tree_greedy_cpu(predicts, accepted, counts, candidates, index_BN, *links.values(), targets_BN)
    committed = torch.where(accepted >= 0, predicts[accepted.clamp_min(0).long()], -1)
    return committed, counts + 1


def chi_square(tokens: Tensor, probs: Tensor) -> float:
    counts, expected = torch.bincount(tokens.long(), minlength=len(probs)), probs * len(tokens)
    possible = expected > 0
    assert int(counts[~possible].sum()) == 0
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum())


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, 6),
        ({"temperatures": torch.full((1, 1), 0.7)}, 6),
        ({"need_top_k_sampling": True, "top_ks": torch.tensor([3])}, 3),
        ({"need_top_p_sampling": True, "top_ps": torch.tensor([0.8])}, None),
    ],
)
def test_what_a_tree_commits_is_distributed_as_without_it(changes: dict[str, Any], kept: int | None) -> None:
    """The first token, and the second wherever the first was a proposal: the two distributions are of other nodes."""
    torch.manual_seed(3)
    logits_NV = torch.randn(4, 6) * 1.5
    sampling = info(**changes)
    served_NV = torch.softmax(logits_NV / sampling.temperatures, -1)
    if sampling.need_top_k_sampling or sampling.need_top_p_sampling:
        ordered, order = served_NV.sort(-1, descending=True)
        dropped = (torch.arange(6) >= sampling.top_ks) | (ordered.cumsum(-1) - ordered > sampling.top_ps)
        served_NV = served_NV.scatter(-1, order, torch.where(dropped, 0.0, ordered))
        served_NV /= served_NV.sum(-1, keepdim=True)
    rows = {name: getattr(sampling, name).repeat(DRAWS, *[1] * (getattr(sampling, name).dim() - 1)) for name in
            ("temperatures", "top_ks", "top_ps", "min_ps")}  # fmt: skip
    targets_BN = sampled_targets(
        logits_NV.repeat(DRAWS, 1), info(**vars(sampling) | rows), torch.zeros(4 * DRAWS, dtype=torch.int64), 4
    )
    committed, counts = walked(targets_BN)
    for node, behind in ((0, None), (1, 0), (2, 1)):
        if behind is None:
            tokens = committed[:, 0]
        else:
            tokens = committed[committed[:, 0] == behind, 1]
            if len(tokens) < 200:
                continue
        freedom = int((served_NV[node] > 0).sum()) - 1
        assert freedom + 1 == (kept or freedom + 1)
        if freedom:
            assert chi_square(tokens, served_NV[node]) < CHI_SQUARE_999[max(freedom, 2)]
    assert set(counts.tolist()) >= {1, 2}


def chain(size: int, served_NV: Tensor, drafted_PV: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [size, 3] that a chain of two draws commits under rejection sampling, −1 behind the last; their number."""
    proposals = torch.stack([drafted_V.multinomial(size, replacement=True) for drafted_V in drafted_PV], dim=1)
    targets = rejecting_targets(served_NV.expand(size, -1, -1), drafted_PV.expand(size, -1, -1), proposals)
    index_BN = torch.arange(size * 3).view(size, 3)
    predicts, accepted = torch.zeros(size * 3, dtype=torch.int32), torch.full((size, 3), -1, dtype=torch.int32)
    counts = torch.empty(size, dtype=torch.int32)
    links = torch.tensor([1, 2, -1]).expand(size, 3), torch.full((size, 3), -1)
    candidates = torch.cat([torch.full((size, 1), 9), proposals], dim=1)
    verify_tree_greedy_cpu(predicts, accepted, counts, candidates, index_BN, *links, targets)
    return torch.where(accepted >= 0, predicts[accepted.clamp_min(0).long()], -1), counts + 1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperatures": torch.full((1, 1), 0.7)},
        {"need_top_k_sampling": True, "top_ks": torch.tensor([3])},
        {"need_top_p_sampling": True, "top_ps": torch.tensor([0.8])},
        {"need_min_p_sampling": True, "min_ps": torch.tensor([0.2])},
    ],
)
def test_what_a_chain_of_draws_commits_is_distributed_as_without_it(changes: dict[str, Any]) -> None:
    """Each position where it is reached: the node's distribution does not depend here on what came before."""
    torch.manual_seed(5)
    logits_NV, sampling = torch.randn(3, 6) * 1.5, info(**changes)
    served_NV = served_probs(logits_NV, sampling, 3)[0]
    drafted_PV = torch.softmax(logits_NV[:2] + torch.randn(2, 6), -1)
    committed, counts = chain(DRAWS, served_NV, drafted_PV)
    for node in range(3):
        tokens = committed[counts > node, node]
        freedom = int((served_NV[node] > 0).sum()) - 1
        assert len(tokens) > 1000
        assert chi_square(tokens, served_NV[node]) < CHI_SQUARE_999[max(freedom, 2)]
    overlap = float(torch.minimum(served_NV[0], drafted_PV[0]).sum())
    assert float((counts > 1).float().mean()) == pytest.approx(overlap, abs=0.02), "as often as it is possible"


def test_draws_from_a_vocabulary_of_several_blocks_follow_the_weights() -> None:
    torch.manual_seed(7)
    weights_V = torch.softmax(torch.randn(151), -1)
    weights_V[60:135] = 0.0
    tokens = drawn_tokens(3 * weights_V.expand(4 * DRAWS, 2, -1)).flatten()
    # 75 degrees of freedom.
    assert chi_square(tokens, weights_V / weights_V.sum()) < 118.6
    assert drawn_tokens(torch.full((1, 1, 151), torch.nan)).item() < 151


def test_a_draft_like_the_target_is_always_accepted_and_one_that_nobody_drew_never() -> None:
    served_NV = torch.softmax(torch.randn(3, 6), -1)
    _, counts = chain(500, served_NV, served_NV[:2])
    assert set(counts.tolist()) == {3}
    nobody = torch.zeros(500, 2, 6)
    targets = rejecting_targets(served_NV.expand(500, -1, -1), nobody, torch.zeros(500, 2, dtype=torch.int64))
    assert chi_square(targets[:, 0], served_NV[0]) < CHI_SQUARE_999[5]


def noise(seeds: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """In the place of SGLang's hash, which is a compiled operator."""
    pairs = zip(seeds.tolist(), positions.tolist(), strict=True)
    generators = (torch.Generator().manual_seed(1000 * seed + position) for seed, position in pairs)
    return torch.stack([torch.randint(1 << 32, (len(columns),), generator=generator) for generator in generators])


def test_a_seed_draws_the_same_token_as_plain_decoding_at_each_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "murmur_hash32", noise)
    torch.manual_seed(4)
    logits_NV, positions = torch.randn(8, 50), torch.tensor([7, 8, 8, 9, 20, 21, 21, 22])
    seeds = torch.tensor([11, 12])
    sampling = info(temperatures=torch.tensor([[0.7], [1.0]]), sampling_seed=seeds)
    found = sampled_targets(logits_NV, sampling, positions, 4)
    for node in range(8):
        request = node // 4
        probs = torch.softmax(logits_NV[node : node + 1] / sampling.temperatures[request], -1)
        plain = sampler.sampling_from_probs_torch(probs, seeds[request : request + 1], positions[node : node + 1])
        assert int(found.flatten()[node]) == int(plain)
    likeliest = logits_NV.argmax(-1).view(2, 4)
    assert not torch.equal(found, likeliest)


@pytest.fixture
def hooked() -> Iterator[list[Any]]:
    """The hooks of `eagle_sample` and of its walk, around a walk that notes what the target chose."""
    seen: list[Any] = []
    sampled = SampledVerify()

    def walk(**kwargs: Any) -> tuple[Tensor, ...]:
        seen.append(kwargs["target_predict"])
        return kwargs["predicts"], kwargs["accept_index"], kwargs["accept_token_num"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eagle_utils, "verify_tree_greedy_func", lambda **kwargs: sampled.around_walk(walk, **kwargs))
        patch.setattr(eagle_utils, "_is_cpu", True)
        patch.setattr(eagle_utils, "get_spec", lambda: SimpleNamespace(speculative_use_rejection_sampling=False))
        seen.append(sampled)
        yield seen


def asked(size: int, *, num_nodes: int, **changes: Any) -> tuple[Any, Any]:
    """A verification of chains, as SGLang asks for it, and its batch."""
    batch = SimpleNamespace(
        device="cpu",
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        seq_lens=torch.ones(size),
        sampling_info=info(
            **{"temperatures": torch.ones(size, 1), "has_watermark_candidates": False}
            | dict.fromkeys(("acc_additive_penalties", "acc_scaling_penalties", "logit_bias"))
            | changes
        ),
    )
    tree = SimpleNamespace(
        draft_token_num=num_nodes,
        draft_token=torch.zeros(size * num_nodes, dtype=torch.int64),
        draft_probs=None,
        max_tree_depth=num_nodes,
        positions=torch.arange(size * num_nodes),
        tree_topk=1,
        **dict.fromkeys(("retrieve_index", "retrieve_next_token", "retrieve_next_sibling")),
    )
    return tree, batch


@pytest.mark.parametrize("is_greedy", [True, False])
def test_sglangs_own_verification_asks_for_the_draw(hooked: list[Any], is_greedy: bool) -> None:
    sampled = hooked.pop()
    logits = torch.tensor([[0.0, 0.1], [0.1, 0.0]]).repeat(200, 1)
    bias = torch.tensor([[0.0, 0.0]]).expand(200, 2)
    tree, batch = asked(200, num_nodes=2, is_all_greedy=is_greedy, logit_bias=bias)
    sampled.around_sampling(eagle_utils.eagle_sample, tree, batch, SimpleNamespace(next_token_logits=logits))
    [chosen_BN] = hooked
    assert torch.equal(chosen_BN, torch.tensor([[1, 0]]).expand(200, 2)) is is_greedy
    assert chosen_BN.float().mean().item() == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("is_hooked", [True, False])
def test_sglangs_rejection_sampling_takes_a_step_without_proposals(
    monkeypatch: pytest.MonkeyPatch, is_hooked: bool
) -> None:
    """On a GPU it asks what proposals were drawn from, and ends the server where nobody has proposed any."""
    drawn_from: list[Tensor] = []
    parallel = SimpleNamespace(tp_group=SimpleNamespace(world_size=1))
    monkeypatch.setattr(eagle_utils, "_is_cpu", False)
    monkeypatch.setattr(eagle_utils, "sampling_softmax", lambda logits, temperatures: logits.softmax(-1), raising=False)
    monkeypatch.setattr(
        eagle_utils, "chain_speculative_sampling_triton", lambda **given: drawn_from.append(given["draft_probs"])
    )
    monkeypatch.setattr("sglang.srt.layers.dp_attention.is_dp_attention_enabled", lambda: False)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: parallel)
    rejecting = {"speculative_use_rejection_sampling": True, "speculative_use_block_verification": False}
    thresholds = {f"speculative_accept_threshold_{name}": 1.0 for name in ("single", "acc")}
    monkeypatch.setattr(eagle_utils, "get_spec", lambda: SimpleNamespace(**rejecting, **thresholds))
    tree, batch = asked(3, num_nodes=1)
    output = SimpleNamespace(next_token_logits=torch.zeros(3, 7))
    if is_hooked:
        SampledVerify().around_sampling(eagle_utils.eagle_sample, tree, batch, output)
        assert [probs.shape for probs in drawn_from] == [(3, 1, 7)]
    else:
        with pytest.raises(ValueError, match="draft_probs missing"):
            eagle_utils.eagle_sample(tree, batch, output)


def test_both_hooks_are_registered() -> None:
    registered: list[str] = []

    class Registry(HookRegistry):
        @classmethod
        def register(cls, target: str, *_: Any, **__: Any) -> None:
            registered.append(target)

    hooks.add_hooks(hooks.load_settings(), Registry, HookType)
    assert {contract.SAMPLED_VERIFY.path, contract.WALK.path} <= set(registered)
