"""What the trainer can learn from: the buffer of examples, how often each is drawn, and the evaluation sets."""
