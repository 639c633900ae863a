"""Model folders with one thing broken: each serves as it should, or is refused in one line that names the folder."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from serving.local.target.loading import load_tokenizer
from serving.local.target.model import Target
from slipstream.doctor.machine import check_model
from slipstream.models import check_target, checked_fingerprint, resolve_model
from speculator.draft.checkpoint import target_fingerprint
from speculator.draft.initialization import fresh_draft
from speculator.errors import ConfigError, DraftError
from speculator.versions.store import DraftStore
from tests.fixtures.toy import make_toy_model
from tests.hostile.judge import Choose, FailureError, Inputs, Outcome, garbled

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_NOBODY = 65534
_ODD: tuple[Any, ...] = (
    *(None, "576", "", "x" * 5000, [], {}, [64]),
    *(0, -1, 1, 7, 0.5, True, 10**7, 10**12, 10**30, 1e400),
)
_FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "rope_theta"),
    *("rope_scaling", "partial_rotary_factor", "tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act"),
    *("architectures", "model_type", "dtype", "torch_dtype", "quantization_config", "auto_map", "sliding_window"),
    *("layer_types", "eos_token_id", "bos_token_id", "pad_token_id", "attention_dropout", "initializer_range"),
)
_MEANT: tuple[dict[str, Any], ...] = (
    {"model_type": "nobody_knows"},
    {"model_type": "bert"},
    {"model_type": "llava"},
    {"architectures": ["Evil"], "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}},
    {"quantization_config": {"quant_method": "awq", "bits": 4}},
    {"quantization_config": {"quant_method": "fp8"}},
    {"quantization_config": {"quant_method": "nobody_knows"}},
    {"rope_scaling": {"rope_type": "nobody_knows"}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": "x"}},
    {"rope_parameters": {"rope_type": "llama3"}},
    {"hidden_act": "nobody_knows"},
    {"dtype": "float7"},
    {"layer_types": ["sliding_attention"] * 8, "sliding_window": 16},
    {"tie_word_embeddings": False},
    {"max_position_embeddings": 2048},
    {"eos_token_id": [2, 2, -5, 10**9]},
    {"eos_token_id": {"a": 1}},
    {"num_attention_heads": 3},
    {"num_key_value_heads": 3},
    {"attention_bias": True},
)


class ModelFolders:
    """Copies of one whole folder, each broken in a way that is drawn."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._whole = make_toy_model(folder / "whole")
        self._other = make_toy_model(folder / "other", seed=1, hidden_size=64)
        self._number = 0
        # Folders of tests and of temporary files are their owner's alone.
        for place in (folder, folder.parent, self._whole, *self._whole.iterdir(), *self._other.iterdir()):
            place.chmod(0o755)

    def inputs(self, choose: Choose, count: int) -> Inputs:
        for number in range(count):
            what, path = self.broken(choose)
            yield f"{number} {what}", partial(attempt, path)

    def broken(self, choose: Choose) -> tuple[str, Path]:
        """What was done, and the folder to which."""
        shutil.rmtree(self._folder / f"{self._number}", ignore_errors=True)
        self._number += 1
        path = shutil.copytree(self._whole, self._folder / f"{self._number}")
        common = (_config_field, _config_field, _tensors, _tensors)
        ways = (*common, _garble, _config_meant, _nested, _tokenizer, _odd_file, self._swap)
        return ways[choose(len(ways))](path, choose), path

    def _swap(self, path: Path, choose: Choose) -> str:
        """A file of another model."""
        name = (WEIGHTS, CONFIG, "generation_config.json")[choose(3)]
        shutil.copy(self._other / name, path / name)
        return f"another's {name}"


def attempt(path: Path, window: int = 48) -> Outcome:
    """What the commands do with a target: doctor, train, drafts init and serve. Returns the refusal, or "served"."""
    with _unprivileged(path):
        refusals = {
            "doctor": _refusal(path, lambda: list(check_model(str(path), local=True))),
            "train": _refusal(path, lambda: checked_fingerprint(resolve_model(str(path)), DraftStore(path / "none"))),
            "init": _refusal(path, lambda: (check_target(path), fresh_draft(path, seed=0, texts=["a text"]))),
            "serve": _refusal(path, lambda: _serve(path, window)),
        }
    doctor, serve = refusals["doctor"], refusals["serve"]
    if doctor and not serve:
        raise FailureError(f"doctor refuses what is served: {doctor}")
    if serve and not doctor and "finite" not in serve:
        raise FailureError(f"doctor finds nothing, serve does: {serve}")
    if refusals["train"] and not serve:
        raise FailureError(f"train refuses what is served: {refusals['train']}")
    return "refused" if serve else "served"


def _serve(path: Path, window: int) -> None:
    model_dir = resolve_model(str(path))
    target_fingerprint(model_dir)
    target = Target(model_dir, num_slots=1, context_length=window, cache_margin=8, dtype=torch.float32)
    ids = load_tokenizer(model_dir, vocab_size=target.embed.shape[0]).encode("hello")
    draft = fresh_draft(model_dir, seed=0)
    if draft.config.max_position_embeddings < target.context_length:
        raise FailureError("the draft's window is smaller than the target's")
    hidden, features = target.forward([ids], first_slot=0, starts=[0])
    if not bool(torch.isfinite(target.logits(hidden)).all()):
        raise FailureError("the target computes what is no number")
    draft.fuse(features.float())


def _refusal(path: Path, command: Callable[[], object]) -> str:
    """What the command line would print; anything else is what nobody meant to raise."""
    try:
        command()
    except (ConfigError, DraftError) as error:
        text = str(error)
        if "\n" in text or len(text) > 1000:
            raise FailureError(f"more than a line: {text}") from error
        return text
    return ""


@contextlib.contextmanager
def _unprivileged(path: Path) -> Iterator[None]:
    """Where a permission was taken away, which root does not need."""
    is_locked = any(not stat.S_IMODE(each.lstat().st_mode) for each in (path, *path.iterdir()))
    if os.geteuid() != 0 or not is_locked:
        yield
        return
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def _files(path: Path) -> list[Path]:
    return sorted(path.iterdir())


def _garble(path: Path, choose: Choose) -> str:
    file = _files(path)[choose(len(_files(path)))]
    data = file.read_bytes()
    way = choose(5)
    if way == 0:
        file.unlink()
    else:
        # In the header of weights, where a few bytes matter.
        changed = (garbled(data, choose, head=8192), data[: choose(len(data))], b"", bytes(range(64)) + data)[way - 1]
        file.write_bytes(changed)
    return f"{file.name}: {('gone', 'a few bytes', 'cut', 'empty', 'bytes before it')[way]}"


def _change(path: Path, change: dict[str, Any], name: str = CONFIG) -> None:
    values = json.loads((path / name).read_bytes())
    (path / name).write_text(json.dumps({**values, **change}))


def _config_field(path: Path, choose: Choose) -> str:
    field, value = _FIELDS[choose(len(_FIELDS))], _ODD[choose(len(_ODD))]
    name = CONFIG if choose(8) or not field.endswith("token_id") else "generation_config.json"
    _change(path, {field: value}, name)
    return f"{name}: {field} {str(value)[:20]!r}"


def _config_meant(path: Path, choose: Choose) -> str:
    change = _MEANT[choose(len(_MEANT))]
    _change(path, change)
    return str(change)


def _nested(path: Path, choose: Choose) -> str:
    values = json.loads((path / CONFIG).read_bytes())
    if way := choose(3):
        values = {"model_type": values["model_type"], "text_config": values} if way == 1 else {"text_config": values}
    else:
        values = [values]
    (path / CONFIG).write_text(json.dumps(values))
    return f"config.json nested, {way}"


def _tensors(path: Path, choose: Choose) -> str:
    weights = load_file(path / WEIGHTS)
    name = sorted(weights)[choose(len(weights))]
    tensor, way = weights[name], choose(9)
    match way:
        case 0:
            del weights[name]
        case 1:
            weights[f"{name}.old"] = weights.pop(name)
        case 2:
            weights[name] = tensor[:-1].contiguous()
        case 3:
            weights[name] = tensor[None].contiguous()
        case 4:
            weights[name] = tensor.to((torch.int8, torch.bool, torch.float16, torch.float64)[choose(4)])
        case 5:
            tensor.view(-1)[0] = (float("nan"), float("inf"))[choose(2)]
        case 6:
            weights["more.weight"] = torch.zeros(2, 2)
        case 7:
            weights["lm_head.weight"] = torch.randn(46 + choose(2), 32)
        case _:
            weights = {each.removeprefix("model."): tensor for each, tensor in weights.items()}
    save_file(weights, path / WEIGHTS, {"format": "pt"})
    return f"tensor {name}, way {way}"


def _tokenizer(path: Path, choose: Choose) -> str:
    file = path / "tokenizer.json"
    values = json.loads(file.read_bytes())
    way = choose(6)
    if way == 0:
        values["model"]["vocab"]["more"] = 10**6
    elif way == 1:
        values["model"]["vocab"] = {}
    elif way == 2:
        values["model"]["type"] = "Nobody"
    elif way == 3:
        del values["model"]
    elif way == 4:
        _change(path, {"tokenizer_class": "NobodyTokenizer"}, "tokenizer_config.json")
    else:
        (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] ")
    file.write_text(json.dumps(values))
    return f"tokenizer, way {way}"


def _odd_file(path: Path, choose: Choose) -> str:
    file = _files(path)[choose(len(_files(path)))]
    way = ("folder without permission", "no permission", "folder", "link to itself", "pipe", "index beside")[choose(6)]
    if "permission" in way:
        (path if way.startswith("folder") else file).chmod(0)
        return f"{file.name}: {way}"
    file.unlink()
    match way:
        case "folder":
            file.mkdir()
        case "link to itself":
            file.symlink_to(file)
        case "pipe":
            os.mkfifo(file)
        case _:
            place = ("../x.safetensors", "a.safetensors", "/dev/zero")[choose(3)]
            index = json.dumps({"weight_map": {"model.norm.weight": place}})
            (path / "model.safetensors.index.json").write_text(index)
    return f"{file.name}: {way}"
