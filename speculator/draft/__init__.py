"""The EAGLE-3 draft network, its checkpoints, and how the target verifies what it proposes."""
