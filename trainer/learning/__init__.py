"""From a batch to new weights: labels, losses, training-time test, the optimizer step, and drift detection."""
