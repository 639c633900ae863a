"""`/v1/rollouts`: groups of samples, streamed back as they end, and the rewards of those."""
