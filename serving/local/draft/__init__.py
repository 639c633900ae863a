"""The draft in service: the network over its own key/value slots, and its fused form."""
