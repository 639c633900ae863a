"""Compare losses on your recorded traffic: each learns from the same traces, in the same steps.

python -m examples.replay_study traffic.rec --model DIR_OR_ID --seeds 3 --loss my_loss:focal
"""

import argparse
import sys
from pathlib import Path
from statistics import mean, stdev

from slipstream.models import BUNDLED_MODEL, resolve_model
from slipstream.replay import ReplayOptions, replay

LOSSES = ("cross_entropy=1,log_acceptance=1,step_discount=1", "forward_kl=1", "examples.own_loss:total_variation")


def main(words: list[str] | None = None) -> dict[str, list[float]]:
    """Print and return accept lengths on held-out traces: by loss, one for each seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recording", type=Path)
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="default: every trace about four times")
    parser.add_argument("--loss", action="append", help="compare this loss with the default; may be repeated")
    given = parser.parse_args(words)
    same = {"recordings": [given.recording], "model_dir": resolve_model(given.model), "num_steps": given.steps}
    losses = (LOSSES[0], *given.loss) if given.loss else LOSSES
    lengths: dict[str, list[float]] = {loss: [] for loss in losses}
    # The seed sets the fresh draft, the held-out traces and the order: compare losses only within a seed.
    for seed in range(given.seeds):
        for loss in losses:
            found = replay(ReplayOptions(**same, depths=[1, 2, 3, 4], loss=loss, seed=seed))
            length, skipped = found["accept_length"], found["skipped_steps"]
            warning = f"  {skipped} of {found['steps']} steps skipped, not finite" if skipped else ""
            print(f"seed {seed}: {length:.3f}  {loss}{warning}", file=sys.stderr, flush=True)
            lengths[loss].append(length)
    for loss, own in lengths.items():
        gains = [one / first - 1 for one, first in zip(own, lengths[losses[0]], strict=True)]
        spread = f" ± {stdev(gains):.1%}" if len(gains) > 1 else ""
        print(f"{mean(own):.3f} tokens a verification  {mean(gains):+.1%}{spread}  {loss}")
    return lengths


if __name__ == "__main__":
    main()
