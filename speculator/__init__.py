"""The draft model, traces, and what else serving and training share; imports neither service."""
