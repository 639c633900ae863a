"""What a step of the trainer may minimise: one file a family of losses, and the mix of them."""
