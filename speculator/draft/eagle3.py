"""The EAGLE-3 draft network in plain PyTorch: one decoder layer over target features, with a small vocabulary.

The same layer serves training, drafting and replay; only the attention differs, so callers pass it in as `attend`.
Structure and parameter names follow SGLang's `LlamaForCausalLMEagle3` (EAGLE-3, arXiv 2503.01840, section 3), with the
norms that EAGLE-3.1 adds there, and the residual of `speculators` (vLLM) heads.

Shape letters: B batch, T tokens, d hidden size, V target vocabulary, D draft vocabulary, H query heads, G key heads,
h head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speculator.errors import DraftMismatchError
from speculator.target_folder import context_length, rope_of

# (query [B, H, T, h], key [B, G, T, h], value [B, G, T, h]) -> [B, H, T, h]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
NUM_AUX_LAYERS = 3


def aux_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """The target layers whose *inputs* the draft sees (EAGLE-3's low, middle and high feature).

    Raises DraftMismatchError below 8 layers, where two of the three would be the same.
    """
    if num_layers < 8:
        raise DraftMismatchError(f"the target has {num_layers} layers; EAGLE-3 features need at least 8")
    return 2, num_layers // 2, num_layers - 3


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Shapes of a draft; `hidden_size`, `vocab_size` and `max_position_embeddings` are the target's."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    fc_norm: bool = False
    """Whether each of the three features has its own norm before `fc`."""
    norm_before_fc: bool = False
    """Whether one norm covers the three features together before `fc`."""
    norm_output: bool = False
    """Whether the layer's output is fed back after the final norm, rather than before it."""
    norm_before_residual: bool = False
    """Whether the layer's residual is the feature after `hidden_norm`, rather than the feature itself."""

    @classmethod
    def for_target(
        cls, target: dict[str, Any], *, draft_vocab_size: int, intermediate_size: int | None = None
    ) -> DraftConfig:
        """Derive the draft's shapes from the target's Hugging Face `config.json`, parsed into a dict.

        The MLP is as wide as the target's unless `intermediate_size` says otherwise.
        """
        num_heads = int(target["num_attention_heads"])
        rope = rope_of(target)
        # Of a target with several kinds of attention: the draft attends to everything.
        rope = rope.get("full_attention") or rope
        return cls(
            hidden_size=target["hidden_size"],
            intermediate_size=intermediate_size or target["intermediate_size"],
            num_attention_heads=num_heads,
            num_key_value_heads=target.get("num_key_value_heads") or num_heads,
            head_dim=target.get("head_dim") or target["hidden_size"] // num_heads,
            vocab_size=target["vocab_size"],
            draft_vocab_size=min(draft_vocab_size, target["vocab_size"]),
            # SGLang starts no draft whose window is shorter than the target's context.
            max_position_embeddings=max(context_length(target), target["max_position_embeddings"]),
            rms_norm_eps=target.get("rms_norm_eps", 1e-5),
            rope_theta=float(rope.get("rope_theta") or target.get("rope_theta") or 10_000.0),
        )

    def to_dict(self) -> dict[str, Any]:
        """Fields by name, without switches that are off, so that config.json of a plain draft has none."""
        return {name: value for name, value in asdict(self).items() if value is not False}


@lru_cache(maxsize=1)
@torch.inference_mode(mode=False)
def _rotation(theta: float, head_dim: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine [length, h]. A process's drafts share them: for a million positions they take 1 GiB."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    positions = torch.arange(length, dtype=torch.float64, device="cpu")
    angle = positions[:, None] * theta**-exponent
    return angle.cos().float().repeat(1, 2).to(device), angle.sin().float().repeat(1, 2).to(device)


class RotaryEmbedding(nn.Module):
    """Cosine and sine tables of rotary position embedding, rotate-half layout (as Llama in Hugging Face)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DraftConfig, device: torch.device | str = "cpu") -> None:
        super().__init__()
        # Drafting runs past the last committed position: a margin covers that at the context limit.
        length = config.max_position_embeddings + 64
        cos, sin = _rotation(config.rope_theta, config.head_dim, length, torch.device(device))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor, positions_BT: Tensor) -> Tensor:
        """Rotate x [B, heads, T, h] to its absolute positions."""
        cos = self.cos[positions_BT].unsqueeze(1).to(x.dtype)
        sin = self.sin[positions_BT].unsqueeze(1).to(x.dtype)
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin


class DraftAttention(nn.Module):
    """Grouped-query attention whose inputs are the embedding and the feature side by side (width 2d)."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, heads, groups = 2 * config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(width, heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, groups * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, groups * config.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x_BTw: Tensor, positions_BT: Tensor, rotary: RotaryEmbedding, attend: Attend) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.view(*y.shape[:2], -1, self.head_dim).transpose(1, 2)

        query = rotary(heads(self.q_proj(x_BTw)), positions_BT)
        key = rotary(heads(self.k_proj(x_BTw)), positions_BT)
        out = attend(query, key, heads(self.v_proj(x_BTw)))
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class DraftMLP(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class DraftLayer(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMLP(config)
        self._adds_to_normed = config.norm_before_residual

    def forward(
        self, embed_BTd: Tensor, feature_BTd: Tensor, positions_BT: Tensor, rotary: RotaryEmbedding, attend: Attend
    ) -> Tensor:
        normed_BTd = self.hidden_norm(feature_BTd)
        x = torch.cat([self.input_layernorm(embed_BTd), normed_BTd], -1)
        residual_BTd = normed_BTd if self._adds_to_normed else feature_BTd
        hidden = residual_BTd + self.self_attn(x, positions_BT, rotary, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


class Eagle3Draft(nn.Module):
    """One EAGLE-3 draft head.

    At position t it reads the embedding of token t+1 and the target's feature of position t, and predicts token t+2.
    Deeper proposals feed the network's own output back in place of the feature.

    `embed` is the target's embedding [V, d]: shared, frozen, never saved. `d2t` [D] int64 maps a draft id to its
    *offset*: target id = draft id + d2t[draft id] (SGLang's convention). It never changes within a lineage.
    """

    embed: Tensor
    d2t: Tensor

    def __init__(self, config: DraftConfig, embed: Tensor, d2t: Tensor) -> None:
        super().__init__()
        if embed.shape != (config.vocab_size, config.hidden_size):
            raise DraftMismatchError(f"embedding is {tuple(embed.shape)}, the draft expects the target's [V, d]")
        if d2t.shape != (config.draft_vocab_size,):
            raise DraftMismatchError(f"d2t has {d2t.numel()} rows, the draft vocabulary {config.draft_vocab_size}")
        self.config = config
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                nn.RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(NUM_AUX_LAYERS)
            )
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(NUM_AUX_LAYERS * config.hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(NUM_AUX_LAYERS * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = DraftLayer(config)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = RotaryEmbedding(config, embed.device)
        self.register_buffer("embed", embed, persistent=False)
        self.register_buffer("d2t", d2t, persistent=False)

    @property
    def target_ids(self) -> Tensor:
        """[D] int64: the target id of every draft id."""
        return torch.arange(self.config.draft_vocab_size, device=self.d2t.device) + self.d2t

    def read(self, aux_BTw: Tensor) -> Tensor:
        """The three target features [B, T, 3d] as `fc` reads them: after the draft's norms for them, if it has any."""
        aux_BTw = aux_BTw.to(self.norm.weight.dtype)
        if self.config.norm_before_fc:
            aux_BTw = self.input_norm(aux_BTw)
        if self.config.fc_norm:
            parts = aux_BTw.chunk(NUM_AUX_LAYERS, -1)
            aux_BTw = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return aux_BTw

    def fuse(self, aux_BTw: Tensor) -> Tensor:
        """Reduce the three target features [B, T, 3d] to one [B, T, d]."""
        return self.fc(self.read(aux_BTw))  # type: ignore[no-any-return]

    def forward(self, tokens_BT: Tensor, feature_BTd: Tensor, positions_BT: Tensor, attend: Attend) -> Tensor:
        """Run the layer once; returns the next feature [B, T, d], as it is fed back."""
        embed = F.embedding(tokens_BT, self.embed).to(feature_BTd.dtype)
        output: Tensor = self.midlayer(embed, feature_BTd, positions_BT, self.rotary, attend)
        return self.norm(output) if self.config.norm_output else output

    def logits(self, feature: Tensor) -> Tensor:
        """Logits over the draft vocabulary [..., D] from what `forward` returned [..., d]."""
        return self.lm_head(feature if self.config.norm_output else self.norm(feature))  # type: ignore[no-any-return]


def is_fast(device: torch.device) -> bool:
    """Whether bfloat16 matrix products are fast on a device. On a CPU they need oneDNN with AVX-512 or AVX-NE-CONVERT:
    PyTorch's own loop takes several times as long as float32.
    """
    if device.type != "cpu":
        return True
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def autocast(device: torch.device, *, is_wanted: bool) -> torch.autocast:
    """Autocast matrix products to bfloat16 if that is wanted and fast."""
    return torch.autocast(device.type, torch.bfloat16, enabled=is_wanted and is_fast(device))
