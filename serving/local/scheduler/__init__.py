"""Scheduling in the engine's thread: admits requests, prefills prompts, decodes, sends chunks."""
