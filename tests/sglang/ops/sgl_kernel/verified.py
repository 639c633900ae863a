"""What follows from a verification: the bonus tokens, the slots that stay, the next input.

Suffixes: B requests, A the most tokens that one verification can commit (draft steps + 1).
"""

from __future__ import annotations

from torch import Tensor


def fill_bonus_tokens_cpu(tokens: Tensor, num_accepted_B: Tensor, out_B: Tensor, stride: int) -> None:
    """The last committed token of each request, whose tokens begin every `stride` entries; the count includes it."""
    last_B = num_accepted_B.long() - 1
    out_B.copy_(tokens.view(-1, stride).gather(1, last_B[:, None])[:, 0])


def fill_accept_out_cache_loc_cpu(accept_index_BA: Tensor, slots: Tensor, out: Tensor) -> None:
    """The slots of all accepted tree nodes, packed into the head of `out`; an index of -1 stands for no node."""
    accepted = accept_index_BA[accept_index_BA >= 0].long()
    out[: accepted.numel()] = slots[accepted].to(out.dtype)


def rotate_input_ids_cpu(
    input_ids: Tensor, start_B: Tensor, lengths_B: Tensor, next_token_B: Tensor, place_B: Tensor | None = None
) -> None:
    """Shift each request's tokens one to the left and write its next token into the last place, or into `place_B`."""
    for index, (start, length) in enumerate(zip(start_B.tolist(), lengths_B.tolist(), strict=True)):
        if length:
            input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
            last = start + length - 1 if place_B is None else int(place_B[index])
            input_ids[last] = next_token_B.flatten()[index]
