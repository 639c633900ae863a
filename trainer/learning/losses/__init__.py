"""Losses that a training step may minimise: a file for each family, and `LossMix`, which combines them."""
