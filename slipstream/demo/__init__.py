"""`slipstream demo`: serve, learn and measure on one machine; traffic, report and plot."""

TENANTS = tuple(f"tenant-{number:02}" for number in range(1, 13))
"""Tenants of the demo's traffic; each asks about topics of its own."""
