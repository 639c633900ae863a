"""The live page and its figures; models, health and metrics."""
