"""The loop as processes, faults that are put into it, and what must be true of it then (`benchmarks.chaos`)."""
