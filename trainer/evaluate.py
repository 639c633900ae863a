"""Offline acceptance: what a draft would commit a verification, had it served the answers that traces hold.

The text does not depend on the draft (speculator/draft/verification.py), so a held-out trace can be decoded again:
every answer position is asked for the probability that the draft's proposal there is accepted, and the rounds that
follow from it are counted in expectation (speculator/acceptance.py). For greedy requests that is the count itself.

The engine ends a chain where its confidence, the draft's probability that the proposal is reached and accepted, falls
below `min_confidence`. For one running request that is reproduced exactly: on the path that is accepted the proposals
are the text, so the confidence at step k is Π_{i ≤ k} q(text token). In a batch the engine averages it over the running
requests, which a trace does not name; confident chains then end later and others sooner than predicted here. Control
rounds (depth 0) are no part of it, as they are none of the live figure.

Shape letters: N base positions, K = depth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from speculator.acceptance import Acceptance, coupled_acceptance, expected_rounds
from speculator.draft.eagle3 import Eagle3Draft
from trainer.batch import Batch, Example, Window, pack
from trainer.unroll import unroll

# Attention grows with the square of a batch, and so does its mask.
_MAX_BASES = 512
_ALL_CONTEXT = 1 << 31


def predict_acceptance(
    draft: Eagle3Draft, examples: Iterable[Example], *, depths: Sequence[int], min_confidence: float = 0.0
) -> dict[int, Acceptance]:
    """Acceptance over the answers of `examples` with chains of at most each of the `depths`.

    The draft reads the whole kept prompt as context, as in service.
    """
    totals = {depth: Acceptance() for depth in depths}
    for example in examples:
        accept_NK, labelled_N = _decode_again(draft, example, depth=max(depths), min_confidence=min_confidence)
        for depth in depths:
            totals[depth] += expected_rounds(accept_NK, labelled_N, depth)
    return totals


def _decode_again(draft: Eagle3Draft, example: Example, *, depth: int, min_confidence: float) -> tuple[Tensor, Tensor]:
    """`accept_probabilities` of the whole answer, a long one window by window."""
    greedy = example.sampling.temperature == 0
    parts = [(torch.zeros(0, depth, dtype=torch.float64), torch.zeros(0, dtype=torch.bool))]
    for start in range(example.answer_base, example.num_bases, _MAX_BASES):
        window = Window(example=example, start=start, num_bases=min(example.num_bases - start, _MAX_BASES))
        batch = pack([window], max_context=_ALL_CONTEXT).to(draft.embed.device)
        parts.append(accept_probabilities(draft, batch, depth=depth, min_confidence=min_confidence, greedy=greedy))
    return torch.cat([accept for accept, _ in parts]), torch.cat([labelled for _, labelled in parts])


@torch.no_grad()
def accept_probabilities(
    draft: Eagle3Draft, batch: Batch, *, depth: int, min_confidence: float, greedy: bool
) -> tuple[Tensor, Tensor]:
    """([N, depth] float64 P(proposal k of the chain from base n is verified and accepted, once those before it are),
    [N] bool the base has a label), both on the CPU. All of the batch's requests are greedy, or all sampled. What is
    not a number, because weights or features overflow, accepts nothing.
    """
    num_bases = len(batch.rows)
    device = batch.rows.device
    accept_NK = torch.zeros(num_bases, depth, dtype=torch.float64, device=device)
    labelled_N = torch.zeros(num_bases, dtype=torch.bool, device=device)
    confidence_N = torch.zeros(num_bases, device=device)
    least = math.log(min_confidence) if min_confidence else -math.inf
    # A greedy chain is followed while it is right; a sampled one may be right anywhere.
    wanted_NK = None if greedy else torch.ones(num_bases, depth, dtype=torch.bool, device=device)
    for proposals in unroll(draft, batch, num_steps=depth, wanted_NK=wanted_NK):
        chains = proposals.chains
        labels = batch.labels[proposals.label_rows]
        logits_SD = labels.tempered(proposals.logits)
        text_S = batch.draft_ids[proposals.label_rows + 1]
        accept_S = proposals.hits if greedy else coupled_acceptance(logits_SD, labels, text_S)
        chosen_S1 = text_S.clamp_min(0)[:, None]
        confidence_N[chains] += logits_SD.gather(1, chosen_S1)[:, 0] - logits_SD.logsumexp(-1)
        sure_S = accept_S.double() * (confidence_N[chains] >= least)
        accept_NK[chains, proposals.step] = sure_S.nan_to_num(0.0, posinf=0.0)
        if proposals.step == 0:
            labelled_N[chains] = True
    return accept_NK.cpu(), labelled_N.cpu()
