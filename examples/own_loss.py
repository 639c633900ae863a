"""A loss of your own: a function of the draft's logits and what the target said.

    slipstream replay traffic.rec --model DIR_OR_ID --loss examples.own_loss:total_variation
    SLIPSTREAM_TRAINER_LOSS=cross_entropy=1,examples.own_loss:total_variation=0.5 slipstream train --model DIR_OR_ID

It is one term of a sum: MODULE:FUNCTION=WEIGHT beside the losses that are there (trainer/learning/losses/mix.py). It
sees the states that the draft's chains reach over text that the target has committed.
"""

from __future__ import annotations

from torch import Tensor

from trainer.learning.labels import Labels


def total_variation(logits_SD: Tensor, labels: Labels) -> Tensor:
    """[S]: ½ Σ |p − q|, the chance that a proposal drawn from q is rejected where p decides.

    S states, D tokens that the draft can propose, K tokens of the target that the trace has kept.
    """
    q_SD = logits_SD.float().softmax(-1)
    # `served` is what decides acceptance: of a greedy request the likeliest token alone. Its ids are the draft's own.
    p_SK = labels.served
    # A token that the draft cannot propose has p = 0 here: its id is no one's, and its mass is missing from p.
    q_SK = q_SD.gather(1, labels.draft_ids) * (p_SK > 0)
    rest_S = 1 - q_SK.sum(-1)
    return 0.5 * ((p_SK - q_SK).abs().sum(-1) + rest_S)
