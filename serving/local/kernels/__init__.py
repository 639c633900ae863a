"""The passes of target and draft in C++, for CPUs with AVX-512 or AVX2, and models that it fits.

A library's call of one product takes longer to prepare than to read a small layer's weights, and a step makes 121 of
them; between two products a step makes seven calls of PyTorch's (benchmarks/results/step.md has the figures). And no
library promises that a token's result does not depend on how many are beside it, which is what makes the text with a
draft the same, bit for bit.
"""
