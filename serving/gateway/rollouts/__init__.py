"""`/v1/rollouts`: groups of samples, streamed back as they end, and their rewards."""
