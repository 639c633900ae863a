"""What SGLang's decode steps add up to since its start, as the plugin reports it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

_MODES = ("speculative", "control")


class RoundTally:
    """Written by the scheduler's thread, read by the follower's."""

    def __init__(self) -> None:
        self._rounds, self._tokens = dict.fromkeys(_MODES, 0), dict.fromkeys(_MODES, 0)
        self._seconds = dict.fromkeys(_MODES, 0.0)
        self._proposals, self._accepted = Counter[int](), Counter[int]()

    def add(self, *, drafted: bool, depth: int, seconds: float, accepted: Sequence[int]) -> None:
        """A step with `depth` proposals for each request, of which so many were accepted."""
        mode = "speculative" if drafted else "control"
        self._rounds[mode] += 1
        self._seconds[mode] += seconds
        self._tokens[mode] += len(accepted) + sum(accepted)
        for position in range(1, depth + 1):
            self._proposals[position] += len(accepted)
            self._accepted[position] += sum(count >= position for count in accepted)

    def report(self) -> dict[str, str]:
        """Fields of the engine's report, each `name=count,…`."""
        return {
            "rounds": _counts(self._rounds),
            "decode_ms": _counts({mode: round(1000 * seconds) for mode, seconds in self._seconds.items()}),
            "round_tokens": _counts(self._tokens),
            # Copied in one piece: the other thread may be adding a position.
            "proposals": _counts(self._proposals.copy()),
            "accepted": _counts(self._accepted.copy()),
        }


def _counts(counts: Mapping[str, int] | Mapping[int, int]) -> str:
    return ",".join(f"{name}={count}" for name, count in counts.items())
