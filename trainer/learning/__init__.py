"""From a batch to new weights: labels, losses, training-time test and the optimizer step."""
