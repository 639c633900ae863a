"""The `slipstream` command: options and output, one module for each group of commands."""
