"""Train EAGLE-3 heads with the code of `speculators` or `specforge`; runs in their environment, not in ours.

    python peer_trainers.py PROJECT FOLDER

`FOLDER` has `plan.json` (what `Plan` holds), `arm.json` (changes of the project's defaults), `vocabulary.safetensors`
(`d2t`, `t2d`) and `traces/N.safetensors`: `token_ids` [T] and the target's features `aux` [T, 3d]. What a trace lacks,
the target's last hidden states before and after its final norm, is computed here from the target, once. The project
makes a fresh head as its command does, learns from the plan's windows in their order, and saves it in `head`.
`answer.json` has the project's version and the CPU seconds of the steps.

Draft model, training-time test, loss, optimiser, schedule, clipping, collation and export are the project's. Ours are
the order of the batches and what lets the code run on a CPU (`_on_cpu`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

MAX_CONTEXT = 512
"""Positions before the first base of a window that serve as context: those of `TrainerConfig.max_context`."""


@dataclass(frozen=True)
class Plan:
    """The batches to learn: by step, windows (trace, first base, number of bases). Base b reads the feature of position
    b, and learns the distribution at b + 1, for the token at b + 2.
    """

    target: str
    seed: int
    steps: list[list[tuple[int, int, int]]]


@dataclass(frozen=True)
class Piece:
    """A window with its context: P positions. `is_base` [P]; `last_hidden` [P, d] is before the target's final norm."""

    token_ids: Tensor
    aux: Tensor
    last_hidden: Tensor
    normed_hidden: Tensor
    is_base: Tensor


def main() -> None:
    project, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    plan = Plan(**json.loads((folder / "plan.json").read_text()))
    _add_hidden_states(folder, plan.target)
    for name in ("head", "checkpoints"):
        shutil.rmtree(folder / name, ignore_errors=True)
    train = train_speculators if project == "speculators" else train_specforge
    seconds = train(folder, plan, json.loads((folder / "arm.json").read_text()))
    answer = {"version": version(project), "cpu_s": round(seconds, 2)}
    (folder / "answer.json").write_text(json.dumps(answer))


@torch.no_grad()
def _add_hidden_states(folder: Path, target: str) -> None:
    """Compute the target's last hidden states of all traces without them, in bfloat16, as the target is served."""
    missing = [
        path for path in (folder / "traces").glob("*.safetensors") if not (folder / "states" / path.name).exists()
    ]
    if not missing:
        return
    from transformers import AutoModelForCausalLM

    (folder / "states").mkdir(exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
    found: dict[str, Tensor] = {}

    def keep(_: object, inputs: tuple[Tensor], output: Tensor) -> None:
        found.update(last_hidden=inputs[0][0].clone(), normed_hidden=output[0].clone())

    model.model.norm.register_forward_hook(keep)
    for path in missing:
        model.model(load_file(path)["token_ids"][None])
        save_file(found, folder / "states" / path.name)


def _pieces(folder: Path, windows: list[tuple[int, int, int]]) -> list[Piece]:
    pieces = []
    for trace, first, count in windows:
        name = f"{trace}.safetensors"
        tensors = {**load_file(folder / "traces" / name), **load_file(folder / "states" / name)}
        start = max(first - MAX_CONTEXT, 0)
        kept = {key: tensor[start : first + count + 2] for key, tensor in tensors.items()}
        is_base = torch.zeros(len(kept["token_ids"]), dtype=torch.bool)
        is_base[first - start : first - start + count] = True
        pieces.append(Piece(**kept, is_base=is_base))
    return pieces


# -- speculators -------------------------------------------------------------------------------------------------------


class _Batches:
    """Batches for the trainer of `speculators`, by its own collation, packed without padding."""

    batch_sampler = None

    def __init__(self, folder: Path, plan: Plan, hidden_size: int) -> None:
        self._folder, self._plan, self._hidden_size = folder, plan, hidden_size

    def __len__(self) -> int:
        return len(self._plan.steps)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        from speculators.models.eagle3.data import shift_batch
        from speculators.train.data import CollateFn

        for windows in self._plan.steps:
            samples = [self._sample(piece) for piece in _pieces(self._folder, windows)]
            length = sum(len(sample["input_ids"]) - 1 for sample in samples)
            yield CollateFn(length, self._hidden_size, preprocess=shift_batch)(samples)

    def _sample(self, piece: Piece) -> dict[str, Tensor]:
        """As `ArrowDataset` returns it. Its mask is of the position whose distribution is learned."""
        length = len(piece.token_ids)
        return {
            "hidden_states": piece.aux,
            "input_ids": piece.token_ids,
            "verifier_last_hidden_states": piece.last_hidden,
            "loss_mask": piece.is_base.roll(1),
            "lengths": torch.tensor([length]),
            "position_ids": torch.arange(length),
        }


def train_speculators(folder: Path, plan: Plan, changes: dict[str, Any]) -> float:
    """Train and save a head as `speculators.train.cli.main` does; returns the CPU seconds of the steps."""
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train import trainer as module
    from speculators.train.checkpointer import convert_float_dtype, patch_config_dtype
    from speculators.train.cli import build_draft_model, set_seed
    from speculators.train.config import TrainConfig

    vocabulary = load_file(folder / "vocabulary.safetensors")
    said = {
        "speculator_type": "eagle3",
        "verifier_name_or_path": plan.target,
        "draft_vocab_size": len(vocabulary["d2t"]),
        "draft_attn_impl": "sdpa",
        "loss_implementation": "eager",
        "save_path": str(folder / "checkpoints"),
        "epochs": 1,
        "no_resume_from_checkpoint": True,
        "seed": plan.seed,
        # No logging: each logged step would wait for the accelerator.
        "log_freq": len(plan.steps) + 1,
        **changes,
    }
    settings = TrainConfig.from_sources(cli=said, argv=[])
    args = argparse.Namespace(**settings.flatten())
    set_seed(args.seed)
    t2d, d2t = vocabulary["t2d"], vocabulary["d2t"]
    model = build_draft_model(args, Eagle3DraftModel, t2d=t2d, d2t=d2t, draft_vocab_size=len(d2t))
    train_call_kwargs, _ = Eagle3DraftModel.get_trainer_kwargs(**vars(args))
    names = set(module.TrainerConfig._fields) & set(vars(args))
    config = module.TrainerConfig(
        **{name: getattr(args, name) for name in names if name != "hidden_states_dtype"},
        num_epochs=args.epochs,
        train_call_kwargs=train_call_kwargs,
        hidden_states_dtype=getattr(torch, args.hidden_states_dtype),
    )
    _on_cpu(module)
    batches = _Batches(folder, plan, model.config.transformer_layer_config.hidden_size)
    trainer = module.Trainer(model, config, batches)
    trainer.device_type = "cpu"
    started_s = time.process_time()
    trainer.train_epoch(0)
    seconds = time.process_time() - started_s
    head = folder / "head"
    model.save_pretrained(head, state_dict=convert_float_dtype(model.state_dict(), torch.bfloat16))
    patch_config_dtype(head / "config.json", torch.bfloat16)
    return seconds


def _on_cpu(module: Any) -> None:
    """Let the trainer of `speculators`, which moves everything to an accelerator and waits for it, run on the CPU."""
    module.get_local_rank = lambda: "cpu"
    torch.accelerator.synchronize = lambda *_: None


# -- specforge ---------------------------------------------------------------------------------------------------------


class _EagerLoss:
    """SpecForge's loss by its own reference implementation: its Triton kernel needs a GPU."""

    @staticmethod
    def apply(logits: Tensor, target_p: Tensor, position_mask: Tensor) -> Tensor:
        from specforge.core.loss import _compute_loss

        loss: Tensor = _compute_loss(logits, target_p, position_mask)
        return loss


def train_specforge(folder: Path, plan: Plan, changes: dict[str, Any]) -> float:
    """Train and export a head as SpecForge's offline EAGLE-3 script does; returns the CPU seconds of the steps."""
    from specforge.algorithms.eagle3 import model as module
    from specforge.algorithms.eagle3.data import normalize_offline_sample
    from specforge.config.schema import TrainingConfig
    from specforge.data.utils import DataCollatorWithPadding
    from specforge.export.to_sglang import export_to_sglang
    from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig
    from specforge.modeling.target.target_head import TargetHead
    from specforge.optimizer import BF16Optimizer
    from specforge.runtime.contracts import TrainBatch
    from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
    from specforge.training.controller import TrainerCore
    from specforge.training.strategies.base import Eagle3TrainStrategy, StepContext

    module.LogSoftmaxLoss = _EagerLoss
    settings = TrainingConfig(attention_backend="sdpa", fsdp_sharding="NO_SHARD", seed=plan.seed, **changes)
    vocabulary = load_file(folder / "vocabulary.safetensors")
    target = _indexed(folder, Path(plan.target))
    scratch = folder / "checkpoints"
    scratch.mkdir(parents=True)
    (scratch / "draft.json").write_text(json.dumps(_draft_config(Path(plan.target), len(vocabulary["d2t"]))))
    torch.manual_seed(settings.seed)
    draft = AutoDraftModel.from_config(
        AutoDraftModelConfig.from_file(str(scratch / "draft.json")),
        attention_backend=settings.attention_backend,
        torch_dtype=torch.bfloat16,
    )
    draft.load_state_dict(vocabulary, strict=False)
    with torch.no_grad():
        draft.load_embedding(str(target))
    draft.freeze_embedding()
    model = module.OnlineEagle3Model(
        draft_model=draft, length=settings.ttt_length, attention_backend=settings.attention_backend
    )
    backend = FSDPTrainingBackend(
        ParallelConfig.from_distributed(sharding_strategy=settings.fsdp_sharding),
        optimizer_factory=lambda module: BF16Optimizer(
            module,
            lr=settings.learning_rate,
            max_grad_norm=settings.max_grad_norm,
            warmup_ratio=settings.warmup_ratio,
            lr_scheduler=settings.lr_scheduler,
            total_steps=len(plan.steps),
        ),
    )
    backend.prepare_model(model, wrap=False, optimizer_target=draft)
    tied = "model.embed_tokens.weight" if _is_tied(Path(plan.target)) else "lm_head.weight"
    head = TargetHead.from_pretrained(str(target), lm_head_key=tied)
    core = TrainerCore(Eagle3TrainStrategy(model, target_head=head), backend)
    collate = DataCollatorWithPadding()
    seconds = 0.0
    for number, windows in enumerate(plan.steps):
        started_s = time.process_time()
        samples = [
            # SpecForge's mask marks the base, not the position whose distribution is learned.
            normalize_offline_sample(
                {
                    "aux_hidden_state": piece.aux[None],
                    "hidden_state": piece.normed_hidden[None],
                    "input_ids": piece.token_ids,
                    "loss_mask": piece.is_base.long(),
                },
                max_len=len(piece.token_ids),
            )
            for piece in _pieces(folder, windows)
        ]
        batch = TrainBatch([str(trace) for trace, _, _ in windows], "eagle3", collate(samples), _IS_HIDDEN)
        core.train_step(batch, StepContext(number, len(plan.steps)))
        seconds += time.process_time() - started_s
    trained = {name: each for name, each in draft.state_dict().items() if "embed" not in name}
    torch.save({"strategy": "eagle3", "draft_state_dict": trained}, scratch / "training_state.pt")  # noqa: TID251
    export_to_sglang(str(scratch), str(scratch / "draft.json"), str(folder / "head"))
    return seconds


_IS_HIDDEN = {"target_repr": "hidden_state"}


def _is_tied(target: Path) -> bool:
    return bool(json.loads((target / "config.json").read_text()).get("tie_word_embeddings"))


def _draft_config(target: Path, draft_vocab_size: int) -> dict[str, Any]:
    """A draft of the target's shape with one layer, as its examples have it."""
    said = json.loads((target / "config.json").read_text())
    names = (
        *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("vocab_size", "max_position_embeddings", "rms_norm_eps", "hidden_act", "rope_parameters"),
        *("rope_theta", "initializer_range"),
    )
    return {
        **{name: said[name] for name in names if name in said},
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "draft_vocab_size": draft_vocab_size,
    }


def _indexed(folder: Path, target: Path) -> Path:
    """A folder with the target and an index of its weights, which SpecForge needs."""
    copy = folder / "target"
    if not copy.exists():
        from safetensors import safe_open

        copy.mkdir()
        weight_map = {}
        for path in target.iterdir():
            os.symlink(path.resolve(), copy / path.name)
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt") as file:
                    weight_map.update(dict.fromkeys(file.keys(), path.name))
        index = copy / "model.safetensors.index.json"
        if not index.exists():
            index.write_text(json.dumps({"weight_map": weight_map}))
    return copy


if __name__ == "__main__":
    main()
