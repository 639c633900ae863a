"""The OpenAI-compatible endpoints: validate a request, run it on the engine, format the answer. No torch."""
