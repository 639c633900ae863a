"""The OpenAI-compatible endpoints: validates a request, hands it to the engine, formats what comes back. No torch."""
