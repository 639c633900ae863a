"""A target whose weights change while it serves."""
