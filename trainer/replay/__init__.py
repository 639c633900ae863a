"""From the stream to what the trainer can learn from: traces are read, admitted, kept, drawn and forgotten."""
