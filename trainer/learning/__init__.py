"""Learning from a batch: labels, losses, training-time test and the optimizer step."""
