"""Simulated rollout engines for benchmarks/rollout_sim.py."""
