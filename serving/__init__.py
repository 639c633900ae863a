"""Serving: the gateway, the engines behind it, and what happens between two decode steps."""
