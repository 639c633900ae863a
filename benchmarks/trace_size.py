"""Bytes a captured token takes, from the codec itself, beside what the closest public system moves (8d + 8).

    python -m benchmarks.trace_size [--quick] [--json FILE]

Target: at most 0.4 × (8d + 8) bytes a token for an 8B-sized target (d = 4096, K = 64, five proposals a round).
"""

from __future__ import annotations

from benchmarks.common import Target, finish, parser
from speculator.codec import estimated_bytes_per_token

WIDTHS = {"SmolLM2-135M": 576, "1B-sized": 2048, "8B-sized": 4096, "70B-sized": 8192}
TOP_K, NUM_PROPOSALS, ACCEPT_LENGTH = 64, 5, 2.0


def main() -> None:
    arguments = parser("Size of a trace", has_prompts=False, has_model=False).parse_args()
    sizes = {
        name: estimated_bytes_per_token(
            hidden_size=width, top_k=TOP_K, num_proposals=NUM_PROPOSALS, accept_length=ACCEPT_LENGTH
        )
        for name, width in WIDTHS.items()
    }
    shares = {name: size / (8 * WIDTHS[name] + 8) for name, size in sizes.items()}
    rows = [(name, f"{size:10,.0f} bytes a token = {shares[name]:.3f} × (8d + 8)") for name, size in sizes.items()]
    finish(
        rows,
        [Target("share_8b", shares["8B-sized"], 0.4, at_least=False)],
        {"bytes_per_token": {name: round(size, 1) for name, size in sizes.items()}},
        arguments.json,
    )


if __name__ == "__main__":
    main()
