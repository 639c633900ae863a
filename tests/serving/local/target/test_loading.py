"""What transformers reports about a model's tensors, or would find out at the first request, is a refusal by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from serving.local.target.loading import check_known_model, check_model, load_model, load_tokenizer
from serving.local.target.model import Target
from slipstream.doctor import machine
from slipstream.models import checked_fingerprint
from speculator.draft.checkpoint import is_finite
from speculator.errors import ConfigError
from speculator.versions.store import DraftStore
from tests.fixtures.toy import make_toy_model

UP = "model.layers.3.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "target")


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def configure(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def doctor_for_sglang(folder: Path) -> None:
    list(machine.check_model(str(folder), local=False))


def load(folder: Path) -> torch.nn.Module:
    return load_model(folder, dtype=torch.float32, attn_implementation="eager")  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda weights: weights.pop(UP), f"{UP} is missing"),
        (lambda weights: weights.update({UP: torch.zeros(3, 3)}), rf"{UP} \(3, 3\) instead of \(64, 32\)"),
        (lambda weights: weights.update({"more.weight": torch.zeros(3)}), r"more\.weight is not part"),
        (lambda weights: weights.update({"lm_head.weight": torch.zeros(46, 32)}), r"lm_head\.weight"),
        (lambda weights: weights.update({f"{UP}_scale": weights.pop(UP)}), "is missing"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    folder: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], object], says: str
) -> None:
    edit(folder, change)
    for command in (check_model, check_known_model, load, doctor_for_sglang):
        with pytest.raises(ConfigError, match=says):
            command(folder)
    with pytest.raises(ConfigError, match=says):
        checked_fingerprint(folder, DraftStore(tmp_path / "drafts"))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"tie_word_embeddings": False}, r"lm_head\.weight"),
        ({"attention_bias": True}, r"bias and \d+ more is missing"),
        ({"num_hidden_layers": 9}, r"model\.layers\.8\."),
        ({"num_hidden_layers": 7}, r"model\.layers\.7\..* is not part"),
        ({"intermediate_size": 10**7}, r"mlp\.\w+\.weight"),
    ],
)
def test_a_config_that_promises_other_tensors_is_refused(folder: Path, values: dict[str, object], says: str) -> None:
    configure(folder, **values)
    for command in (check_model, load):
        with pytest.raises(ConfigError, match=says):
            command(folder)


def test_what_a_model_may_lack_or_have_beside_is_let_be(folder: Path) -> None:
    edit(folder, lambda weights: weights.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    check_model(folder)
    load(folder)
    edit(folder, lambda weights: weights.update({"lm_head.weight": torch.randn(47, 32)}))
    configure(folder, tie_word_embeddings=False)
    check_model(folder)
    assert not torch.equal(load(folder).lm_head.weight, load(folder).model.embed_tokens.weight)  # type: ignore[union-attr]


def test_weights_that_are_no_numbers_are_named(folder: Path) -> None:
    edit(folder, lambda weights: weights[UP].view(-1)[5:6].fill_(float("nan")))
    with pytest.raises(ConfigError, match=rf"{UP} is not finite"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_one_number_that_is_not_finite_is_found(dtype: torch.dtype) -> None:
    for shape in ((), (0, 3), (5, 7)):
        assert is_finite(torch.ones(shape).to(dtype))
    for number in ("nan", "inf", "-inf"):
        numbers = torch.ones(5, 7)
        numbers[3, 2] = float(number)
        assert not is_finite(numbers.to(dtype))
        assert not is_finite(torch.tensor(float(number)).to(dtype))


@pytest.mark.parametrize("device", ["cuda:99", "cud", "meta"])
def test_a_device_that_is_not_there_is_named(folder: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=f"--device {device} cannot be used") as refused:
        Target(folder, num_slots=1, context_length=8, cache_margin=1, device=device)
    assert "\n" not in str(refused.value)


def test_a_quantised_model_is_refused_and_sglangs_affair(folder: Path) -> None:
    configure(folder, quantization_config={"quant_method": "awq", "bits": 4})
    edit(folder, lambda weights: weights.pop(UP))
    check_known_model(folder)
    with pytest.raises(ConfigError, match="quantised"):
        check_model(folder)


def test_a_tokenizer_of_another_model_is_refused(folder: Path) -> None:
    assert load_tokenizer(folder, vocab_size=47).encode("a")
    with pytest.raises(ConfigError, match="token id 46, vocab_size is 40"):
        load_tokenizer(folder, vocab_size=40)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    strips = {"type": "Strip", "content": " ", "start": 0, "stop": 1}
    inner = {"type": "Sequence", "decoders": [{"type": "Fuse"}, strips]}
    for decoder in (strips, inner, {"type": "Sequence", "decoders": [inner]}):
        (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, "decoder": decoder}))
        with pytest.raises(ConfigError, match="set stop to 0"):
            load_tokenizer(folder, vocab_size=47)
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, "decoder": {**strips, "start": 1, "stop": 0}}))
    load_tokenizer(folder, vocab_size=47)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}")
    with pytest.raises(ConfigError, match="chat template is broken"):
        load_tokenizer(folder, vocab_size=47)
    (folder / "tokenizer.json").write_text('{"model": {"type": "Nobody"}}')
    with pytest.raises(ConfigError, match=str(folder)):
        load_tokenizer(folder, vocab_size=47)
