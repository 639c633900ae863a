"""The OpenAI protocol for an engine in this process: bodies, generations, streams."""
