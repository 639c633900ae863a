"""Run the loop as processes, inject faults, and check what must hold then (`benchmarks.chaos`)."""
