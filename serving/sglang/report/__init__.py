"""What the plugin reports through Redis, and how the gateway reads it."""
