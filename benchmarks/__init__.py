"""Benchmarks: each prints its table last, takes `--quick` and `--json FILE`, and exits 1 when a target falls short."""
