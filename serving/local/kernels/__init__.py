"""Forward passes of target and draft in C++, for CPUs with AVX-512 or AVX2, and models that they support.

Reasons: preparing a library's matrix product takes longer than reading a small layer's weights, and a step has 121 of
them, with seven PyTorch calls between two (figures: benchmarks/results/step.md). And no library promises that a token's
result is independent of the batch, which keeps text with a draft bit for bit the same as without.
"""
