"""GRPO with TRL. A Slipstream server generates the rollouts, and its draft head is trained to follow the policy."""
