"""A loss of your own: a function of the draft's logits and the target's distribution.

    slipstream replay traffic.rec --model DIR_OR_ID --loss examples.own_loss:total_variation
    SLIPSTREAM_TRAINER_LOSS=cross_entropy=1,examples.own_loss:total_variation=0.5 slipstream train --model DIR_OR_ID

MODULE:FUNCTION=WEIGHT is one term of a sum, beside the built-in losses (trainer/learning/losses/mix.py). It is computed
at the states that the draft's chains reach over text that the target has committed.
"""

from __future__ import annotations

from torch import Tensor

from trainer.learning.labels import Labels


def total_variation(logits_SD: Tensor, labels: Labels) -> Tensor:
    """[S]: ½ Σ |p − q|, the probability that rejection sampling rejects a proposal drawn from q.

    S states, D tokens that the draft can propose, K tokens of the target that the trace has kept.
    """
    q_SD = logits_SD.float().softmax(-1)
    # `served` is the distribution that decides acceptance: for a greedy request the likeliest token alone.
    p_SK = labels.served
    # A kept token that the draft cannot propose has p = 0 here and an arbitrary id, and its mass is missing from p.
    q_SK = q_SD.gather(1, labels.draft_ids) * (p_SK > 0)
    rest_S = 1 - q_SK.sum(-1)
    return 0.5 * ((p_SK - q_SK).abs().sum(-1) + rest_S)
