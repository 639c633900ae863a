"""The draft in service: the EAGLE-3 network over its own KV cache, with weights that change in place.

Two classes compute what `speculator.draft.eagle3.Eagle3Draft` does, over fused weights: `FusedDraft` with PyTorch's
operations and `KernelDraft` with our C++ kernels. A pair is the embedding of token t+1 and the feature of position t.
Later pairs need only its key and value, so each pair that is read computes just those; attention and the rest of the
layer run only for the newest pair of a request, where proposals start.

Shape letters: N pairs, B requests, d hidden size, H query heads, G key heads, P = H / G, h head size, L positions,
D draft vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from serving.local.kernels.build import found_kernels
from serving.local.kernels.layers import HugePages, PanelSlots, panels
from serving.local.kernels.library import (
    Block,
    Chain,
    Draft,
    Heads,
    Kernels,
    KernelWindow,
    Layer,
    Norm,
    can_compute,
    pointer,
)
from serving.local.request import DraftSource, shared_draws
from serving.local.target.layers import KVSlots, can_pack, linear, pack
from speculator.draft.checkpoint import check_state, draft_state
from speculator.draft.eagle3 import NUM_AUX_LAYERS, DraftConfig, Eagle3Draft
from speculator.draft.verification import gumbel
from speculator.proposals.planner import ChainRule, DraftStep

_LAYER, _ATTENTION, _MLP = "midlayer", "midlayer.self_attn", "midlayer.mlp"


@dataclass(frozen=True)
class StagedWeights:
    """A verified version, fused and packed like the draft in service, ready to be copied over it."""

    version: int
    tensors: dict[str, Tensor]


class ServingDraft:
    """An `Eagle3Draft` that reads (next token, feature) pairs and proposes chains; used by the engine's thread.

    `version` is stamped on every round. Weights change only through `install`, between two rounds; the keys of running
    requests stay as the older weights computed them, which costs a little acceptance for a moment and never a token.
    """

    def __init__(self, model: Eagle3Draft, version: int, *, num_slots: int, length: int) -> None:
        self._config, self._d2t = model.config, model.d2t
        self._drawn_ids = model.target_ids.cpu().numpy()
        self._wide = torch.float64 if model.norm.weight.dtype == torch.float64 else torch.float32
        kernels = found_kernels() if fits_kernels(model) else None
        self.network: FusedDraft | KernelDraft
        if kernels is None:
            self.network = FusedDraft(model, num_slots=num_slots, length=length)
        else:
            self.network = KernelDraft(model, kernels, num_slots=num_slots, length=length)
        self.cache = self.network.cache
        self.storage = self.network.weights
        """Every weight in service; addresses never change."""
        self._installed = self.stage(version, draft_state(model))
        self.version = version

    def stage(self, version: int, state: dict[str, Tensor]) -> StagedWeights:
        """Check and convert a loaded version; for any thread. Raises DraftFileError or DraftMismatchError."""
        check_state(self._config, self._d2t, state)
        return StagedWeights(version, self.network.fused(state))

    def install(self, staged: StagedWeights) -> None:
        """Copy a staged version into the same storage; on any failure the previous weights are put back."""
        try:
            _copy(self.storage, staged.tensors)
        except BaseException:
            _copy(self.storage, self._installed.tensors)
            raise
        self._installed, self.version = staged, staged.version

    def read(self, pairs: Pairs) -> None:
        """Compute and store the keys and values of pairs."""
        self.network.read(pairs)

    def propose(
        self, pairs: Pairs, reaches: Sequence[float], sources: Sequence[DraftSource], rule: ChainRule
    ) -> list[DraftStep]:
        """Read pairs, and propose a chain after each request's newest one: target ids and the draft's logprobs, under
        the request's own sampling. The rule decides the number of steps, at least one; `reaches` are its starting
        values by request (`ChainRule`).

        Greedy chains are one call of the kernels. With sampled requests each step is a call, because the noise of a
        step takes as long to draw as the step.
        """
        is_greedy = all(source.sampling.temperature == 0 for source in sources)
        steps: list[DraftStep] = []
        while True:
            noise = None if is_greedy else [self._noise(*row) for row in zip(sources, pairs.spans, strict=True)]
            found, output_Bd = self.network.propose(pairs, rule.after(len(steps)), reaches, noise)
            for step in found:
                reaches = rule.reached(len(steps), reaches, step.logprobs)
                steps.append(step)
            if not rule.continues_after(len(steps) - 1, reaches):
                return steps
            pairs = pairs.followed_by(found, output_Bd)

    def _noise(self, source: DraftSource, span: PairSpan) -> Noise:
        """The noise that verification uses at the position after this pair's token."""
        temperature = source.sampling.temperature
        if temperature == 0:
            return Noise(1.0, None)
        uniform_V = shared_draws(source.seed, span.end + 1, self._config.vocab_size)
        # Only the target's distribution is cut by top-k and top-p; a proposal from the draft's tail is just rejected.
        return Noise(temperature, torch.from_numpy(gumbel(uniform_V[self._drawn_ids])).to(self._wide))


def _copy(storage: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, place in storage.items():
            place.copy_(tensors[name])


class PairSpan(NamedTuple):
    """Consecutive pairs of one slot, and the position of the first."""

    slot: int
    start: int
    num_pairs: int

    @property
    def end(self) -> int:
        return self.start + self.num_pairs


class Pairs(NamedTuple):
    """Pairs of several requests for the draft to read, at least one each, span after span."""

    tokens: Sequence[int]
    """For each pair at position t: token t+1."""
    spans: Sequence[PairSpan]
    features: Tensor
    """The target's features [S, L, 3d] by slot and position, or the draft's own output [B, d]."""

    def followed_by(self, steps: Sequence[DraftStep], output_Bd: Tensor) -> Pairs:
        """The next pair of each request, after the proposed `steps`."""
        spans = [PairSpan(one.slot, one.end + len(steps) - 1, 1) for one in self.spans]
        return Pairs(steps[-1].ids, spans, output_Bd)


class Noise(NamedTuple):
    """Sampling at one request's next position: temperature and Gumbel noise [D]; greedy: 1 and None."""

    temperature: float
    gumbel: Tensor | None


class FusedDraft:
    """A draft in PyTorch operations, over fused weights; on a CPU in bfloat16 they are packed.

    Query heads are ordered by index in the group first, group second, as attention over slots needs them.
    """

    def __init__(self, model: Eagle3Draft, *, num_slots: int, length: int) -> None:
        config = self._config = model.config
        self.dtype, self.device = model.norm.weight.dtype, model.norm.weight.device
        self.num_queries, self.num_groups, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self._embed, self._target_ids = model.embed.to(self.dtype), model.target_ids
        like = model.norm.weight
        self.cache = KVSlots(1, num_slots, config.num_key_value_heads, length, config.head_dim, like)
        self._positions = torch.arange(length, device=like.device)
        left, right = model.rotary.sin.chunk(2, -1)
        rotation = torch.stack([model.rotary.cos, torch.cat([-left, right], -1)], 1)
        self._rotation = rotation.to(self.dtype)  # [positions, 2, h]: cosine and signed sine
        self._wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        self._floors = norm_floors(config, self._wide, self.device)
        self.weights = self.fused(dict(model.named_parameters()))
        """By name; only ever changed in place."""

    @torch.no_grad()
    def fused(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a draft file in the form of `weights`, in memory of their own; for any thread."""
        norms = fused_norms(state, self._config, self._wide)
        return {
            **{name: self._matrix(weight) for name, weight in fused_matrices(state, self._config).items()},
            **{name: norm.to(self.device) for name, norm in norms.items()},
        }

    def read(self, pairs: Pairs) -> None:
        """Keep the keys and values of pairs."""
        self._keep(pairs, self._reduced(pairs))

    def propose(
        self, pairs: Pairs, rule: ChainRule, reaches: Sequence[float], noise: Sequence[Noise] | None
    ) -> tuple[list[DraftStep], Tensor]:
        """Read pairs and compute at least one of the rule's steps; returns them and the output [B, d] of the last.
        `noise` is that of the first step; None if all requests are greedy.
        """
        output_Bd = self._layer(pairs)
        return [self._draw(self._logits(output_Bd), noise)], output_Bd

    def _reduced(self, pairs: Pairs) -> Tensor:
        """The features of pairs: three of the target's reduced to one [N, d]."""
        if pairs.features.ndim == 2:
            return pairs.features
        aux_Nw = torch.cat([pairs.features[one.slot, one.start : one.end] for one in pairs.spans]).to(self.dtype)
        read_Nw = read_features(aux_Nw, self._config, self.weights, self._floors)
        return linear(read_Nw, self.weights["fc"])

    def _draw(self, logits_BD: Tensor, noise: Sequence[Noise] | None) -> DraftStep:
        sums_BD = logits_BD = logits_BD.to(self._wide)
        if noise is not None:
            logits_BD = logits_BD / logits_BD.new_tensor([one.temperature for one in noise])[:, None]
            sums_BD = torch.stack(
                [
                    row if one.gumbel is None else row + one.gumbel.to(row)
                    for row, one in zip(logits_BD, noise, strict=True)
                ]
            )
        # Not argmax: on CPU it is slower.
        chosen_B1 = sums_BD.max(-1, keepdim=True).indices
        logprobs_B = logits_BD.log_softmax(-1).gather(-1, chosen_B1)[:, 0]
        return DraftStep(self._target_ids[chosen_B1[:, 0]].tolist(), logprobs_B.tolist())

    def _keep(self, pairs: Pairs, feature_Nd: Tensor) -> Tensor:
        """Store keys and values of pairs; queries, keys and values [N, H + 2G, h]."""
        index = [
            pairs.tokens,
            [span.slot for span in pairs.spans for _ in range(span.num_pairs)],
            [position for span in pairs.spans for position in range(span.start, span.end)],
        ]
        ids_N, slots_N, positions_N = torch.tensor(index, device=self.device)
        qkv_NHh = self._project(ids_N, feature_Nd, positions_N)
        self.cache.write(0, self.cache.lines(slots_N, positions_N[:, None]), qkv_NHh[:, self.num_queries :])
        return qkv_NHh

    def _layer(self, pairs: Pairs) -> Tensor:
        """Read pairs; returns the layer's output [B, d] at the last pair of each span."""
        feature_Nd, spans = self._reduced(pairs), pairs.spans
        qkv_NHh = self._keep(pairs, feature_Nd)
        lengths = [span.end for span in spans]
        if len(feature_Nd) > len(spans):
            ends = itertools.accumulate(span.num_pairs for span in spans)
            newest_B = torch.tensor([end - 1 for end in ends], device=self.device)
            feature_Nd, qkv_NHh = feature_Nd[newest_B], qkv_NHh[newest_B]
        if self._config.norm_before_residual:
            feature_Nd = self._norm(feature_Nd, self.weights["pair_norm"][1])
        longest = max(lengths)
        ((keys, values),) = self.cache.read(slice(spans[0].slot, spans[-1].slot + 1), longest)
        mask_B11L = None
        if min(lengths) < longest:
            length_B111 = torch.tensor(lengths, device=self.device)[:, None, None, None]
            mask_B11L = self._positions[:longest] < length_B111
        attended_Bw = self._attend(qkv_NHh[:, : self.num_queries], keys, values, mask_B11L)
        return self._finish(feature_Nd, attended_Bw)

    def _project(self, tokens_N: Tensor, feature_Nd: Tensor, positions_N: Tensor) -> Tensor:
        """Queries, keys and values [N, H + 2G, h] of pairs, rotated to their positions."""
        pair_N2d = torch.cat([F.embedding(tokens_N, self._embed), feature_Nd], -1).view(len(tokens_N), 2, -1)
        normed = self._norm(pair_N2d, self.weights["pair_norm"]).flatten(1)
        qkv_NHh = linear(normed, self.weights["qkv"]).view(len(tokens_N), -1, self.head_dim)
        rotated_NHh = qkv_NHh[:, : self.num_queries + self.num_groups]
        swapped_NHh = rotated_NHh.view(*rotated_NHh.shape[:2], 2, -1).flip(2).flatten(2)
        cos, signed_sin = self._rotation.index_select(0, positions_N).chunk(2, 1)
        torch.addcmul(rotated_NHh * cos, swapped_NHh, signed_sin, out=rotated_NHh)
        return qkv_NHh

    def _attend(self, q_BHh: Tensor, keys_BGLh: Tensor, values_BGLh: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of one query a request, [B, H · h]."""
        q_BGPh = q_BHh.view(len(q_BHh), -1, self.num_groups, self.head_dim).transpose(1, 2)
        out_BGPh = F.scaled_dot_product_attention(q_BGPh, keys_BGLh, values_BGLh, attn_mask=mask)
        return out_BGPh.transpose(1, 2).reshape(len(q_BHh), -1)

    def _finish(self, residual_Bd: Tensor, attended_Bw: Tensor) -> Tensor:
        """The layer's output [B, d], as it is fed back."""
        hidden_Bd = residual_Bd + linear(attended_Bw, self.weights["out"])
        normed_Bd = self._norm(hidden_Bd, self.weights["mlp_norm"])
        gate, up = linear(normed_Bd, self.weights["gate_up"]).chunk(2, -1)
        output_Bd = hidden_Bd + linear(F.silu(gate).mul_(up), self.weights["down"])
        return self._norm(output_Bd, self.weights["norm"]) if self._config.norm_output else output_Bd

    def _logits(self, output_Bd: Tensor) -> Tensor:
        """Logits over the draft vocabulary [B, D]."""
        normed_Bd = output_Bd if self._config.norm_output else self._norm(output_Bd, self.weights["norm"])
        return linear(normed_Bd, self.weights["head"])

    def _norm(self, x: Tensor, scaled_weight: Tensor) -> Tensor:
        return normed(x, scaled_weight, self._floors.feature)

    def _matrix(self, weight: Tensor) -> Tensor:
        if self.device.type == "cpu" and self.dtype == torch.bfloat16 and can_pack():
            return pack(weight.to("cpu", torch.bfloat16))
        return weight.to(self.device, self.dtype, copy=True)


def fused_matrices(state: Mapping[str, Tensor], config: DraftConfig) -> dict[str, Tensor]:
    """A draft file's matrices in fused form, by name in `weights`; query heads by index in the group first."""
    heads = torch.arange(config.num_attention_heads * config.head_dim)
    order = heads.view(config.num_key_value_heads, -1, config.head_dim).transpose(0, 1).flatten()
    return {
        "fc": state["fc.weight"],
        "qkv": torch.cat(
            [
                state[f"{_ATTENTION}.q_proj.weight"][order],
                state[f"{_ATTENTION}.k_proj.weight"],
                state[f"{_ATTENTION}.v_proj.weight"],
            ]
        ),
        "out": state[f"{_ATTENTION}.o_proj.weight"][:, order],
        "gate_up": torch.cat([state[f"{_MLP}.gate_proj.weight"], state[f"{_MLP}.up_proj.weight"]]),
        "down": state[f"{_MLP}.down_proj.weight"],
        "head": state["lm_head.weight"],
    }


def fused_norms(state: Mapping[str, Tensor], config: DraftConfig, wide: torch.dtype) -> dict[str, Tensor]:
    """w√d of every norm, computed in `wide`, as `normed` wants it."""
    norms = {
        **({"input_norm": state["input_norm.weight"]} if config.norm_before_fc else {}),
        **(
            {"fc_norm": torch.stack([state[f"fc_norm.{number}.weight"] for number in range(3)])}
            if config.fc_norm
            else {}
        ),
        "pair_norm": torch.stack([state[f"{_LAYER}.input_layernorm.weight"], state[f"{_LAYER}.hidden_norm.weight"]]),
        "mlp_norm": state[f"{_LAYER}.post_attention_layernorm.weight"],
        "norm": state["norm.weight"],
    }
    return {name: weight.to(wide) * math.sqrt(weight.shape[-1]) for name, weight in norms.items()}


class NormFloors(NamedTuple):
    """√(width · ε) of the norms of one feature, and of the three side by side."""

    feature: Tensor
    three: Tensor


def norm_floors(config: DraftConfig, wide: torch.dtype, device: torch.device) -> NormFloors:
    """The `floor` arguments of `normed`, to go with `fused_norms`."""
    widths = torch.tensor([1, NUM_AUX_LAYERS], dtype=torch.float64) * config.hidden_size
    return NormFloors(*(widths * config.rms_norm_eps).sqrt().to(device, wide))


def read_features(aux_Nw: Tensor, config: DraftConfig, weights: Mapping[str, Tensor], floors: NormFloors) -> Tensor:
    """The three target features [N, 3d] as `fc` reads them."""
    if config.norm_before_fc:
        aux_Nw = normed(aux_Nw, weights["input_norm"], floors.three)
    if config.fc_norm:
        features = aux_Nw.view(len(aux_Nw), NUM_AUX_LAYERS, -1)
        aux_Nw = normed(features, weights["fc_norm"], floors.feature).flatten(1)
    return aux_Nw


def normed(x: Tensor, scaled_weight: Tensor, floor: Tensor) -> Tensor:
    """x [..., d] / √(|x|²/d + ε) · w, in the precision of w√d; `floor` is √(dε)."""
    # As x · w√d / √(|x|² + dε): the fewest operations on a CPU.
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=scaled_weight.dtype)
    return (x * scaled_weight).div_(length.hypot_(floor)).to(x.dtype)


class KernelDraft:
    """As `FusedDraft`, computed by the C++ kernels."""

    def __init__(self, model: Eagle3Draft, kernels: Kernels, *, num_slots: int, length: int) -> None:
        config = model.config
        self._config, self._kernels = config, kernels
        self._embed, self._target_ids = model.embed.to(torch.bfloat16).contiguous(), model.target_ids.contiguous()
        self._rotation = model.rotary.cos.float().contiguous(), model.rotary.sin.float().contiguous()
        widths = torch.tensor([1, NUM_AUX_LAYERS]) * config.hidden_size
        self._floors = {int(width): width * torch.tensor(config.rms_norm_eps) for width in widths}
        self.cache = PanelSlots(1, num_slots, config.num_key_value_heads, length, config.head_dim)
        self._output = torch.zeros(num_slots, config.hidden_size, dtype=torch.bfloat16)
        state = dict(model.named_parameters())
        weights = self.fused(state)
        pages = HugePages([weight.nbytes for weight in weights.values()])
        self.weights = {name: pages.copy_in(weight) for name, weight in weights.items()}
        """By name; only ever changed in place."""
        layers = {
            name: Layer(*reversed(matrix.shape), pointer(self.weights[name]), None, kernels.in_pairs)
            for name, matrix in fused_matrices(state, config).items()
        }
        heads = Heads(
            config.num_attention_heads // config.num_key_value_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.head_dim**-0.5,
            Norm(),
            Norm(),
        )
        embedding_norm, *norms = map(self._norm_of, (*self.weights["pair_norm"], self.weights["mlp_norm"]))
        three_norm = self._norm_of(self.weights["input_norm"]) if config.norm_before_fc else Norm()
        feature_norms = map(self._norm_of, self.weights["fc_norm"]) if config.fc_norm else ()
        self._draft = Draft(
            embeddings=pointer(self._embed),
            three_norm=three_norm,
            feature_norms=(Norm * NUM_AUX_LAYERS)(*feature_norms),
            fc=layers["fc"],
            embedding_norm=embedding_norm,
            block=Block(*norms, heads, *(layers[name] for name in ("qkv", "out", "gate_up", "down"))),
            norm=self._norm_of(self.weights["norm"]),
            head=layers["head"],
            target_ids=pointer(self._target_ids),
            feeds_normed=config.norm_output,
            adds_to_normed=config.norm_before_residual,
        )

    @torch.no_grad()
    def fused(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a draft file in the form of `weights`, in memory of their own; for any thread."""
        matrices, norms = fused_matrices(state, self._config), fused_norms(state, self._config, torch.float32)
        return {
            **{name: panels(weight.to("cpu", torch.bfloat16)) for name, weight in matrices.items()},
            **{name: norm.to("cpu") for name, norm in norms.items()},
        }

    def read(self, pairs: Pairs) -> None:
        """As `FusedDraft.read`."""
        self._run(Chain(), pairs)

    def propose(
        self, pairs: Pairs, rule: ChainRule, reaches: Sequence[float], noise: Sequence[Noise] | None
    ) -> tuple[list[DraftStep], Tensor]:
        """As `FusedDraft.propose`; computes all steps if every request is greedy. The returned output is a buffer that
        the next call overwrites.
        """
        chain = Chain.of(rule if noise is None else rule.first_step, reaches, self._output)
        if noise is not None:
            chain.sample(*zip(*noise, strict=True))
        self._run(chain, pairs)
        return chain.steps(len(reaches)), self._output

    def _run(self, chain: Chain, pairs: Pairs) -> None:
        tokens, spans, features = pairs
        assert 0 <= min(tokens) <= max(tokens) < len(self._embed)
        windows, three = [KernelWindow(*span) for span in spans], features if features.ndim == 3 else None
        self._kernels.draft(self._draft, chain, windows, self._rotation, tokens, three, self.cache.storage[0])

    def _norm_of(self, weight: Tensor) -> Norm:
        return Norm(len(weight), pointer(weight), pointer(self._floors[len(weight)]))


def fits_kernels(model: Eagle3Draft) -> bool:
    """Whether the kernels can compute this draft."""
    config, weight = model.config, model.norm.weight
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and can_compute(
            hidden_size=config.hidden_size, intermediate_size=config.intermediate_size, head_dim=config.head_dim
        )
    )
