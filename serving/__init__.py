"""What answers users: the gateway, the engines behind it, and everything that happens between two decode steps."""
