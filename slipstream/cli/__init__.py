"""The `slipstream` command: one module a family of verbs, nothing but options and printing."""
