"""The trainer process: reads traces, trains the draft head, gates candidates and publishes them."""
