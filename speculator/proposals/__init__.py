"""Proposals of a decode round: suffix drafts, the planner that chooses, and the costs that it measures."""
