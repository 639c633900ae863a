"""A fresh draft and its vocabulary."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor

from speculator.draft.checkpoint import (
    SWITCHES,
    config_from_json,
    draft_config_json,
    draft_state,
    expected_shapes,
    read_target_tensor,
)
from speculator.draft.eagle3 import DraftConfig
from speculator.draft.initialization import (
    _OFFSET_NORMS,
    choose_draft_vocab,
    count_tokens,
    draft_vocab_of,
    fresh_draft,
)
from speculator.errors import ConfigError
from speculator.target_folder import NORM, read_config
from tests.fixtures.toy import make_toy_model


def chosen(d2t_D: torch.Tensor) -> list[int]:
    return (d2t_D + torch.arange(len(d2t_D))).tolist()


def test_without_texts_the_low_ids_are_chosen() -> None:
    assert chosen(choose_draft_vocab(50, 5)) == [0, 1, 2, 3, 4]
    assert chosen(choose_draft_vocab(5, 8)) == [0, 1, 2, 3, 4]
    assert chosen(choose_draft_vocab(50, 5, torch.zeros(50))) == [0, 1, 2, 3, 4]


def test_tokens_of_the_texts_displace_the_rarest_of_the_low_ids() -> None:
    counts_V = torch.zeros(50, dtype=torch.int64)
    counts_V[[40, 44]] = 100
    assert chosen(choose_draft_vocab(50, 5, counts_V)) == [0, 1, 2, 40, 44]


def test_characters_rank_before_the_low_ids_and_after_the_texts() -> None:
    assert chosen(choose_draft_vocab(50, 5, characters=[45, 47])) == [0, 1, 2, 45, 47]
    counts_V = torch.zeros(50, dtype=torch.int64)
    counts_V[[40, 44]] = 100
    assert chosen(choose_draft_vocab(50, 5, counts_V, characters=[45, 47])) == [0, 40, 44, 45, 47]


def test_a_draft_can_propose_the_characters_that_sentencepiece_puts_last(tmp_path: Path) -> None:
    """Llama 2 and Mistral have merges at the lower ids, then the characters by frequency."""
    merges = {f"▁{a}{b}": 3 + number for number, (a, b) in enumerate(itertools.product("abcdef", repeat=2))}
    characters = {piece: 39 + number for number, piece in enumerate("▁e.,07é的")}
    folder = make_toy_model(tmp_path)
    config = DraftConfig.for_target(read_config(folder), draft_vocab_size=12)

    def proposed(vocab: object) -> list[int]:
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
        return chosen(draft_vocab_of(folder, config, ()))

    assert proposed(merges | characters) == [0, 1, 2, 3, *characters.values()]
    low = list(range(12))
    assert proposed(merges | {"e": 39, ".": 40}) == low, "without SentencePiece's space"
    assert proposed([["▁", 0.0], ["e", -1.0]]) == low, "a unigram model's are ordered by frequency"
    assert proposed({"▁": "a", ".": 47, ",": None}) == low
    assert proposed(None) == low
    (folder / "tokenizer.json").unlink()
    assert chosen(draft_vocab_of(folder, config, ())) == low


def test_texts_are_counted_with_the_targets_tokenizer(model_dir: Path) -> None:
    counts_V = count_tokens(model_dir, ["abba", "b"], 47)
    assert counts_V.sum() == 5
    assert sorted(counts_V[counts_V > 0].tolist()) == [2, 3]
    assert torch.equal(count_tokens(model_dir, ["abba", [2, 2, 40], "b", [40]], 47) - counts_V, counts([2, 40, 2, 40]))


def counts(tokens: list[int]) -> Tensor:
    return torch.bincount(torch.tensor(tokens), minlength=47)


def test_tokens_that_the_target_has_not_are_refused_and_others_need_no_tokenizer(tmp_path: Path) -> None:
    assert torch.equal(count_tokens(tmp_path, [[3, 46], [3]], 47), counts([3, 3, 46]))
    for tokens in ([3, 47], [-1]):
        with pytest.raises(ConfigError, match="vocab_size is 47: check --model"):
            count_tokens(tmp_path, [[1, 2], tokens], 47)


def test_a_slim_draft_has_a_narrower_mlp_and_says_so_in_its_file(model_dir: Path) -> None:
    usual, slim = (fresh_draft(model_dir, draft_vocab_size=24, intermediate_size=width) for width in (None, 16))
    assert usual.config.intermediate_size == read_config(model_dir)["intermediate_size"] != 16
    assert (
        config_from_json(draft_config_json(slim.config)) == slim.config == replace(usual.config, intermediate_size=16)
    )
    shapes = {name: tuple(tensor.shape) for name, tensor in draft_state(slim).items()}
    assert shapes == expected_shapes(slim.config)
    assert shapes["midlayer.mlp.down_proj.weight"] == (slim.config.hidden_size, 16)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", *sorted(_OFFSET_NORMS)])
def test_a_fresh_drafts_final_norm_computes_what_the_targets_does(model_type: str, tmp_path: Path) -> None:
    """Some models store the difference of a norm's weight to 1 (huggingface/transformers#40796)."""
    folder = make_toy_model(tmp_path)
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    draft = fresh_draft(folder, draft_vocab_size=24)
    module = import_module(
        f"transformers.models.{model_type.removesuffix('_text')}.modeling_{model_type.removesuffix('_text')}"
    )
    [kind] = {value for name, value in vars(module).items() if name.endswith("RMSNorm")}
    norm = kind(draft.config.hidden_size, eps=draft.config.rms_norm_eps)
    with torch.no_grad():
        norm.weight.copy_(read_target_tensor(folder, NORM))
        hidden = torch.randn(5, draft.config.hidden_size)
        torch.testing.assert_close(draft.norm(hidden), norm(hidden))


@pytest.mark.parametrize(
    ("model_type", "said", "scale"),
    [
        ("cohere", {"logit_scale": 0.0625}, 0.0625),
        ("granitemoehybrid", {"logits_scaling": 8.0}, 0.125),
        ("hyperclovax", {"logits_scaling": 0.25}, 0.25),
        ("minicpm", {"dim_model_base": 8}, 0.25),
        ("minicpm3", {"dim_model_base": None}, 1.0),
        ("llama", {"dim_model_base": 8, "logits_scaling": 8.0, "logit_scale": 0.5}, 1.0),
    ],
)
def test_a_fresh_drafts_logits_have_the_targets_scale(
    model_type: str, said: dict[str, object], scale: float, tmp_path: Path
) -> None:
    """Else a fresh draft is as sure of its guesses as a target would be at a sixteenth of the temperature."""
    folder = make_toy_model(tmp_path)
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type, **said}))
    draft = fresh_draft(folder, draft_vocab_size=24)
    torch.testing.assert_close(draft.norm.weight.detach(), read_target_tensor(folder, NORM).float() * scale)


def test_a_fresh_draft_is_reproducible_and_starts_from_the_targets_output_layer(model_dir: Path) -> None:
    state_before = torch.random.get_rng_state()
    draft, again, other = (fresh_draft(model_dir, draft_vocab_size=24, seed=seed, texts=["zzz"]) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state_before)
    for (name, weight), same in zip(draft.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(weight, same), name
        assert torch.isfinite(weight).all()
    assert not torch.equal(draft.fc.weight, other.fc.weight)
    assert torch.equal(draft.lm_head.weight, read_target_tensor(model_dir, "lm_head.weight")[draft.target_ids].float())
    assert torch.equal(draft.norm.weight, read_target_tensor(model_dir, "model.norm.weight").float())


def test_norms_are_switched_by_name_and_leave_the_random_weights_as_they_are(model_dir: Path) -> None:
    bare, normed = (fresh_draft(model_dir, draft_vocab_size=24, seed=1, switches=on) for on in ((), SWITCHES))
    assert not any(getattr(bare.config, name) for name in SWITCHES)
    assert all(getattr(normed.config, name) for name in SWITCHES)
    weights, of_bare = dict(normed.named_parameters()), dict(bare.named_parameters())
    norms = weights.keys() - of_bare.keys()
    assert norms == {"fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight", "input_norm.weight"}
    assert all(bool((weights[name] == 1).all()) for name in norms)
    assert all(torch.equal(weights[name], weight) for name, weight in of_bare.items() if name != "fc.weight")


@pytest.mark.parametrize("switch", ["fc_norm", "norm_before_fc"])
def test_fc_starts_small_only_where_it_reads_large_features(model_dir: Path, switch: str) -> None:
    bare, normed = (fresh_draft(model_dir, draft_vocab_size=24, seed=1, switches=on) for on in ((), (switch,)))
    assert torch.allclose(bare.fc.weight, 0.1 * normed.fc.weight)


def test_every_head_of_a_fresh_draft_looks_at_its_own_position(model_dir: Path) -> None:
    draft = fresh_draft(model_dir, draft_vocab_size=24, seed=1)
    scores: list[Tensor] = []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        scores.append(query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5)
        return torch.zeros_like(query)

    width = draft.config.hidden_size
    draft(torch.arange(8)[None], torch.randn(1, 8, width), torch.arange(20, 28)[None], attend)
    scores_HTT = scores[0][0]
    own_HT = scores_HTT.diagonal(dim1=-2, dim2=-1)
    others = scores_HTT[:, ~torch.eye(8, dtype=torch.bool)]
    assert 5 < own_HT.mean() < 12
    assert own_HT.mean() > 2 * others.abs().mean()


def test_a_type_that_is_no_text_is_an_unknown_one(tmp_path: Path) -> None:
    folder = make_toy_model(tmp_path / "toy")
    config = json.loads((folder / "config.json").read_text())
    known = fresh_draft(folder, seed=0, draft_vocab_size=16)
    for odd in ({}, [64]):
        (folder / "config.json").write_text(json.dumps({**config, "model_type": odd}))
        assert torch.equal(fresh_draft(folder, seed=0, draft_vocab_size=16).norm.weight, known.norm.weight)


def test_a_folder_without_a_model_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        fresh_draft(tmp_path, seed=0)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        count_tokens(tmp_path, ["a"], 10)
