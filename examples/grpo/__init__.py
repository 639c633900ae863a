"""GRPO with TRL, whose rollouts come from a Slipstream server that learns to draft for the policy as it moves."""
