"""Groups of samples of one prompt: what runs next, where, and for how long. Only the driver does I/O."""
