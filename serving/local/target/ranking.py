"""Which tokens are likeliest by a target's logits: by the library where it computes them, elsewhere by PyTorch.

Shape letters: M positions, V vocabulary, K kept tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from serving.local.kernels.library import Kernels


class Ranking:
    """For any thread. Of a whole vocabulary PyTorch's operations take a tenth of a millisecond for the likeliest token
    of a position and three times that for a distribution, ten times what the library does (docs/local-loop.md).
    """

    def __init__(self, kernels: Kernels | None) -> None:
        self._kernels = kernels

    def likeliest(self, logits_MV: Tensor) -> list[int]:
        """The first of the largest of each position."""
        # Not argmax: on CPU it is six times slower in bfloat16.
        ids_M = logits_MV.max(-1).indices if self._kernels is None else self._kernels.likeliest(logits_MV)
        ids: list[int] = ids_M.tolist()
        return ids

    def top(self, logits_MV: Tensor, num_kept: int) -> tuple[np.ndarray, np.ndarray]:
        """The distribution of each position as far as a trace keeps it: int32 ids and float16 log-probabilities [M, K],
        likeliest first.
        """
        if self._kernels is not None:
            ids_MK, logprobs_MK = self._kernels.rank(logits_MV, num_kept)
            return ids_MK.numpy(), logprobs_MK.half().numpy()
        wide = torch.float64 if logits_MV.dtype == torch.float64 else torch.float32
        best = logits_MV.log_softmax(-1, dtype=wide).topk(num_kept, -1)
        return best.indices.int().cpu().numpy(), best.values.half().cpu().numpy()
