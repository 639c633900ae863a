"""The engine's thread from step to step: requests in, prompts read, chunks out."""
