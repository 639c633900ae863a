"""What `speculators` and `specforge` do with EAGLE-3 heads, by their own code; runs in their environment, not in ours.

    python peer_heads.py PROJECT FOLDER

`FOLDER` has `jobs.json` and `inputs.safetensors`: the target's features `aux` [T, 3d], and `tokens` [T + steps], of
which row t of step s reads `tokens[t + 1 + s]`. Each job either loads a head with the project's own loader or first
makes one and saves it with the project's own routine. It answers with the logits [steps, T, D] of the project's own
training-time test, in float32, in `<name>.safetensors`, and with what went wrong, if anything did, in `answers.json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

STEPS = 3


def main() -> None:
    project, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    peer: Speculators | Specforge = Speculators() if project == "speculators" else Specforge()
    inputs = load_file(folder / "inputs.safetensors")
    answers: dict[str, Any] = {"version": version(project), "errors": {}, "left_out": {}}
    for job in json.loads((folder / "jobs.json").read_text()):
        try:
            if job["makes"]:
                peer.make(job, {} if job["is_whole"] else load_file(folder / "vocabulary.safetensors"))
            logits, left_out = peer.logits(Path(job["head"]), inputs)
        except Exception as error:
            answers["errors"][job["name"]] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            continue
        if left_out:
            answers["left_out"][job["name"]] = left_out
        save_file({"logits": logits}, folder / f"{job['name']}.safetensors")
    (folder / "answers.json").write_text(json.dumps(answers))


def randomize(parameters: Iterable[Tensor], seed: int) -> None:
    """A fresh head's norms are all one, and hide which of them is applied."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        noise = torch.randn(parameter.shape, generator=generator)
        # Weights that bfloat16 holds: what is saved in it is what is compared.
        scale, offset = (0.3, 1.0) if parameter.ndim == 1 else (parameter.shape[-1] ** -0.5, 0.0)
        parameter.data.copy_((noise * scale + offset).bfloat16())


class Speculators:
    def make(self, job: dict[str, Any], vocabulary: dict[str, Tensor]) -> None:
        """As its training command builds a model, and as its checkpointer saves one.

        `vocabulary` has `d2t` and `t2d`, or nothing for the target's whole one.
        """
        from speculators.models.eagle3 import Eagle3DraftModel
        from speculators.train.checkpointer import convert_float_dtype, patch_config_dtype
        from speculators.train.cli import create_transformer_layer_config

        layer = create_transformer_layer_config(
            verifier_name_or_path=job["target"],
            num_layers=1,
            draft_arch="llama",
            hidden_act=None,
            sliding_window=2048,
            full_attention_indices=[] if job["is_windowed"] else [0],
        )
        switches = {name: name in job["switches"] for name in job["all_switches"]}
        model = Eagle3DraftModel.from_training_args(
            layer,
            t2d=vocabulary.get("t2d"),
            d2t=vocabulary.get("d2t"),
            **switches,
            draft_attn_impl="eager",
            draft_vocab_size=len(vocabulary["d2t"]) if vocabulary else layer.vocab_size,
            ttt_steps=STEPS,
            verifier_name_or_path=job["target"],
        )
        frozen = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")
        randomize([each for name, each in model.named_parameters() if name not in frozen], job["seed"])
        model.save_pretrained(job["head"], state_dict=convert_float_dtype(model.state_dict(), torch.bfloat16))
        patch_config_dtype(Path(job["head"]) / "config.json", torch.bfloat16)

    @torch.no_grad()
    def logits(self, head: Path, inputs: dict[str, Tensor]) -> tuple[Tensor, list[str]]:
        from speculators import SpeculatorModel
        from speculators.models.eagle3 import Eagle3SpeculatorConfig

        config = Eagle3SpeculatorConfig.from_pretrained(head)
        config.transformer_layer_config._attn_implementation = "eager"
        model = SpeculatorModel.from_pretrained(head, config=config, dtype=torch.float32).float().eval()
        steps: list[Tensor] = []
        model.lm_head.register_forward_hook(lambda _, __, logits: steps.append(logits[0]))
        count = len(inputs["aux"])
        model(
            hidden_states=inputs["aux"][None],
            input_ids=inputs["tokens"][None, 1 : count + 1],
            document_ids=torch.zeros(1, count, dtype=torch.int64),
            ttt_steps=STEPS,
        )
        return torch.stack(steps), []


class Specforge:
    def make(self, job: dict[str, Any], vocabulary: dict[str, Tensor]) -> None:
        """As its export to SGLang writes a training checkpoint."""
        from specforge.export.to_sglang import export_to_sglang
        from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig

        head = Path(job["head"])
        target = json.loads((Path(job["target"]) / "config.json").read_text())
        names = (
            *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
            *("vocab_size", "max_position_embeddings", "rms_norm_eps", "hidden_act", "rope_parameters"),
        )
        config = {name: target[name] for name in names if name in target}
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
        config |= {"tie_word_embeddings": False, "pad_token_id": 0}
        if vocabulary:
            config["draft_vocab_size"] = len(vocabulary["d2t"])
        config |= dict.fromkeys(job["switches"], True)
        scratch = head.with_name(f"{head.name}-training")
        scratch.mkdir()
        (scratch / "draft.json").write_text(json.dumps(config))
        model = AutoDraftModel.from_config(AutoDraftModelConfig.from_file(str(scratch / "draft.json")))
        randomize(model.parameters(), job["seed"])
        model.load_state_dict(vocabulary, strict=False)
        trained = {name: each for name, each in model.state_dict().items() if "embed" not in name}
        # Its export reads nothing else.
        torch.save({"strategy": "eagle3", "draft_state_dict": trained}, scratch / "training_state.pt")  # noqa: TID251
        export_to_sglang(str(scratch), str(scratch / "draft.json"), str(head))

    @torch.no_grad()
    def logits(self, head: Path, inputs: dict[str, Tensor]) -> tuple[Tensor, list[str]]:
        """Its trainer's steps (`algorithms/eagle3/model.py`); what its loader leaves out of the file."""
        from specforge.modeling.auto import AutoDraftModel

        loaded, report = AutoDraftModel.from_pretrained(head, torch_dtype=torch.float32, output_loading_info=True)
        # With the transformers that it asks for, its loader leaves the rotary tables, which no file has, as they come.
        model = AutoDraftModel.from_config(loaded.config).float().eval()
        model.load_state_dict({**loaded.state_dict(), "embed_tokens.weight": inputs["embedding"]})
        count = len(inputs["aux"])
        hidden = model.project_hidden_states(inputs["aux"][None])
        mask = model.prepare_decoder_attention_mask(torch.ones(1, count, dtype=torch.bool), hidden, 1, count, 0)
        cache: list[list[Tensor]] = [[], []]
        steps = []
        for step in range(STEPS):
            hidden = model.backbone(
                input_embeds=model.embed_input_ids(inputs["tokens"][None, 1 + step : count + 1 + step]),
                hidden_states=hidden,
                cache_hidden=cache,
                attention_mask=mask,
                position_ids=torch.arange(count)[None],
                past_key_values=None,
            )
            steps.append(model.compute_logits(hidden)[0])
        return torch.stack(steps), sorted(report["unexpected_keys"])


if __name__ == "__main__":
    main()
