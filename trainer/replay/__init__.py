"""Traces in the trainer: read from the stream, admitted, kept, drawn for batches, and forgotten."""
