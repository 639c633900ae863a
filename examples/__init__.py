"""Example programs for users of Slipstream."""
