"""Text that engines share while they answer samples of one prompt group."""
