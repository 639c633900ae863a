"""The OpenAI protocol in front of an engine of this process: bodies, generations, streams."""
