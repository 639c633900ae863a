"""The target model over a KV cache of slots, with the three features that the draft reads, and its weight updates.

Models that `serving.local.target.forward` supports run through it; every other one runs through Hugging Face's own
modelling code. New weights are staged in a second copy and then copied over those in service: the copy goes through the
same fusing and packing, so its tensors correspond one by one to those that the passes read.

Shape letters: B batch, T new tokens, M positions, d hidden size, V vocabulary, K kept tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from serving.local.kernels.build import found_kernels
from serving.local.kernels.layers import KernelLinear, PanelSlots, move_to_huge_pages
from serving.local.kernels.library import Kernels
from serving.local.target.forward import STRETCHING, Decoder, KernelDecoder, RMSNorm, fits_kernels, fuse, fusible
from serving.local.target.layers import KVSlots, Parents, Replaced, SlotWindow, pack_linears
from serving.local.target.loading import load_model
from serving.target import read_layout, read_weights
from speculator.draft.eagle3 import aux_layer_ids
from speculator.errors import ConfigError, TargetError
from speculator.target_folder import output_scale, reason_of

log = structlog.get_logger(__name__)
_ATTENTION = "slipstream_slots"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Arguments of Hugging Face's attention interface that change its result: capped scores, sinks, biases."""
_MOST_APART = 0.05
"""Of logits in `_check_pass`, relative to their norm: more than bfloat16 rounds, less than a wrong factor."""
StagedTarget = list[Tensor]
"""Verified weights, in the order of `all_tensors`."""


def _slot_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention for Hugging Face's attention interface; kwargs have the pass's cache and window.

    Raises ConfigError for attention of another kind: `_check_pass` finds that before a request does.
    """
    window: SlotWindow | None = kwargs.get("slot_window")
    layer: int = module.layer_idx  # type: ignore[assignment]
    if window is None or attention_mask is not None or any(kwargs.get(name) is not None for name in _UNSUPPORTED):
        raise ConfigError(f"{type(module).__name__} is no plain attention")
    window.num_layers_read += 1
    out = window.attend(kwargs["slot_cache"], layer, query, key, value, kwargs.get("scaling"))
    return out.transpose(1, 2), None


def _no_mask(*_args: object, **_kwargs: object) -> None:
    """No mask from Hugging Face: `SlotWindow` makes it."""


ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _slot_attention)


ALL_MASK_ATTENTION_FUNCTIONS.register(_ATTENTION, _no_mask)


class Target:
    """A causal language model, frozen but for `install`, with `num_slots` × `context_length` positions of cache.

    `fused=False` uses Hugging Face's modelling and oneDNN instead of our pass and kernels, as the reference in tests.
    Raises ConfigError when the directory holds no model that this engine can run.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        num_slots: int,
        context_length: int,
        cache_margin: int,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        fused: bool = True,
    ) -> None:
        _check_device(device)
        model = load_model(model_dir, dtype=dtype, attn_implementation=_ATTENTION)
        self.model = model.eval().requires_grad_(False).to(device)
        self._is_fused = fused and fusible(self.model)
        uses_kernels = self._is_fused and device == "cpu" and fits_kernels(self.model)
        kernels = found_kernels() if uses_kernels else None
        self._pack = partial(pack_linears, kernels=kernels) if device == "cpu" else None
        self._layout = read_layout(model_dir)
        config = self.model.config
        self.config: dict[str, Any] = config.to_dict()
        # A sliding window of all layers limits the context, so that it never slides.
        window = None if getattr(config, "layer_types", None) else getattr(config, "sliding_window", None)
        self.context_length = min(context_length, config.max_position_embeddings, window or context_length)
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type") in STRETCHING:
            # One text that is longer would rotate all others in its batch otherwise, and its own keys anew.
            unstretched = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            self.context_length = min(self.context_length, unstretched - cache_margin)
        self.embed: Tensor = self.model.get_input_embeddings().weight.detach()
        self.device = self.embed.device
        num_layers = len(self.model.model.layers)
        aux_layers = aux_layer_ids(num_layers)
        self._fuse_and_pack(self.model)
        if kernels is not None:
            move_to_huge_pages([module for module in self.model.modules() if isinstance(module, KernelLinear)])
        self._tensors = list(all_tensors(self.model))
        sizes: dict[str, int] = {
            "num_layers": num_layers,
            "num_slots": num_slots,
            "num_heads": config.num_key_value_heads,
            "length": self.context_length + cache_margin,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        }
        self.cache: KVSlots | PanelSlots
        self._run: KernelDecoder | Decoder | _HuggingFaceDecoder
        if kernels is not None:
            self.cache = PanelSlots(**sizes)
            self._run = KernelDecoder(self.model, aux_layers, kernels, self.cache)
        else:
            self.cache = KVSlots(**sizes, like=self.embed)
            self._run = (Decoder if self._is_fused else _HuggingFaceDecoder)(self.model, aux_layers, self.cache)
        self.ranking = Ranking(kernels)
        self._scale = output_scale(self.config)
        self._cap: float | None = getattr(config, "final_logit_softcapping", None)
        if isinstance(self._run, _HuggingFaceDecoder):
            self._check_pass(model_dir)

    def _check_pass(self, model_dir: Path) -> None:
        """Raise ConfigError unless our attention and logits are the model's own, by a pass of two tokens."""
        num_layers = len(self.model.model.layers)
        try:
            with torch.inference_mode():
                logits = self.logits(self.forward([[0, 0]], first_slot=0, starts=[0])[0]).float()
                window = SlotWindow(0, [0], 2, self.embed, [None])
                states = {"position_ids": window.positions_BT, "slot_window": window, "slot_cache": self.cache}
                tokens_12 = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
                own = self.model(input_ids=tokens_12, use_cache=False, **states).logits[0].float()
            if window.num_layers_read != num_layers:
                raise ConfigError(f"{window.num_layers_read} attentions in {num_layers} layers")
            if float((logits - own).norm()) > _MOST_APART * float(own.norm()):
                raise ConfigError("its output layer is no plain product")
        except Exception as error:  # any model's code may fail in any way without its own cache and attention
            raise ConfigError(
                f"{model_dir}: the local engine runs Llama-like models with full attention only "
                f"({reason_of(error)}); check --model"
            ) from error

    def _fuse_and_pack(self, model: Any) -> None:
        """Fuse and pack the weights that the passes read."""
        if self._is_fused:
            fuse(model)
        if self._pack is not None:
            self._pack(model)

    @property
    def takes_windows(self) -> bool:
        """Whether the rows of a pass may differ in length, for this model on this machine."""
        return isinstance(self._run, KernelDecoder)

    def forward(
        self,
        rows: Sequence[Sequence[int]],
        *,
        first_slot: int,
        starts: Sequence[int],
        parents: Sequence[Parents] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Process new tokens, M in all: a row for each slot from `first_slot` on, whose caches hold `starts` positions.

        `parents`: for rows whose tokens are a tree. After it, call `cache.keep_path` with the accepted path.
        Returns the final hidden states [M, d] (ready for `logits`) and the features [M, 3d].
        """
        parents = parents or [None] * len(rows)
        if isinstance(self._run, KernelDecoder):
            return self._run(rows, first_slot, starts, parents)
        tokens_BT = torch.tensor(rows, device=self.device)
        window = SlotWindow(first_slot, starts, tokens_BT.shape[1], self.embed, parents)
        return self._run(tokens_BT, window)

    def stage(self, folder: Path) -> StagedTarget:
        """Read new weights, fused and packed like those in service; for any thread. Raises TargetError."""
        model = bare_copy(self.model, read_weights(folder, self._layout), self.embed.dtype)
        self._fuse_and_pack(model)
        return list(all_tensors(model))

    def install(self, staged: StagedTarget) -> None:
        """Copy staged weights over those in service, in place. After a failure half-way the target is unusable."""
        with torch.no_grad():
            for place, tensor in zip(self._tensors, staged, strict=True):
                assert place.shape == tensor.shape, "the staged copy was made like the target"
                place.copy_(tensor)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., d] → [..., V]."""
        logits: Tensor = self.model.lm_head(hidden)
        if self._scale != 1:
            logits = logits * self._scale
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)


class _HuggingFaceDecoder:
    """The model's own forward pass with our attention; hooks keep the inputs of the aux layers."""

    def __init__(self, model: Any, aux_layers: tuple[int, ...], cache: KVSlots) -> None:
        log.info("the target runs through Hugging Face modelling", layers=type(model.model.layers[0]).__name__)
        self._decoder, self._cache = model.model, cache
        self._aux: dict[int, Tensor] = {}
        for index in aux_layers:
            hook = partial(self._keep_input, index)
            model.model.layers[index].register_forward_pre_hook(hook, with_kwargs=True)

    def _keep_input(self, index: int, _: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        self._aux[index] = args[0] if args else kwargs["hidden_states"]

    def __call__(self, tokens_BT: Tensor, window: SlotWindow) -> tuple[Tensor, Tensor]:
        hidden_BTd = self._decoder(
            input_ids=tokens_BT,
            position_ids=window.positions_BT,
            use_cache=False,
            slot_window=window,
            slot_cache=self._cache,
        ).last_hidden_state
        aux_BTw = torch.cat([self._aux[index] for index in sorted(self._aux)], -1)
        return hidden_BTd.flatten(0, 1), aux_BTw.flatten(0, 1)


def _check_device(name: str) -> None:
    try:
        torch.zeros(1, device=name).tolist()
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"--device {name} cannot be used ({reason_of(error)}): give cpu, or cuda where PyTorch finds a GPU"
        ) from error


class Ranking:
    """Argmax and top-k over a vocabulary; for any thread. With the kernels a tenth of PyTorch's time, which is 0.1 ms a
    position for argmax and three times that for top-k (benchmarks/results/step.md).
    """

    def __init__(self, kernels: Kernels | None) -> None:
        self._kernels = kernels

    def likeliest(self, logits_MV: Tensor) -> list[int]:
        """Argmax of each position, the first of equal ones."""
        # Not argmax: on CPU it is six times slower in bfloat16.
        ids_M = logits_MV.max(-1).indices if self._kernels is None else self._kernels.likeliest(logits_MV)
        ids: list[int] = ids_M.tolist()
        return ids

    def top(self, logits_MV: Tensor, num_kept: int) -> tuple[np.ndarray, np.ndarray]:
        """Top-k of each position as a trace has it: int32 ids and float16 log-probabilities [M, K], likeliest first."""
        if self._kernels is not None:
            ids_MK, logprobs_MK = self._kernels.rank(logits_MV, num_kept)
            return ids_MK.numpy(), logprobs_MK.half().numpy()
        wide = torch.float64 if logits_MV.dtype == torch.float64 else torch.float32
        best = logits_MV.log_softmax(-1, dtype=wide).topk(num_kept, -1)
        return best.indices.int().cpu().numpy(), best.values.half().cpu().numpy()


def all_tensors(model: Any) -> Iterator[Tensor]:
    """All tensors that the passes read and that derive from the weights, in a fixed order."""
    for module in model.modules():
        if isinstance(module, Replaced):
            yield from module.parts
        elif isinstance(module, RMSNorm):
            yield from module.derived
    yield from model.state_dict().values()


def bare_copy(model: Any, weights: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """A model of the same class over these weights, on the CPU. It cannot run: it lacks tables that are not weights.
    Raises TargetError where the class has other tensors than the file.
    """
    with torch.device("meta"):
        bare = type(model)(model.config).to(dtype)
    found = bare.load_state_dict(
        {name: tensor.to(dtype) for name, tensor in weights.items()}, strict=False, assign=True
    )
    bare.tie_weights()
    missing = [name for name, parameter in bare.named_parameters() if parameter.is_meta]
    if missing or found.unexpected_keys:
        raise TargetError(f"the file's tensor names do not match those of {type(model).__name__}")
    return bare.eval().requires_grad_(False)
