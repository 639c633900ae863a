"""`slipstream demo`: traffic, report and plot of the loop on one machine."""

TENANTS = tuple(f"tenant-{number:02}" for number in range(1, 13))
"""Who ask, each about topics of its own."""
