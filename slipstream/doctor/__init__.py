"""Checks of `slipstream doctor`, one module a subject; each check yields findings."""
