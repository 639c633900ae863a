"""What SGLang's decode steps propose: the head's chains, earlier text, or nothing, and how much of it."""
