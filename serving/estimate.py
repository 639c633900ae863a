"""Speedup as a cost model sees it: committed tokens over what rounds cost. A forecast beside the measured speedup.

It needs no control round at the moment, follows every change at once, and knows nothing of what the model leaves out:
queues, prefills, interruptions. The two are never mixed.
"""

from __future__ import annotations

from collections import deque

from speculator.proposals.depth import RoundCosts

DEPTH_MODEL = "accept_length_over_round_costs"
PLAN_MODEL = "planned_rounds"
_KEPT_ROUNDS = 2000


class PlannedSpeedup:
    """For rounds that were planned by what they are expected to take. `add` is for the thread that decodes.

    With n_r tokens that round r of batch size b_r committed, its expected time T_r and that of a plain round V_r:

        estimate = Σ n_r · V_r / b_r / Σ T_r
    """

    def __init__(self) -> None:
        self._rounds: deque[tuple[float, float]] = deque(maxlen=_KEPT_ROUNDS)

    def add(self, *, batch: int, committed: int, expected_s: float, plain_s: float) -> None:
        self._rounds.append((committed * plain_s / batch, expected_s))

    def ratio(self) -> float | None:
        """For any thread; None before the first round."""
        rounds = list(self._rounds)
        return sum(plain for plain, _ in rounds) / sum(planned for _, planned in rounds) if rounds else None


class EstimatedSpeedup:
    """For rounds at a depth that was chosen for many of them. `add` is for the thread that decodes, `ratio` for any.

    With n_bγ of the last rounds at batch size b and depth γ, their accept length L_γ and the median times T(b, γ):

        estimate = Σ n_bγ · L_γ · T(b, 0) / Σ n_bγ · T(b, γ)
    """

    def __init__(self, costs: RoundCosts) -> None:
        self._costs = costs
        self._rounds: deque[tuple[int, int, float]] = deque(maxlen=_KEPT_ROUNDS)

    def add(self, *, batch: int, depth: int, committed: int) -> None:
        """A round that is no control round; its time is told to the costs."""
        self._rounds.append((batch, depth, committed / batch))

    def ratio(self) -> float | None:
        """None until a round's time is known with and without drafting."""
        sums: dict[tuple[int, int], tuple[int, float]] = {}
        for batch, depth, length in list(self._rounds):
            count, total = sums.get((batch, depth), (0, 0.0))
            sums[batch, depth] = count + 1, total + length
        plain_s = drafted_s = 0.0
        for (batch, depth), (count, total) in sums.items():
            plain, drafted = self._costs.seconds(batch, 0), self._costs.seconds(batch, depth)
            if plain is not None and drafted is not None:
                plain_s += total * plain
                drafted_s += count * drafted
        return plain_s / drafted_s if drafted_s else None
